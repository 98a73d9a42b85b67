// One row of a Select or Prune call in a kernel: (query tile, KV head), and its queries. For
// kernels of selectors and pruners.
#pragma once

#include <cstdint>

#include "kernels/base/warp.cuh"
#include "kernels/sparse/common/select_cuda.h"
#include "kernels/sparse/common/selection_header.h"

namespace kvasir::kernels {

struct DeviceRow {
  // 32 bits: a 64-bit division is a function call.
  __device__ DeviceRow(const SelectLaunch& p, uint32_t row)
      : index(row),
        kv_head(row % static_cast<uint32_t>(p.kv.layout.num_kv_heads)),
        tile(p.tiles[row / static_cast<uint32_t>(p.kv.layout.num_kv_heads)]),
        numbers(p.numbers[row / static_cast<uint32_t>(p.kv.layout.num_kv_heads)]) {}

  int64_t index;
  int64_t kv_head;
  QueryTile tile;
  PolicyNumbers numbers;
};

// The rotation of a head's pairs of elements to one position.
struct RotationAt {
  __device__ RotationAt(const DeviceRopePositions& rope, int64_t half_dim, int64_t position)
      : cos(rope.cos + position * half_dim), sin(rope.sin + position * half_dim) {}

  // Rotates element i and the element half a head after it.
  __device__ float2 Rotate(int i, float x, float y) const {
    return {x * cos[i] - y * sin[i], y * cos[i] + x * sin[i]};
  }

  const float* cos;
  const float* sin;
};

template <typename T>
__device__ float LoadElement(const void* values, int64_t i) {
  return static_cast<float>(static_cast<const T*>(values)[i]);
}

// Sixteen bytes of a key.
template <typename Kv>
struct alignas(16) KeyVector {
  static constexpr int kElements = 16 / static_cast<int>(sizeof(Kv));
  Kv values[kElements];
};

// Returns the page's keys. Null, with the slot's fault set, if the page is absent.
__device__ inline const std::byte* FindKeys(const SelectLaunch& p, const DeviceRow& row,
                                            int64_t page, uint8_t* faults) {
  const PageRef ref = p.kv.Peek(row.tile.slot, page, p.layer, row.kv_head);
  if (ref.tier() != PageTier::kAbsent) return ref.page();
  faults[row.tile.slot] = 1;
  return nullptr;
}

// Element `element` of query r of the row's tile, for head g of its group.
__device__ inline float QueryElement(const SelectLaunch& p, const DeviceRow& row, int64_t r,
                                     int64_t g, int64_t element) {
  const int64_t q_row =
      (row.tile.first_row + r) * p.kv.layout.num_kv_heads * p.group + row.kv_head * p.group + g;
  const int64_t at = q_row * p.kv.layout.head_dim + element;
  return p.q_dtype == DType::kFloat32 ? LoadElement<float>(p.q, at)
                                      : LoadElement<BFloat16>(p.q, at);
}

// The same, of the mean of the queries [begin, end).
__device__ inline float MeanElement(const SelectLaunch& p, const DeviceRow& row, int64_t begin,
                                    int64_t end, int64_t g, int64_t element) {
  float sum = 0;
#pragma unroll 4
  for (int64_t r = begin; r < end; ++r) sum += QueryElement(p, row, r, g, element);
  return sum / static_cast<float>(end - begin);
}

// Elements 4 i to 4 i + 3 of query r of the row's tile, for head g of its group.
__device__ inline float4 QueryFour(const SelectLaunch& p, const DeviceRow& row, int64_t r,
                                   int64_t g, int64_t i) {
  const int64_t q_row =
      (row.tile.first_row + r) * p.kv.layout.num_kv_heads * p.group + row.kv_head * p.group + g;
  const int64_t at = q_row * (p.kv.layout.head_dim / 4) + i;
  if (p.q_dtype == DType::kFloat32) return static_cast<const float4*>(p.q)[at];
  const uint2 pairs = static_cast<const uint2*>(p.q)[at];
  return {__uint_as_float(pairs.x << 16), __uint_as_float(pairs.x & 0xffff0000u),
          __uint_as_float(pairs.y << 16), __uint_as_float(pairs.y & 0xffff0000u)};
}
// The same, of the mean of the queries [begin, end).
__device__ inline float4 MeanFour(const SelectLaunch& p, const DeviceRow& row, int64_t begin,
                                  int64_t end, int64_t g, int64_t i) {
  float4 sum = {0, 0, 0, 0};
#pragma unroll 2
  for (int64_t r = begin; r < end; ++r) {
    const float4 own = QueryFour(p, row, r, g, i);
    sum = {sum.x + own.x, sum.y + own.y, sum.z + own.z, sum.w + own.w};
  }
  const float share = 1.0f / static_cast<float>(end - begin);
  return {sum.x * share, sum.y * share, sum.z * share, sum.w * share};
}

}  // namespace kvasir::kernels
