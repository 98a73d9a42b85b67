// Numbers that clients, logs and metrics make of a Finish message (generation.proto). Pure
// functions: thread-safe.
#pragma once

#include <cstdint>

#include "google/protobuf/duration.pb.h"

#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::proto {

inline double ToSeconds(const google::protobuf::Duration& duration) {
  return static_cast<double>(duration.seconds()) + 1e-9 * static_cast<double>(duration.nanos());
}

// Returns the number of pages skipped for any reason.
inline uint64_t SkippedPages(const v1::BlocksSkipped& skipped) {
  return skipped.selected_out() + skipped.window() + skipped.pruned() + skipped.terminated();
}

}  // namespace kvasir::proto
