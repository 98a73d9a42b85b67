// One stream to one worker: the seam between the worker group and the network, so that tests can
// play workers that are slow, dead or wrong. Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"

#include "proto/kvasir/v1/worker.pb.h"

namespace kvasir::coordinator {

class WorkerClient {
 public:
  // Hears what the worker sends. Calls come from any thread, one at a time, in order.
  class Listener {
   public:
    virtual ~Listener() = default;
    virtual void OnMessage(v1::WorkerMessage message) = 0;
    // The last call, at most once: the stream has ended, why does not matter. Never OK.
    virtual void OnClosed(const absl::Status& status) = 0;
  };

  // Ends the stream and waits for calls of the listener in progress; it hears nothing more then. So
  // it must not happen within such a call, or with a lock held that the listener takes.
  virtual ~WorkerClient() = default;
  // Queues the message and returns; dropped when the stream has ended.
  virtual void Send(v1::CoordinatorMessage message) = 0;
};

// Opens a stream; whether the worker is there is heard by the listener.
using WorkerDialer = std::function<std::unique_ptr<WorkerClient>(const std::string& address,
                                                                 WorkerClient::Listener& listener)>;

}  // namespace kvasir::coordinator
