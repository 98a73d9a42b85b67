#include "coordinator/generate_stream.h"

#include <chrono>
#include <utility>

#include "grpcpp/server_context.h"

#include "proto/grpc_status.h"

namespace kvasir::coordinator {
namespace {

using kernels::MutexLock;

size_t Bytes(const v1::GenerateResponse& response) {
  const v1::Tokens& tokens = response.tokens();
  auto numbers = static_cast<size_t>(tokens.token_ids_size());
  for (const v1::TokenLogprobs& logprobs : tokens.logprobs()) {
    numbers += 1 + 2 * static_cast<size_t>(logprobs.top_size());
  }
  return tokens.text().size() + sizeof(uint32_t) * numbers;
}

}  // namespace

std::shared_ptr<GenerateStream> GenerateStream::Create(
    grpc::CallbackServerContext* context, std::unique_ptr<proto::GrpcListener::Call> call) {
  std::shared_ptr<GenerateStream> stream(new GenerateStream(context, std::move(call)));
  stream->self_ = stream;
  return stream;
}

void GenerateStream::Write(v1::GenerateResponse response) {
  bool overflow = false;
  {
    MutexLock lock(mu_);
    if (broken_ || overflowed_) return;
    waiting_bytes_ += Bytes(response);
    if (!Join(response)) waiting_.push_back(std::move(response));
    overflow = overflowed_ = waiting_bytes_ > kMaxWaitingBytes;
  }
  if (overflow && on_cancel_) {
    on_cancel_(
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
  }
  if (end.has_value()) {
    Finish(proto::ToGrpcStatus(*end));
  } else {
    StartWrite(&writing_message_);
  }
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
  if (!on_cancel_) return;
  const bool late = std::chrono::system_clock::now() >= context_->deadline();
  on_cancel_(late ? absl::DeadlineExceededError("the client's deadline has passed")
                  : absl::CancelledError("the client is gone"));
}

}  // namespace kvasir::coordinator
