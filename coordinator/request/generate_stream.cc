#include "coordinator/request/generate_stream.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "grpc/grpc.h"
#include "grpc/support/time.h"
#include "grpcpp/server_context.h"

#include "proto/grpc_status.h"

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
  return bytes;
}

}  // namespace

std::shared_ptr<GenerateStream> GenerateStream::Create(
    grpc::CallbackServerContext* context, std::unique_ptr<proto::GrpcListener::Call> call,
    absl::Duration patience) {
  std::shared_ptr<GenerateStream> stream(new GenerateStream(context, std::move(call), patience));
  stream->self_ = stream;
  return stream;
}

GenerateStream::GenerateStream(grpc::CallbackServerContext* context,
                               std::unique_ptr<proto::GrpcListener::Call> call,
                               absl::Duration patience)
    : context_(context),
      grpc_call_(context == nullptr ? nullptr : context->c_call()),
      patience_(patience),
      call_(std::move(call)) {
  if (grpc_call_ != nullptr) grpc_call_ref(grpc_call_);
}

GenerateStream::~GenerateStream() {
  if (grpc_call_ != nullptr) grpc_call_unref(grpc_call_);
}

void GenerateStream::Write(v1::GenerateResponse response) {
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

bool GenerateStream::Join(v1::GenerateResponse& response) {
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

void GenerateStream::Close(const absl::Status& status) {
  {
    MutexLock lock(mu_);
    closed_ = status;
  }
  Advance();
}

void GenerateStream::Advance() {
  std::optional<absl::Status> end;
  bool watch = false;
  {
    MutexLock lock(mu_);
    if (writing_ || finished_) return;
    if (!waiting_.empty()) {
      writing_message_ = std::move(waiting_.front());
      waiting_.pop_front();
      waiting_bytes_ -= Bytes(writing_message_);
      writing_ = true;
    } else if (closed_.has_value()) {
      finished_ = true;
      end = closed_;
    } else {
      return;
    }
    began_at_ = SteadyClock::now();
    watch = !std::exchange(watching_, true);
  }
  if (watch) WatchAgainAfter(patience_);
  if (end.has_value()) {
    Finish(proto::ToGrpcStatus(*end));
  } else {
    StartWrite(&writing_message_);
  }
}

// The stream may be gone when the alarm goes off. Replacing the alarm in its own callback is safe:
// gRPC holds it until the callback returns.
void GenerateStream::WatchAgainAfter(absl::Duration time) {
  alarm_ = std::make_unique<grpc::Alarm>();
  const gpr_timespec at =
      gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                   gpr_time_from_millis(absl::ToInt64Milliseconds(time) + 1, GPR_TIMESPAN));
  alarm_->Set(at, [weak = weak_from_this()](bool ok) {
    const std::shared_ptr<GenerateStream> stream = weak.lock();
    if (ok && stream != nullptr) stream->OnAlarm();
  });
}

void GenerateStream::OnAlarm() {
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

void GenerateStream::OnWriteDone(bool ok) {
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

void GenerateStream::OnCancel() {
  const bool late = std::chrono::system_clock::now() >= context_->deadline();
  Cancel(late ? absl::DeadlineExceededError("the client's deadline has passed")
              : absl::CancelledError("the client is gone"));
}

}  // namespace kvasir::coordinator
