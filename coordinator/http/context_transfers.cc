#include "coordinator/http/context_transfers.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "coordinator/contexts/part_frames.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using kernels::MutexLock;

// The frames of an answer. One waits for the client at a time.
class FrameSource final : public StreamSource {
 public:
  // Waits until the client has taken what came before. False when it is gone.
  bool Put(std::string frame, Exchange& exchange) EXCLUDES(mu_) {
    MutexLock lock(mu_);
    while (!frame_.empty() && !is_gone_) changed_.Wait(mu_);
    if (is_gone_) return false;
    frame_ = std::move(frame);
    exchange.Wake();
    return true;
  }
  void End(Exchange& exchange) EXCLUDES(mu_) {
    MutexLock lock(mu_);
    is_over_ = true;
    exchange.Wake();
  }
  void OnGone() EXCLUDES(mu_) {
    MutexLock lock(mu_);
    is_gone_ = true;
    changed_.NotifyAll();
  }
  Piece Take() override EXCLUDES(mu_) {
    MutexLock lock(mu_);
    Piece piece = {.text = std::exchange(frame_, {}), .last = is_over_};
    changed_.NotifyAll();
    return piece;
  }

 private:
  kernels::Mutex mu_;
  kernels::CondVar changed_;
  std::string frame_ GUARDED_BY(mu_);
  bool is_over_ GUARDED_BY(mu_) = false;
  bool is_gone_ GUARDED_BY(mu_) = false;
};

}  // namespace

absl::Status SendExport(Contexts& contexts, const std::string& name, const ContextCaller& by,
                        const std::shared_ptr<Exchange>& exchange) {
  KVASIR_ASSIGN_OR_RETURN(auto transfer, contexts.BeginTransfer());
  const auto source = std::make_shared<FrameSource>();
  v1::ExportContextRequest request;
  request.set_name(name);
  bool began = false;
  const absl::Status sent =
      contexts.Export(*transfer, request, by, [&](const v1::ContextPart& part) {
        if (!std::exchange(began, true)) {
          exchange->set_on_gone([source](const absl::Status&) { source->OnGone(); });
          exchange->Stream(source, "application/octet-stream");
        }
        return source->Put(FrameOf(part), *exchange);
      });
  transfer.reset();  // before the client hears of the end
  if (!began) return sent;
  if (sent.ok()) {
    source->End(*exchange);
  } else {
    exchange->Drop(sent);  // what came is not whole, and must not look so
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::Context> TakeImport(Contexts& contexts, const std::string& name,
                                       const ContextCaller& by, absl::string_view body) {
  KVASIR_ASSIGN_OR_RETURN(const auto transfer, contexts.BeginTransfer());
  const auto read = [&body](size_t bytes, std::string& text) {
    const size_t taken = std::min(bytes, body.size());
    text.append(body.data(), taken);
    body.remove_prefix(taken);
    return taken;
  };
  return contexts.Import(*transfer, name, by, [&read] { return ReadFrame(read); });
}

}  // namespace kvasir::coordinator
