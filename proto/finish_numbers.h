// Numbers and names that clients, logs, metrics and traces make of a Finish message
// (generation.proto). Pure functions: thread-safe.
#pragma once

#include <cstdint>

#include "google/protobuf/duration.pb.h"

#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::proto {

inline double ToSeconds(const google::protobuf::Duration& duration) {
  return static_cast<double>(duration.seconds()) + 1e-9 * static_cast<double>(duration.nanos());
}

// Returns the name that OpenAI's API has for the reason why an answer ended.
inline const char* FinishReasonName(v1::FinishReason reason) {
  return reason == v1::FINISH_REASON_LENGTH ? "length" : "stop";
}

// Returns the number of pages skipped for any reason.
inline uint64_t SkippedPages(const v1::BlocksSkipped& skipped) {
  return skipped.selected_out() + skipped.window() + skipped.pruned() + skipped.terminated();
}

// Returns the number of prompt tokens that were found in any tier.
inline uint64_t TokensOfAllTiers(const v1::CachedTokens& cached) {
  return uint64_t{cached.device()} + cached.host() + cached.disk() + cached.peer();
}

}  // namespace kvasir::proto
