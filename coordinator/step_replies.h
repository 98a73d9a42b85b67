// Makes one answer of the ranks' answers to a plan, or finds that they disagree: ranks run the same
// plan with the same random numbers, so anything that differs besides accounting means that one of
// them is broken. Called by the worker group. Pure function: thread-safe.
#pragma once

#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "proto/kvasir/v1/worker.pb.h"

namespace kvasir::coordinator {

// `replies` by rank, at least one. Accounting and tier usage are summed, durations are the longest,
// missing blocks are united, a row that failed on any rank has failed. Cached tokens are those of
// the rank that found fewest of them on its device. INTERNAL when epoch, step, rows, tokens or
// token hashes differ.
absl::StatusOr<v1::StepReply> MergeReplies(absl::Span<const v1::StepReply> replies);

}  // namespace kvasir::coordinator
