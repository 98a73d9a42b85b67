#include "coordinator/request/generate_stream.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "grpc/grpc.h"
#include "grpc/support/time.h"
#include "grpcpp/server_context.h"

#include "proto/grpc_status.h"
#include "proto/vllm/grpc/vllm_engine.pb.h"

namespace kvasir::coordinator {
namespace {

using kernels::MutexLock;
using SteadyClock = std::chrono::steady_clock;

// Returns the bytes of the response in memory; the same when it is joined to another one.
size_t Bytes(const v1::GenerateResponse& response) {
  const v1::Tokens& tokens = response.tokens();
  size_t bytes =
      tokens.text().size() + sizeof(uint32_t) * static_cast<size_t>(tokens.token_ids_size());
  for (const v1::TokenLogprobs& logprobs : tokens.logprobs()) {
    bytes += sizeof(void*) + logprobs.SpaceUsedLong();
  }
  if (response.has_prompt_logprobs()) bytes += response.prompt_logprobs().SpaceUsedLong();
  return bytes;
}

}  // namespace

template <typename Message>
std::shared_ptr<AnswerStream<Message>> AnswerStream<Message>::Create(
    grpc::CallbackServerContext* context, std::unique_ptr<proto::GrpcListener::Call> call,
    absl::Duration patience, Translate translate) {
  std::shared_ptr<AnswerStream> stream(
      new AnswerStream(context, std::move(call), patience, std::move(translate)));
  stream->self_ = stream;
  return stream;
}

template <typename Message>
AnswerStream<Message>::AnswerStream(grpc::CallbackServerContext* context,
                                    std::unique_ptr<proto::GrpcListener::Call> call,
                                    absl::Duration patience, Translate translate)
    : context_(context),
      grpc_call_(context == nullptr ? nullptr : context->c_call()),
      patience_(patience),
      call_(std::move(call)),
      translate_(std::move(translate)) {
  if (grpc_call_ != nullptr) grpc_call_ref(grpc_call_);
}

template <typename Message>
AnswerStream<Message>::~AnswerStream() {
  if (grpc_call_ != nullptr) grpc_call_unref(grpc_call_);
}

template <typename Message>
void AnswerStream<Message>::Write(v1::GenerateResponse response) {
  bool overflow = false;
  {
    MutexLock lock(mu_);
    if (broken_ || overflowed_) return;
    waiting_bytes_ += Bytes(response);
    if (!Join(response)) waiting_.push_back(std::move(response));
    overflow = overflowed_ = waiting_bytes_ > kMaxWaitingBytes;
    if (overflow) waiting_.clear();
  }
  if (overflow) {
    Cancel(
        absl::ResourceExhaustedError("the client does not read: 1 MiB of the answer waits for it"));
  }
  Advance();
}

template <typename Message>
bool AnswerStream<Message>::Join(v1::GenerateResponse& response) {
  if (waiting_.empty() || waiting_.back().event_case() != response.event_case()) return false;
  v1::GenerateResponse& last = waiting_.back();
  switch (response.event_case()) {
    case v1::GenerateResponse::kProgress:
      last = std::move(response);
      return true;
    case v1::GenerateResponse::kTokens:
      last.mutable_tokens()->mutable_token_ids()->MergeFrom(response.tokens().token_ids());
      last.mutable_tokens()->mutable_logprobs()->MergeFrom(response.tokens().logprobs());
      last.mutable_tokens()->mutable_text()->append(response.tokens().text());
      last.mutable_tokens()->set_last(response.tokens().last());
      return true;
    default:
      return false;
  }
}

template <typename Message>
void AnswerStream<Message>::Close(const absl::Status& status) {
  {
    MutexLock lock(mu_);
    closed_ = status;
  }
  Advance();
}

template <typename Message>
void AnswerStream<Message>::Advance() {
  std::optional<absl::Status> end;
  bool watch = false;
  {
    MutexLock lock(mu_);
    if (writing_ || finished_) return;
    while (!waiting_.empty() && !writing_) {
      v1::GenerateResponse next = std::move(waiting_.front());
      waiting_.pop_front();
      waiting_bytes_ -= Bytes(next);
      std::optional<Message> message = translate_(std::move(next));
      if (!message.has_value()) continue;
      writing_message_ = *std::move(message);
      writing_ = true;
    }
    if (!writing_) {
      if (!closed_.has_value()) return;
      finished_ = true;
      end = closed_;
    }
    began_at_ = SteadyClock::now();
    watch = !std::exchange(watching_, true);
  }
  if (watch) WatchAgainAfter(patience_);
  if (end.has_value()) {
    this->Finish(proto::ToGrpcStatus(*end));
  } else {
    this->StartWrite(&writing_message_);
  }
}

// The stream may be gone when the alarm goes off. Replacing the alarm in its own callback is safe:
// gRPC holds it until the callback returns.
template <typename Message>
void AnswerStream<Message>::WatchAgainAfter(absl::Duration time) {
  alarm_ = std::make_unique<grpc::Alarm>();
  const gpr_timespec at =
      gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                   gpr_time_from_millis(absl::ToInt64Milliseconds(time) + 1, GPR_TIMESPAN));
  alarm_->Set(at, [weak = this->weak_from_this()](bool ok) {
    const std::shared_ptr<AnswerStream> stream = weak.lock();
    if (ok && stream != nullptr) stream->OnAlarm();
  });
}

template <typename Message>
void AnswerStream<Message>::OnAlarm() {
  absl::Duration left;
  {
    MutexLock lock(mu_);
    if (!writing_ && !finished_) {
      watching_ = false;  // the next write watches again
      return;
    }
    left = patience_ - absl::FromChrono(SteadyClock::now() - began_at_);
  }
  if (left > absl::ZeroDuration()) return WatchAgainAfter(left);
  Cancel(absl::UnavailableError(
      absl::StrCat("the client took nothing of its answer for ", absl::FormatDuration(patience_))));
  if (grpc_call_ != nullptr) grpc_call_cancel(grpc_call_, nullptr);
}

template <typename Message>
void AnswerStream<Message>::OnWriteDone(bool ok) {
  {
    MutexLock lock(mu_);
    writing_ = false;
    if (!ok) {
      broken_ = true;
      waiting_.clear();
      waiting_bytes_ = 0;
    }
  }
  Advance();
}

template <typename Message>
void AnswerStream<Message>::OnCancel() {
  const bool late = std::chrono::system_clock::now() >= context_->deadline();
  Cancel(late ? absl::DeadlineExceededError("the client's deadline has passed")
              : absl::CancelledError("the client is gone"));
}

template class AnswerStream<v1::GenerateResponse>;
template class AnswerStream<::vllm::grpc::engine::GenerateResponse>;

}  // namespace kvasir::coordinator
