// The stream of one Generate call: takes messages at any time and writes them, translated to the
// service's own messages, as fast as the client reads. While the client is slow, waiting messages
// are joined, so that they need no more memory than their text: only the newest progress is kept,
// and tokens become one message. When more than kMaxWaitingBytes of memory wait, waiting messages
// are dropped and the request is cancelled. When the client takes nothing for a time the call ends,
// also after its last token. Hidden: gRPC's reactions. Thread-safe.
#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/alarm.h"
#include "grpcpp/support/server_callback.h"

#include "coordinator/request/client_sink.h"
#include "kernels/base/mutex.h"
#include "proto/grpc_listener.h"
#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::coordinator {

template <typename Message>
class AnswerStream final : public grpc::ServerWriteReactor<Message>,
                           public ClientSink,
                           public std::enable_shared_from_this<AnswerStream<Message>> {
 public:
  static constexpr size_t kMaxWaitingBytes = size_t{1} << 20;

  // Turns a message, in the order of their writing, into the client's; none: nothing is written.
  using Translate = std::function<std::optional<Message>(v1::GenerateResponse)>;

  // The stream keeps itself alive until gRPC is done with it; the caller may keep it longer.
  // `call`, which may be null, ends with the stream. A client that takes nothing for `patience`
  // counts as gone.
  static std::shared_ptr<AnswerStream> Create(grpc::CallbackServerContext* context,
                                              std::unique_ptr<proto::GrpcListener::Call> call,
                                              absl::Duration patience, Translate translate);
  ~AnswerStream() override;

  // Ends the request as if its client had left.
  void Abort(const absl::Status& why) { Cancel(why); }

  void Write(v1::GenerateResponse response) override EXCLUDES(mu_);
  void Close(const absl::Status& status) override EXCLUDES(mu_);

  void OnWriteDone(bool ok) override EXCLUDES(mu_);
  void OnCancel() override EXCLUDES(mu_);
  void OnDone() override {
    call_.reset();
    self_.reset();
  }

 private:
  AnswerStream(grpc::CallbackServerContext* context,
               std::unique_ptr<proto::GrpcListener::Call> call, absl::Duration patience,
               Translate translate);

  // Starts the next write or ends the call when possible. Makes no gRPC call under mu_.
  void Advance() EXCLUDES(mu_);
  // Joins the response with the last waiting one; false when they cannot be joined.
  bool Join(v1::GenerateResponse& response) REQUIRES(mu_);
  // Checks after `time` whether the client has taken something.
  void WatchAgainAfter(absl::Duration time);
  void OnAlarm() EXCLUDES(mu_);

  grpc::CallbackServerContext* const context_;  // valid until OnDone
  // Our own reference to gRPC's call, which may be cancelled at any time, unlike the context.
  grpc_call* const grpc_call_;
  const absl::Duration patience_;
  std::unique_ptr<proto::GrpcListener::Call> call_;  // until OnDone
  std::shared_ptr<AnswerStream> self_;               // until OnDone

  kernels::Mutex mu_;
  const Translate translate_ GUARDED_BY(mu_);
  std::deque<v1::GenerateResponse> waiting_ GUARDED_BY(mu_);
  size_t waiting_bytes_ GUARDED_BY(mu_) = 0;
  Message writing_message_;  // constant while writing_
  bool writing_ GUARDED_BY(mu_) = false;
  bool overflowed_ GUARDED_BY(mu_) = false;
  bool broken_ GUARDED_BY(mu_) = false;  // the client is gone: no more writes
  std::optional<absl::Status> closed_ GUARDED_BY(mu_);
  bool finished_ GUARDED_BY(mu_) = false;
  // When the write or the end in progress began.
  std::chrono::steady_clock::time_point began_at_ GUARDED_BY(mu_);
  bool watching_ GUARDED_BY(mu_) = false;  // an alarm is set
  std::unique_ptr<grpc::Alarm> alarm_;     // owned by the caller that set watching_
};

// The stream of kvasir.v1.Generation, whose messages are as they come.
using GenerateStream = AnswerStream<v1::GenerateResponse>;
inline std::optional<v1::GenerateResponse> AsItComes(v1::GenerateResponse response) {
  return response;
}

}  // namespace kvasir::coordinator
