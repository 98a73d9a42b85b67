// The gRPC service of a worker (proto/kvasir/v1/worker.proto): one stream at a time. It hides
// gRPC's threads, which only move messages between queues. Everything else happens on one engine
// thread, which serves one stream after another through the function it was given. Made by main.
// Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <thread>

#include "absl/status/status.h"
#include "grpcpp/support/server_callback.h"

#include "kernels/base/mutex.h"
#include "proto/grpc_listener.h"
#include "proto/kvasir/v1/worker.grpc.pb.h"
#include "worker/coordinator_stream.h"

namespace kvasir::worker {

class WorkerService final : public v1::Worker::CallbackService {
 public:
  // Takes part in one group until the stream ends. Its result becomes the stream's status.
  using Serve = std::function<absl::Status(CoordinatorStream&)>;

  // `connections` outlives the service.
  WorkerService(Serve serve, proto::GrpcListener& connections);
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

  void RunEngineThread() EXCLUDES(mu_);
  absl::Status ServeGuarded(CoordinatorStream& stream);

  const Serve serve_;
  proto::GrpcListener& connections_;
  kernels::Mutex mu_;
  kernels::CondVar changed_;
  std::shared_ptr<Stream> current_ GUARDED_BY(mu_);  // open, or its end is being handled
  std::shared_ptr<Stream> next_ GUARDED_BY(mu_);     // waits for the end of current_
  bool stopping_ GUARDED_BY(mu_) = false;
  std::thread engine_thread_;  // last: it uses everything above
};

}  // namespace kvasir::worker
