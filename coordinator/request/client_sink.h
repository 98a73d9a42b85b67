// A sink whose client may leave or stop reading: it says so once, whenever that happens. The base
// of every API's sink. Thread-safe.
#pragma once

#include <functional>

#include "absl/status/status.h"

#include "coordinator/request/response_sink.h"
#include "kernels/base/mutex.h"

namespace kvasir::coordinator {

class ClientSink : public ResponseSink {
 public:
  // Sets the function called once, on any thread, when the client is gone, its deadline has passed
  // or it reads too slowly. Called at once when that has happened already.
  void set_on_cancel(std::function<void(const absl::Status&)> on_cancel) EXCLUDES(cancel_mu_);
  // Returns the status that on_cancel was or will be called with; OK while the client waits.
  absl::Status cancelled() EXCLUDES(cancel_mu_);

 protected:
  // Says that nobody waits for the answer any more. The first reason counts.
  void Cancel(const absl::Status& why) EXCLUDES(cancel_mu_);

 private:
  kernels::Mutex cancel_mu_;
  std::function<void(const absl::Status&)> on_cancel_ GUARDED_BY(cancel_mu_);
  absl::Status cancelled_ GUARDED_BY(cancel_mu_);
};

}  // namespace kvasir::coordinator
