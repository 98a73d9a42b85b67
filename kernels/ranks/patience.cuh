// The end of a wait for a peer that does not come. Device code of sums among peers.
#pragma once

#include <cstdint>

#include "kernels/base/hopper.cuh"
#include "kernels/ranks/rank_ops_cuda.h"

namespace kvasir::kernels {

// Ends the wait, and that of all later sums, when a peer does not come.
class Patience {
 public:
  __device__ explicit Patience(const PeerSumEnd& end) : end_(end) {}

  __device__ bool IsOver() {
    if (++looks_ % kLooksBetweenClocks != 0) return false;
    volatile uint32_t* const gave_up = end_.gave_up;
    if (*gave_up != 0) return true;
    const uint64_t now = hopper::NowNs();
    if (begin_ns_ == 0) begin_ns_ = now;
    if (now - begin_ns_ < static_cast<uint64_t>(end_.patience_ns)) return false;
    *gave_up = 1;
    *static_cast<volatile uint32_t*>(end_.gave_up_host) = 1;
    return true;
  }

 private:
  static constexpr uint32_t kLooksBetweenClocks = 1024;

  const PeerSumEnd& end_;
  uint32_t looks_ = 0;
  uint64_t begin_ns_ = 0;
};

}  // namespace kvasir::kernels
