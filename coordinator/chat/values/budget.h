// The limits of one rendering's cost. Every step, and every byte of text or lists that is made, is
// charged before it is spent, so no template and no conversation takes more time or memory than
// this. Belongs to one rendering.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace kvasir::coordinator {

struct RenderLimits {
  // Both grow with the input: 16 more for each of its bytes.
  int64_t max_steps = 1'000'000;          // about 0.1 s
  int64_t max_bytes = int64_t{64} << 20;  // of all texts and lists that are made
  int max_depth = 256;                    // of expressions, statements and calls within each other
};

class Budget {
 public:
  Budget(const RenderLimits& limits, size_t input_bytes)
      : steps_(limits.max_steps + 16 * static_cast<int64_t>(input_bytes)),
        bytes_(limits.max_bytes + 16 * static_cast<int64_t>(input_bytes)),
        depth_(limits.max_depth) {}

  absl::Status Spend(int64_t steps) {
    steps_ -= steps;
    if (steps_ >= 0) return absl::OkStatus();
    return absl::InvalidArgumentError("it takes too many steps");
  }
  absl::Status SpendBytes(size_t bytes) {
    if (bytes > static_cast<size_t>(bytes_)) {
      return absl::InvalidArgumentError("it makes too much text");
    }
    bytes_ -= static_cast<int64_t>(bytes);
    return Spend(1 + static_cast<int64_t>(bytes / 64));
  }
  absl::Status Enter() {
    if (depth_ == 0) return absl::InvalidArgumentError("it is nested too deeply");
    --depth_;
    return Spend(1);
  }
  void Leave() { ++depth_; }

 private:
  int64_t steps_;
  int64_t bytes_;
  int depth_;
};

}  // namespace kvasir::coordinator
