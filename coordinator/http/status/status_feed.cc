#include "coordinator/http/status/status_feed.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "coordinator/http/transport/error_reply.h"
#include "proto/grpc_status.h"
#include "proto/process/named_thread.h"

namespace kvasir::coordinator {
namespace {

using kernels::MutexLock;

constexpr absl::Duration kRetry = absl::Seconds(5);

}  // namespace

// Gives a client the newest event, if it has not had that. Kept by the client's connection.
class StatusFeed::Listener final : public StreamSource {
 public:
  explicit Listener(StatusFeed& feed) : feed_(feed) {}

  Piece Take() override {
    MutexLock lock(feed_.mu_);
    if (feed_.stopping_) return {.text = "", .last = true};
    if (feed_.newest_ == nullptr || feed_.newest_->number == had_) return {};
    had_ = feed_.newest_->number;
    return {.text = feed_.newest_->text};
  }

 private:
  StatusFeed& feed_;
  int64_t had_ = 0;
};

StatusFeed::StatusFeed(std::function<std::string()> tell, Clock& clock)
    : tell_(std::move(tell)), clock_(clock) {}

StatusFeed::~StatusFeed() {
  Stop();
  if (thread_.joinable()) thread_.join();
}

void StatusFeed::Listen(std::shared_ptr<Exchange> exchange) {
  std::shared_ptr<Listener> listener;
  if (const absl::Status added = Add(exchange, listener); !added.ok()) {
    return exchange->Refuse(added);
  }
  exchange->Stream(listener, "text/event-stream");
  // After Add, because a client that is gone already is told at once.
  exchange->set_on_gone([this, gone = listener.get()](const absl::Status&) { Remove(gone); });
}

absl::Status StatusFeed::Add(const std::shared_ptr<Exchange>& exchange,
                             std::shared_ptr<Listener>& added) {
  MutexLock lock(mu_);
  if (stopping_) return absl::UnavailableError("the server is shutting down");
  if (listeners_.size() >= kMostListeners) {
    return proto::WithRetryDelay(
        absl::ResourceExhaustedError(absl::StrCat(
            kMostListeners, " clients listen to the status, the most that may; close one")),
        kRetry);
  }
  added = std::make_shared<Listener>(*this);
  listeners_.emplace(added.get(), exchange);
  if (!thread_.joinable()) thread_ = proto::NamedThread("status-feed", [this] { Run(); });
  changed_.NotifyAll();
  return absl::OkStatus();
}

void StatusFeed::Remove(const Listener* listener) {
  std::shared_ptr<Exchange> left;  // let go of outside the lock: it may be the last reference
  MutexLock lock(mu_);
  const auto it = listeners_.find(listener);
  if (it == listeners_.end()) return;
  left = std::move(it->second);
  listeners_.erase(it);
  if (!listeners_.empty()) return;
  // Whoever comes next gets an event of its own time, at once.
  newest_ = nullptr;
  due_ = {};
}

void StatusFeed::Stop() {
  std::vector<std::shared_ptr<Exchange>> listening;
  {
    MutexLock lock(mu_);
    if (std::exchange(stopping_, true)) return;
    listening = Listeners();
    listeners_.clear();
    changed_.NotifyAll();
  }
  for (const std::shared_ptr<Exchange>& exchange : listening) exchange->Wake();
}

void StatusFeed::Run() {
  while (AwaitNext()) {
    const std::string data = tell_();
    std::vector<std::shared_ptr<Exchange>> listening;
    {
      MutexLock lock(mu_);
      if (listeners_.empty()) continue;
      newest_ = std::make_shared<const Event>(
          Event{.number = ++told_, .text = absl::StrCat("data: ", data, "\n\n")});
      listening = Listeners();
    }
    for (const std::shared_ptr<Exchange>& exchange : listening) exchange->Wake();
  }
}

bool StatusFeed::AwaitNext() {
  MutexLock lock(mu_);
  while (!stopping_) {
    const TimePoint now = clock_.Now();
    if (listeners_.empty()) {
      changed_.Wait(mu_);
    } else if (now < due_) {
      clock_.Wait(mu_, changed_, due_);
    } else {
      due_ = After(now, kInterval);
      return true;
    }
  }
  return false;
}

std::vector<std::shared_ptr<Exchange>> StatusFeed::Listeners() {
  std::vector<std::shared_ptr<Exchange>> exchanges;
  for (const auto& [listener, exchange] : listeners_) exchanges.push_back(exchange);
  return exchanges;
}

}  // namespace kvasir::coordinator
