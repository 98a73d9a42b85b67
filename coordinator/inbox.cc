#include "coordinator/inbox.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "proto/grpc_status.h"

namespace kvasir::coordinator {
namespace {

// Time after which the step that fills the inbox is most likely over.
constexpr absl::Duration kInboxRetry = absl::Seconds(1);

}  // namespace

absl::Status Inbox::CheckRoom(int64_t prompt_tokens) const {
  const size_t arrived = contents_.submitted.size();
  const int64_t tokens = contents_.submitted_tokens + prompt_tokens;
  const bool full = arrived >= size_t{bounds_.max_queue_len()} + bounds_.max_num_seqs() ||
                    (arrived > 0 && tokens > int64_t{bounds_.max_queued_tokens()});
  if (!full) return absl::OkStatus();
  return proto::WithRetryDelay(
      absl::ResourceExhaustedError(absl::StrCat(
          arrived, " requests with ", contents_.submitted_tokens,
          " prompt tokens arrived in one step; try again later, or raise --max-queue-len or "
          "--max-queued-tokens")),
      kInboxRetry);
}

void Inbox::Add(std::unique_ptr<Request> request) {
  contents_.submitted_tokens += request->given_tokens();
  contents_.submitted.push_back(std::move(request));
}

std::unique_ptr<Request> Inbox::Take(SequenceId id) {
  auto& submitted = contents_.submitted;
  const auto found =
      std::find_if(submitted.begin(), submitted.end(),
                   [id](const std::unique_ptr<Request>& r) { return r->sequence() == id; });
  if (found == submitted.end()) return nullptr;
  std::unique_ptr<Request> request = std::move(*found);
  submitted.erase(found);
  contents_.submitted_tokens -= request->given_tokens();
  return request;
}

void Inbox::AddCancellation(Cancellation cancellation) {
  contents_.cancelled.push_back(std::move(cancellation));
}

Inbox::Contents Inbox::TakeAll() { return std::exchange(contents_, {}); }

}  // namespace kvasir::coordinator
