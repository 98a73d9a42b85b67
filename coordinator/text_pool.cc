#include "coordinator/text_pool.h"

#include <sys/resource.h>
#include <unistd.h>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

#include "proto/grpc_status.h"
#include "proto/process/named_thread.h"

namespace kvasir::coordinator {
namespace {

constexpr int kNice = 10;
// Time in which a few of the longest texts are tokenized.
constexpr absl::Duration kRetry = absl::Seconds(5);

}  // namespace

TextPool::~TextPool() {
  {
    kernels::MutexLock lock(mu_);
    stopping_ = true;
  }
  changed_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
}

absl::Status TextPool::Run(size_t bytes, std::function<void()> work) {
  if (bytes <= kShortBytes) {
    work();
    return absl::OkStatus();
  }
  kernels::MutexLock lock(mu_);
  if (bytes_ + bytes > kMostBytes) {
    return proto::WithRetryDelay(
        absl::ResourceExhaustedError(
            absl::StrCat("texts of ", bytes_, " bytes are being tokenized, and this request has ",
                         bytes, "; at most ", kMostBytes, " may be at a time: try again later")),
        kRetry);
  }
  bytes_ += bytes;
  waiting_.push_back({.bytes = bytes, .work = std::move(work)});
  if (threads_.size() < kThreads) {
    threads_.push_back(proto::NamedThread("texts", [this] { RunThread(); }));
  }
  changed_.NotifyOne();
  return absl::OkStatus();
}

void TextPool::RunThread() {
  setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), kNice);
  while (true) {
    Job job = {};
    {
      kernels::MutexLock lock(mu_);
      while (waiting_.empty() && !stopping_) changed_.Wait(mu_);
      if (waiting_.empty()) return;
      job = std::move(waiting_.front());
      waiting_.pop_front();
    }
    job.work();
    job.work = nullptr;
    kernels::MutexLock lock(mu_);
    bytes_ -= job.bytes;
  }
}

}  // namespace kvasir::coordinator
