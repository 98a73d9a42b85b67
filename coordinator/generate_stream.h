// The stream of one Generate call: takes messages as they come, writes them as fast as the client
// reads. Behind a slow client messages are joined, so that it costs no more than its text: only the
// newest progress is kept, and tokens that wait become one message. When more than kMaxWaitingBytes
// wait, the request is cancelled. Hidden: gRPC's reactions. Thread-safe.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "grpcpp/support/server_callback.h"

#include "coordinator/response_sink.h"
#include "kernels/base/mutex.h"
#include "proto/grpc_listener.h"
#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::coordinator {

class GenerateStream final : public grpc::ServerWriteReactor<v1::GenerateResponse>,
                             public ResponseSink {
 public:
  static constexpr size_t kMaxWaitingBytes = size_t{1} << 20;

  // The stream keeps itself alive until gRPC is done with it; the caller may, too.
  // `call`, which may be null, ends with the stream.
  static std::shared_ptr<GenerateStream> Create(grpc::CallbackServerContext* context,
                                                std::unique_ptr<proto::GrpcListener::Call> call);

  // Called when the client is gone, its deadline has passed, or it reads too slowly; on any thread.
  // Set before the stream is returned to gRPC.
  void set_on_cancel(std::function<void(const absl::Status&)> on_cancel) {
    on_cancel_ = std::move(on_cancel);
  }

  void Write(v1::GenerateResponse response) override EXCLUDES(mu_);
  void Close(const absl::Status& status) override EXCLUDES(mu_);

  void OnWriteDone(bool ok) override EXCLUDES(mu_);
  void OnCancel() override;
  void OnDone() override {
    call_.reset();
    self_.reset();
  }

 private:
  GenerateStream(grpc::CallbackServerContext* context,
                 std::unique_ptr<proto::GrpcListener::Call> call)
      : context_(context), call_(std::move(call)) {}

  // Starts the next write, or ends the call, if it is time to. No gRPC call is made under mu_.
  void Advance() EXCLUDES(mu_);
  // Joins the response with the last one that waits; false when they do not join.
  bool Join(v1::GenerateResponse& response) REQUIRES(mu_);

  grpc::CallbackServerContext* const context_;       // valid until OnDone
  std::unique_ptr<proto::GrpcListener::Call> call_;  // until OnDone
  std::function<void(const absl::Status&)> on_cancel_;
  std::shared_ptr<GenerateStream> self_;  // until OnDone

  kernels::Mutex mu_;
  std::deque<v1::GenerateResponse> waiting_ GUARDED_BY(mu_);
  size_t waiting_bytes_ GUARDED_BY(mu_) = 0;  // of text, token ids and logprobs
  v1::GenerateResponse writing_message_;      // constant while writing_
  bool writing_ GUARDED_BY(mu_) = false;
  bool overflowed_ GUARDED_BY(mu_) = false;
  bool broken_ GUARDED_BY(mu_) = false;  // the client is gone: nothing is written any more
  std::optional<absl::Status> closed_ GUARDED_BY(mu_);
  bool finished_ GUARDED_BY(mu_) = false;
};

}  // namespace kvasir::coordinator
