#include "coordinator/request/client_sink.h"

#include <utility>

namespace kvasir::coordinator {

using kernels::MutexLock;

void ClientSink::set_on_cancel(std::function<void(const absl::Status&)> on_cancel) {
  absl::Status cancelled;
  std::function<void(const absl::Status&)> callback;
  {
    MutexLock lock(cancel_mu_);
    on_cancel_ = std::move(on_cancel);
    cancelled = cancelled_;
    callback = on_cancel_;
  }
  if (!cancelled.ok()) callback(cancelled);
}

absl::Status ClientSink::cancelled() {
  MutexLock lock(cancel_mu_);
  return cancelled_;
}

void ClientSink::Cancel(const absl::Status& why) {
  std::function<void(const absl::Status&)> on_cancel;
  {
    MutexLock lock(cancel_mu_);
    if (!cancelled_.ok()) return;
    cancelled_ = why;
    on_cancel = on_cancel_;
  }
  if (on_cancel) on_cancel(why);
}

}  // namespace kvasir::coordinator
