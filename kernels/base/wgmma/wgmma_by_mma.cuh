// The functions of wgmma_sm90a.cuh by the product of a warp: each warp of the warpgroup computes
// its 16 rows of the sums, which lie in its registers as wgmma would leave them. Only wgmma.cuh
// includes it. sm_80 or later.
#pragma once

#include <cstdint>

#include "kernels/base/ampere.cuh"

namespace kvasir::kernels::hopper {

// Products are over when their calls return.
__device__ inline void WgmmaFence() {}
__device__ inline void WgmmaCommit() {}
template <int kPending>
__device__ inline void WgmmaWait() {}

// Every thread keeps the registers of the launch.
template <int kRegisters>
__device__ inline void FewerRegisters() {}
template <int kRegisters>
__device__ inline void MoreRegisters() {}

// Every CTA copies all boxes for itself.
template <int kBlocks>
__device__ inline void CopyBoxesToCluster(std::byte* to, int box_bytes, const CUtensorMap* map,
                                          int32_t column, int32_t box_rows, uint64_t* barrier) {
  for (int box = 0; box < kBlocks; ++box) {
    CopyBox(to + box * box_bytes, map, column, box * box_rows, barrier);
  }
}

// Returns the address of a place in this CTA's shared memory. Descriptors name places; in a cluster
// addresses have the CTA's rank in them.
__device__ inline uint32_t OwnAddress(uint32_t place) {
  uint32_t address = 0;
  asm("{\n"
      ".reg .b32 rank;\n"
      "mov.b32 rank, %%cluster_ctarank;\n"
      "mapa.shared::cluster.u32 %0, %1, rank;\n"
      "}\n"
      : "=r"(address)
      : "r"(place));
  return address;
}

// An operand in shared memory, from its descriptor, as this lane loads it: the lane gives row
// `row` of the 8 x 8 matrix `matrix` of four.
struct SharedOperand {
  __device__ explicit SharedOperand(uint64_t descriptor)
      : start(OwnAddress((static_cast<uint32_t>(descriptor) & 0x3fff) << 4)),
        tile_stride((static_cast<uint32_t>(descriptor) >> 16 & 0x3fff) << 4),
        matrix(threadIdx.x % 32 / 8),
        row(threadIdx.x % 8) {}

  // Returns the address of the lane's row in group `group` of 8 rows, from `bytes` on. The piece of
  // 16 bytes within 128 is swizzled by the row within 1,024.
  __device__ uint32_t Address(uint32_t group, uint32_t bytes) const {
    const uint32_t at = start + group * kSwizzledGroupBytes + row * kSwizzledRowBytes + bytes;
    return at ^ (at >> 3 & 0x70);
  }

  const uint32_t start, tile_stride;
  const uint32_t matrix, row;
};

// The warp's 16 rows of a[64, 16], as the product takes them.
template <Major kMajor>
__device__ inline void LoadRows(uint64_t descriptor, uint32_t (&a)[4]) {
  const SharedOperand from(descriptor);
  const uint32_t warp = threadIdx.x / 32 % 4;
  const uint32_t lower = from.matrix % 2, right = from.matrix / 2;  // rows, columns from 8 on
  uint4 loaded;
  if constexpr (kMajor == Major::kK) {
    loaded = LoadMatricesAt(from.Address(2 * warp + lower, 16 * right));
  } else {
    loaded = LoadTransposedAt(from.Address(right, 16 * (2 * warp + lower)));
  }
  a[0] = loaded.x, a[1] = loaded.y, a[2] = loaded.z, a[3] = loaded.w;
}

// d[16 of 64, 2 kSums] += a b[16, 2 kSums].
template <Major kMajorB, int kSums>
__device__ inline void AddProducts(float (&d)[kSums], const uint32_t (&a)[4], uint64_t descriptor) {
  constexpr uint32_t kEights = kSums / 4;  // of columns
  constexpr uint32_t kTileEights = kSwizzledRowBytes / 16;
  const SharedOperand from(descriptor);
  const uint32_t lower = from.matrix % 2;  // rows of b from 8 on
#pragma unroll
  for (uint32_t eight = 0; eight < kEights; eight += 2) {
    const uint32_t mine = min(eight + from.matrix / 2, kEights - 1);
    uint4 b;
    if constexpr (kMajorB == Major::kK) {
      b = LoadMatricesAt(from.Address(mine, 16 * lower));
    } else {
      b = LoadTransposedAt(
          from.Address(lower, mine / kTileEights * from.tile_stride + 16 * (mine % kTileEights)));
    }
    Mma16x8(reinterpret_cast<float(&)[4]>(d[4 * eight]), a, {b.x, b.y});
    if (eight + 1 < kEights) {
      Mma16x8(reinterpret_cast<float(&)[4]>(d[4 * eight + 4]), a, {b.z, b.w});
    }
  }
}
template <Major kMajorA, Major kMajorB, int kSums>
__device__ inline void AddProducts(float (&d)[kSums], uint64_t a, uint64_t b) {
  uint32_t rows[4];
  LoadRows<kMajorA>(a, rows);
  AddProducts<kMajorB>(d, rows, b);
}
template <int kSums>
__device__ inline void ZeroUnless(bool accumulate, float (&d)[kSums]) {
#pragma unroll
  for (float& sum : d) sum = accumulate ? sum : 0;
}

// --- the functions of wgmma_sm90a.cuh, documented there ---

template <Major kMajorA>
__device__ inline void Wgmma64x8(float (&d)[4], uint64_t a, uint64_t b, bool accumulate) {
  ZeroUnless(accumulate, d);
  AddProducts<kMajorA, Major::kK>(d, a, b);
}
__device__ inline void Wgmma64x8(float (&d)[4], const uint32_t (&a)[4], uint64_t b) {
  AddProducts<Major::kK>(d, a, b);
}
template <Major kMajorB>
__device__ inline void Wgmma64x64(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
  ZeroUnless(accumulate, d);
  AddProducts<Major::kK, kMajorB>(d, a, b);
}
template <Major kMajorB>
__device__ inline void Wgmma64x64(float (&d)[32], const uint32_t (&a)[4], uint64_t b,
                                  bool accumulate = true) {
  ZeroUnless(accumulate, d);
  AddProducts<kMajorB>(d, a, b);
}
__device__ inline void Wgmma64x128(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  AddProducts<Major::kMN>(d, a, b);
}
__device__ inline void Wgmma64x128(float (&d)[64], uint64_t a, uint64_t b) {
  AddProducts<Major::kK, Major::kK>(d, a, b);
}
__device__ inline void Wgmma64x16(float (&d)[8], uint64_t a, uint64_t b) {
  AddProducts<Major::kK, Major::kK>(d, a, b);
}
__device__ inline void Wgmma64x32(float (&d)[16], uint64_t a, uint64_t b) {
  AddProducts<Major::kK, Major::kK>(d, a, b);
}

}  // namespace kvasir::kernels::hopper
