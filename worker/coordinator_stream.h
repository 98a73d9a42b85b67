// The stream from the coordinator as the engine thread sees it: plans in, messages out. It hides
// gRPC; tests play the coordinator without it. Rendezvous entries do not pass through Read: they
// are delivered to rendezvous() while the engine thread waits in it. Read is for the engine
// thread; Write is thread-safe.
#pragma once

#include <optional>

#include "absl/status/status.h"
#include "absl/time/time.h"

#include "proto/kvasir/v1/worker.pb.h"
#include "worker/parallel/rendezvous.h"

namespace kvasir::worker {

class CoordinatorStream {
 public:
  virtual ~CoordinatorStream() = default;
  // Blocks for the next message; nothing once the stream has ended or the worker stops.
  virtual std::optional<v1::CoordinatorMessage> Read() = 0;
  // Returns true when Read would return at once, false when that did not happen within `patience`.
  virtual bool WaitReadable(absl::Duration patience) = 0;
  // Queues a message and returns; dropped when the stream has ended.
  virtual void Write(v1::WorkerMessage message) = 0;
  // Ends the stream with a failure, after the messages already written. The coordinator hears of it
  // at once, while giving memory back may take the worker seconds.
  virtual void Fail(const absl::Status& why) = 0;
  virtual Rendezvous& rendezvous() = 0;
};

}  // namespace kvasir::worker
