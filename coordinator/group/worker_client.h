// One stream to one worker: the seam between the worker group and the network, so that tests can
// simulate workers that are slow, dead or wrong. Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"

#include "proto/kvasir/v1/worker.pb.h"

namespace kvasir::coordinator {

class WorkerClient {
 public:
  // Gets the worker's messages. Calls come from any thread, one at a time, in order.
  class Listener {
   public:
    virtual ~Listener() = default;
    virtual void OnMessage(v1::WorkerMessage message) = 0;
    // The stream has ended, for whatever reason; `status` is never OK. The last call, at most once.
    virtual void OnClosed(const absl::Status& status) = 0;
  };

  // Ends the stream and waits for calls of the listener in progress; none come after that. So it
  // must not run within such a call, nor with a lock held that the listener takes.
  virtual ~WorkerClient() = default;
  // Queues the message and returns. Drops it when the stream has ended.
  virtual void Send(v1::CoordinatorMessage message) = 0;
};

// Opens a stream; the listener learns whether the worker is there.
using WorkerDialer = std::function<std::unique_ptr<WorkerClient>(const std::string& address,
                                                                 WorkerClient::Listener& listener)>;

}  // namespace kvasir::coordinator
