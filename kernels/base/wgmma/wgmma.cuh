// Products of a warpgroup, operands in shared memory: Hopper's wgmma (PTX ISA, section "wgmma"). No
// other architecture has it. Code for these computes the same products with the same operands and
// the same layout of sums by the product of a warp (wgmma_by_mma.cuh). That form is plain, not
// tuned: a product is over when its call returns, and registers stay as the launch shared them out.
#pragma once

#include <cstdint>

#include "kernels/base/hopper.cuh"

namespace kvasir::kernels::hopper {

// Tiles have rows of 128 bytes, swizzled: the 16-byte piece c of row r is stored as piece c ^ (r %
// 8). Groups of 8 rows are 1,024 bytes apart, and tiles are aligned to 1,024 bytes.
inline constexpr int kSwizzledRowBytes = 128;
inline constexpr int kSwizzledGroupBytes = 1024;

__device__ inline int SwizzledOffset(int row, int column_bytes) {
  return row * kSwizzledRowBytes + (column_bytes ^ ((row & 7) << 4));
}
// Returns the descriptor of a swizzled tile at `tile`, for either operand and either major order.
__device__ inline uint64_t TileDescriptor(const void* tile) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kGroupStride = uint64_t{kSwizzledGroupBytes >> 4} << 32;
  constexpr uint64_t kUnusedStride = uint64_t{1} << 16;
  return kSwizzle128 | kGroupStride | kUnusedStride | ((SharedAddress(tile) & 0x3ffff) >> 4);
}
// Returns the descriptor of an operand that is contiguous along its rows: two tiles kTileBytes
// apart.
template <int kTileBytes>
__device__ inline uint64_t PairDescriptor(const void* tile) {
  constexpr uint64_t kUnusedStride = uint64_t{1} << 16;
  constexpr uint64_t kTileStride = uint64_t{kTileBytes >> 4} << 16;
  return TileDescriptor(tile) - kUnusedStride + kTileStride;
}
// Moves the descriptor by `bytes` (a multiple of 16). The address is in the lower half.
__device__ inline uint64_t Advance(uint64_t descriptor, int bytes) {
  const uint32_t low = static_cast<uint32_t>(descriptor) + static_cast<uint32_t>(bytes >> 4);
  return (descriptor >> 32 << 32) | low;
}

enum class Major { kK = 0, kMN = 1 };  // which index of an operand is contiguous

}  // namespace kvasir::kernels::hopper

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "kernels/base/wgmma/wgmma_sm90a.cuh"
#else
#include "kernels/base/wgmma/wgmma_by_mma.cuh"
#endif
