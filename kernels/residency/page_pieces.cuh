// Copies of pages by warps, a piece at a time. Only residency*.cu and bring_pages.cu include it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/base/warp.cuh"
#include "kernels/residency/residency.h"
#include "kernels/residency/residency_launch.cuh"

namespace kvasir::kernels {

inline constexpr int kLaneLoads = 8;  // of 16 bytes, in flight
inline constexpr int64_t kPieceBytes = kWarpThreads * kLaneLoads * 16;

// Copies piece `piece` of a page, by one warp. All loads are in flight together.
inline __device__ void CopyPiece(const std::byte* from, std::byte* to, int64_t piece,
                                 int64_t page_bytes) {
  const int64_t begin = piece * kPieceBytes / 16 + Thread() % kWarpThreads;
  const auto* source = reinterpret_cast<const uint4*>(from);
  auto* target = reinterpret_cast<uint4*>(to);
  uint4 values[kLaneLoads];
#pragma unroll
  for (int i = 0; i < kLaneLoads; ++i) {
    const int64_t at = begin + i * kWarpThreads;
    if (at < page_bytes / 16) values[i] = source[at];
  }
#pragma unroll
  for (int i = 0; i < kLaneLoads; ++i) {
    const int64_t at = begin + i * kWarpThreads;
    if (at < page_bytes / 16) target[at] = values[i];
  }
}

inline __device__ int64_t NumPieces(const ResidencyState& s) {
  return (s.shape.page_bytes + kPieceBytes - 1) / kPieceBytes;
}

}  // namespace kvasir::kernels
