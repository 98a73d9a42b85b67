// The gRPC service of a worker (proto/kvasir/v1/worker.proto): one stream at a time, whose
// coordinator has proven the group secret. A stream without proof ends after `proof_time`, takes
// nobody's place and is told nothing; kMostUnproven may be open, the oldest gives way. It hides
// gRPC's threads, which only move messages between queues. Everything else happens on one engine
// thread, which serves one stream after another through the function it was given. Made by main.
// Thread-safe.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <thread>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/alarm.h"
#include "grpcpp/support/server_callback.h"

#include "kernels/base/mutex.h"
#include "proto/grpc_listener.h"
#include "proto/kvasir/v1/worker.grpc.pb.h"
#include "proto/security/group_secret.h"
#include "worker/coordinator_stream.h"

namespace kvasir::worker {

struct WorkerServiceOptions {
  std::shared_ptr<const proto::GroupSecret> secret;
  absl::Duration proof_time = absl::Seconds(10);
  // Longest time in which the engine thread leaves a group that is over while another one waits for
  // it. After it `on_stuck` is called, once: a device or a disk does not answer, and only a new
  // process helps.
  absl::Duration leave_time = absl::Minutes(5);
  std::function<void()> on_stuck = [] {};
};

class WorkerService final : public v1::Worker::CallbackService {
 public:
  // Takes part in one group until the stream ends. Its result becomes the stream's status.
  using Serve = std::function<absl::Status(CoordinatorStream&)>;

  static constexpr size_t kMostUnproven = 256;  // streams

  // `connections` outlives the service.
  WorkerService(WorkerServiceOptions options, Serve serve, proto::GrpcListener& connections);
  // REQUIRES: Shutdown was called, and the server is gone.
  ~WorkerService() override;

  grpc::ServerBidiReactor<v1::CoordinatorMessage, v1::WorkerMessage>* Run(
      grpc::CallbackServerContext* context) override EXCLUDES(mu_);

  // Lets the step in flight end and its reply leave, ends the stream with UNAVAILABLE, and refuses
  // new streams. Returns when the engine thread has stopped.
  void Shutdown() EXCLUDES(mu_);

 private:
  class Stream;
  class Refusal;

  // Adds a stream that has proven nothing yet. False when the worker stops.
  bool AddUnproven(std::shared_ptr<Stream> stream) EXCLUDES(mu_);
  void ForgetUnproven(const Stream& stream) EXCLUDES(mu_);
  // Makes a proven stream the current or the next one; ALREADY_EXISTS, UNAVAILABLE.
  absl::Status Admit(std::shared_ptr<Stream> stream) EXCLUDES(mu_);
  // Sees to it that on_stuck is called if the engine thread does not come to next_.
  void LimitLeaving() REQUIRES(mu_);
  void WarnUnproven(const std::string& peer, const absl::Status& why) EXCLUDES(mu_);
  void RunEngineThread() EXCLUDES(mu_);
  absl::Status ServeGuarded(CoordinatorStream& stream);

  const WorkerServiceOptions options_;
  const Serve serve_;
  proto::GrpcListener& connections_;
  kernels::Mutex mu_;
  kernels::CondVar changed_;
  std::shared_ptr<Stream> current_ GUARDED_BY(mu_);  // open, or its end is being handled
  std::shared_ptr<Stream> next_ GUARDED_BY(mu_);  // waits for the end of current_; may have ended
  std::deque<std::shared_ptr<Stream>> unproven_ GUARDED_BY(mu_);  // by age
  absl::Time warned_at_ GUARDED_BY(mu_) = absl::InfinitePast();
  bool stopping_ GUARDED_BY(mu_) = false;
  std::unique_ptr<grpc::Alarm> leave_alarm_
      GUARDED_BY(mu_);         // from the first next_ to the end of current_
  std::thread engine_thread_;  // last: it uses everything above
};

}  // namespace kvasir::worker
