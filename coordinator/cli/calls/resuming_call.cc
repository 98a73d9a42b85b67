#include "coordinator/cli/calls/resuming_call.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"

#include "coordinator/cli/calls/connect.h"
#include "proto/grpc_status.h"

namespace kvasir::coordinator {
namespace {

constexpr absl::Duration kFirstPause = absl::Milliseconds(100);
constexpr absl::Duration kLongestPause = absl::Seconds(1);

}  // namespace

absl::Status ResumingCall::Run(const std::function<void(const v1::GenerateResponse&)>& take) {
  const absl::Time deadline = absl::Now() + options_.timeout;
  absl::Duration pause = kFirstPause;
  for (;;) {
    const absl::Status status = Stream(deadline, take);
    if (finished_) return absl::OkStatus();
    if (status.ok()) {
      return absl::InternalError("the server ended the stream without a finish message");
    }
    if (answered_) lost_at_ = absl::Now();
    if (!MayResume(status)) return status;
    if (answered_) {
      pause = kFirstPause;
      if (options_.tell != nullptr) {
        absl::FPrintF(
            options_.tell,
            "\nthe server was lost after %d tokens of the answer (%s); asking it to go on\n",
            request_.resume().token_ids_size(), status.message());
      }
    }
    absl::SleepFor(std::min(pause, deadline - absl::Now()));
    pause = std::min(2 * pause, kLongestPause);
  }
}

absl::Status ResumingCall::Stream(absl::Time deadline,
                                  const std::function<void(const v1::GenerateResponse&)>& take) {
  grpc::ClientContext context;
  SetTimeout(deadline - absl::Now(), context);
  const auto reader = stub_.Generate(&context, request_);
  const int had_tokens = request_.resume().token_ids_size();
  answered_ = false;
  v1::GenerateResponse response;
  while (reader->Read(&response)) {
    if (absl::Status wrong = CheckIndex(response); !wrong.ok()) {
      context.TryCancel();
      reader->Finish();
      return wrong;
    }
    Remember(response);
    take(response);
  }
  if (answered_) {
    vain_streams_ = request_.resume().token_ids_size() > had_tokens ? 0 : vain_streams_ + 1;
  }
  return proto::FromGrpcStatus(reader->Finish());
}

absl::Status ResumingCall::CheckIndex(const v1::GenerateResponse& response) const {
  const auto expected = static_cast<uint32_t>(request_.resume().token_ids_size());
  const v1::Tokens& tokens = response.tokens();
  if (tokens.token_ids().empty() || tokens.index() == expected) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrFormat(
      "the server was asked to go on with an answer at token %d and went on at token %d; %s",
      expected, tokens.index(),
      tokens.index() == 0 ? "it is of an older release, which cannot: send the request again"
                          : "tokens are missing or repeated: send the request again"));
}

void ResumingCall::Remember(const v1::GenerateResponse& response) {
  began_ = answered_ = true;
  finished_ |= response.has_finish();
  if (response.has_progress()) request_.set_request_id(response.progress().request_id());
  if (!response.has_tokens() || response.tokens().token_ids().empty()) return;
  request_.mutable_resume()->mutable_token_ids()->MergeFrom(response.tokens().token_ids());
}

// A server that has not noticed yet that its client is gone says ALREADY_EXISTS, one to which all
// clients come back at once RESOURCE_EXHAUSTED. After some of an answer that means that this client
// does not read.
bool ResumingCall::MayResume(const absl::Status& status) {
  const bool may_pass = absl::IsUnavailable(status) || absl::IsAlreadyExists(status) ||
                        (!answered_ && absl::IsResourceExhausted(status));
  return began_ && vain_streams_ < kMostVainStreams && may_pass &&
         absl::Now() - lost_at_ < options_.resume_timeout;
}

}  // namespace kvasir::coordinator
