// Merges the ranks' replies to a plan into one, or finds that they disagree. Ranks run the same
// plan with the same random numbers, so a difference outside accounting means that one of them is
// broken. Called by the worker group. Pure function: thread-safe.
#pragma once

#include <vector>

#include "absl/status/statusor.h"

#include "proto/kvasir/v1/worker.pb.h"

namespace kvasir::coordinator {

// `replies` are by rank, at least one. Accounting and tier usage are summed, durations are the
// longest, missing blocks are united, and a row that failed on any rank has failed. Cached tokens
// are those of the rank that found fewest on its device. INTERNAL when epoch, step, rows, tokens or
// token hashes differ.
absl::StatusOr<v1::StepReply> MergeReplies(std::vector<v1::StepReply> replies);

}  // namespace kvasir::coordinator
