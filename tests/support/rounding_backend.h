// A backend whose attention is rounded otherwise than another's: each bfloat16 number of its output
// may be a neighbour of what it was, at random. Whoever compares two ways to compute the same sees
// with it how far answers move by rounding alone, where a selection or a token hangs on a near tie.
// Thread-compatible.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "kernels/base/status_macros.h"
#include "tests/support/forwarding_backend.h"

namespace kvasir::worker {

class RoundingBackend final : public ForwardingBackend {
 public:
  // `inner` outlives it, computes in host memory, and steps one at a time.
  explicit RoundingBackend(Backend& inner) : ForwardingBackend(inner) {}

  // From the next step on; 0: nothing is changed.
  void set_seed(uint64_t seed) {
    seed_ = seed;
    random_.seed(seed);
  }

  absl::StatusOr<bool> BeginStep(const StepInputs& step) override {
    tiles_ = step.batch.tiles;
    return inner().BeginStep(step);
  }
  absl::Status Attend(const LayerQueries& queries, const kernels::TensorView& out) override {
    KVASIR_RETURN_IF_ERROR(inner().Attend(queries, out));
    if (seed_ == 0) return absl::OkStatus();
    const int64_t width = out.dim(1) * out.dim(2);
    auto* const values = reinterpret_cast<uint16_t*>(out.data());
    for (const kernels::QueryTile& tile : tiles_) {
      for (int64_t i = 0; i < tile.num_rows * width; ++i) {
        MoveToNeighbour(values[tile.first_row * width + i]);
      }
    }
    return absl::OkStatus();
  }

 private:
  // One of two stays.
  void MoveToNeighbour(uint16_t& bits) {
    constexpr uint16_t kMagnitude = 0x7fff;
    constexpr uint16_t kLeastNormal = 0x0080;
    if ((bits & kMagnitude) < kLeastNormal) return;
    const uint32_t drawn = random_() & 3;
    if (drawn == 1) ++bits;
    if (drawn == 2) --bits;
  }

  uint64_t seed_ = 0;
  std::mt19937 random_;
  std::vector<kernels::QueryTile> tiles_;  // of the step
};

}  // namespace kvasir::worker
