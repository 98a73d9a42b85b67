// Internal to append_heads.cu: the kernel for prompts in bfloat16. A thread has sixteen bytes of
// each half of a head, and the threads of a CTA work on different tokens at once. Quantized KV is
// written like that of single tokens (append_heads_codes.cuh).
#pragma once

#include "kernels/append/append_heads.cuh"
#include "kernels/append/append_heads_codes.cuh"
#include "kernels/append/append_heads_launch.h"
#include "kernels/base/warp.cuh"

namespace kvasir::kernels {
namespace {

constexpr int kPromptThreads = 256;
constexpr int kPromptBlocks = 3;  // CTAs of a multiprocessor at once, to keep more reads under way
constexpr int kPartElements = 8;  // sixteen bytes

struct alignas(16) Part {
  BFloat16 elements[kPartElements];
};
// Elements of both halves of a head that a rotation combines.
struct Parts {
  Part low, high;
};

// Returns part `number` of both halves of a head, normalized and rotated.
template <int kHeadDim>
__device__ Parts TakeParts(const AppendHeadsLaunch& p, int64_t token, const BFloat16* x,
                           const void* norm, float scale, int number) {
  constexpr int kHalf = kHeadDim / 2;
  const int first = number * kPartElements;
  Parts parts = {.low = *reinterpret_cast<const Part*>(x + first),
                 .high = *reinterpret_cast<const Part*>(x + kHalf + first)};
  if (norm != nullptr) {
    const auto* const weights = static_cast<const BFloat16*>(norm) + first;
    for (int i = 0; i < kPartElements; ++i) {
      parts.low.elements[i] = Normalized(parts.low.elements[i], scale, weights[i]);
      parts.high.elements[i] = Normalized(parts.high.elements[i], scale, weights[kHalf + i]);
    }
  }
  if (p.cos == nullptr) return parts;
  struct alignas(16) Angles {
    float of[kPartElements];
  };
  const Angles cos = *reinterpret_cast<const Angles*>(p.cos + token * kHalf + first);
  const Angles sin = *reinterpret_cast<const Angles*>(p.sin + token * kHalf + first);
  for (int i = 0; i < kPartElements; ++i) {
    const auto low = static_cast<float>(parts.low.elements[i]);
    const auto high = static_cast<float>(parts.high.elements[i]);
    parts.low.elements[i] = RoundTo<BFloat16>(low * cos.of[i] - high * sin.of[i]);
    parts.high.elements[i] = RoundTo<BFloat16>(high * cos.of[i] + low * sin.of[i]);
  }
  return parts;
}

__device__ void StoreParts(const Parts& parts, BFloat16* low, BFloat16* high) {
  *reinterpret_cast<Part*>(low) = parts.low;
  *reinterpret_cast<Part*>(high) = parts.high;
}

// Least and greatest of keys. Among equal ones (0 and -0) the first is kept. NaN changes nothing.
struct Bounds {
  Part least, greatest;

  __device__ void Add(const Part& least_after, const Part& greatest_after) {
#pragma unroll
    for (int i = 0; i < kPartElements; ++i) {
      const BFloat16 low = least_after.elements[i], high = greatest_after.elements[i];
      if (static_cast<float>(low) < static_cast<float>(least.elements[i])) least.elements[i] = low;
      if (static_cast<float>(high) > static_cast<float>(greatest.elements[i])) {
        greatest.elements[i] = high;
      }
    }
  }
};
__device__ Bounds NoBounds() {  // bounds over no key
  Bounds bounds;
  for (int i = 0; i < kPartElements; ++i) {
    bounds.least.elements[i] = BFloat16(INFINITY);
    bounds.greatest.elements[i] = BFloat16(-INFINITY);
  }
  return bounds;
}

// Returns the part of lane + `distance`.
__device__ Part ShuffleDown(const Part& own, int distance) {
  Part other;
  for (int i = 0; i < kPartElements; i += 2) {
    const auto* const word = reinterpret_cast<const uint32_t*>(own.elements + i);
    *reinterpret_cast<uint32_t*>(other.elements + i) = __shfl_down_sync(kAllLanes, *word, distance);
  }
  return other;
}

template <int kHeadDim>
struct PromptShape {
  static constexpr int kHeadThreads = kHeadDim / 2 / kPartElements;
  static constexpr int kWarpHeads = kWarpThreads / kHeadThreads;
  static constexpr int kGroups = kPromptThreads / kHeadThreads;
  static constexpr int kRows = static_cast<int>(kPageTokens) / kGroups;  // rows of a group of
                                                                         // threads
  static constexpr int kWarps = kPromptThreads / kWarpThreads;
  struct Shared {
    float scales[kPageTokens];
    alignas(16) BFloat16 least[kWarps][kHeadDim];
    alignas(16) BFloat16 greatest[kWarps][kHeadDim];
  };
};

// Stores the tile's keys. A thread has consecutive keys, and the next group of threads has the keys
// after them.
template <int kHeadDim>
__device__ void StoreKeys(const AppendHeadsLaunch& p, const QueryTile& tile, int64_t head,
                          const Target<BFloat16>& to,
                          typename PromptShape<kHeadDim>::Shared& shared) {
  using Shape = PromptShape<kHeadDim>;
  const int thread = static_cast<int>(threadIdx.x);
  const int number = thread % Shape::kHeadThreads;
  const int element = number * kPartElements;
  Bounds low = NoBounds(), high = NoBounds();
#pragma unroll 1
  for (int i = 0; i < Shape::kRows; ++i) {
    const int r = thread / Shape::kHeadThreads * Shape::kRows + i;
    if (r >= tile.num_rows) continue;
    const int64_t token = tile.first_row + r;
    const float scale = p.k_norm == nullptr ? 1.0f : shared.scales[r];
    const Parts parts = TakeParts<kHeadDim>(
        p, token, HeadOf<BFloat16>(p, token, p.num_heads + head), p.k_norm, scale, number);
    BFloat16* const key = to.keys + r * kHeadDim + element;
    StoreParts(parts, key, key + kHeadDim / 2);
    low.Add(parts.low, parts.low);
    high.Add(parts.high, parts.high);
  }
  if (to.bounds == nullptr) return;
  for (int distance = Shape::kHeadThreads; distance < kWarpThreads; distance *= 2) {
    low.Add(ShuffleDown(low.least, distance), ShuffleDown(low.greatest, distance));
    high.Add(ShuffleDown(high.least, distance), ShuffleDown(high.greatest, distance));
  }
  if (thread % kWarpThreads >= Shape::kHeadThreads) return;
  BFloat16* const least = shared.least[thread / kWarpThreads] + element;
  BFloat16* const greatest = shared.greatest[thread / kWarpThreads] + element;
  StoreParts({low.least, high.least}, least, least + kHeadDim / 2);
  StoreParts({low.greatest, high.greatest}, greatest, greatest + kHeadDim / 2);
}

// Extends the page's bounds by those of the tile's keys.
template <int kHeadDim>
__device__ void ExtendBounds(const Target<BFloat16>& to,
                             const typename PromptShape<kHeadDim>::Shared& shared) {
  if (to.bounds == nullptr) return;
  __syncthreads();  // all warps have written their bounds
  MergeBounds(shared.least, shared.greatest, kHeadDim, to.offset == 0, to.bounds);
  __syncthreads();  // before shared memory is written again
}

template <int kHeadDim>
__device__ void StoreValues(const AppendHeadsLaunch& p, const QueryTile& tile, int64_t head,
                            const Target<BFloat16>& to) {
  constexpr int kRowParts = kHeadDim / kPartElements;
  const int64_t column = p.num_heads + p.kv.layout.num_kv_heads + head;
#pragma unroll
  for (int i = 0; i < kPageTokens * kRowParts / kPromptThreads; ++i) {
    const int part = i * kPromptThreads + static_cast<int>(threadIdx.x);
    const int r = part / kRowParts;
    if (r >= tile.num_rows) continue;
    const BFloat16* const from = HeadOf<BFloat16>(p, tile.first_row + r, column);
    reinterpret_cast<Part*>(to.values)[part] =
        reinterpret_cast<const Part*>(from)[part % kRowParts];
  }
}

// Prepares up to kWarpHeads query heads from `first` on, counted over all tokens. Called by one
// warp.
template <int kHeadDim>
__device__ void TakeQueryHeads(const AppendHeadsLaunch& p, uint32_t first) {
  using Shape = PromptShape<kHeadDim>;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int number = lane % Shape::kHeadThreads;
  const auto heads = static_cast<uint32_t>(p.num_heads);
  const uint32_t end = static_cast<uint32_t>(p.num_tokens) * heads;
  const auto head_at = [&](uint32_t item) {
    return HeadOf<BFloat16>(p, item / heads, item % heads);
  };
  const uint32_t item = first + lane / Shape::kHeadThreads;
  float scale = 1;
  for (uint32_t h = 0; h < Shape::kWarpHeads && p.q_norm != nullptr; ++h) {
    if (first + h >= end) break;
    const float of_head = ScaleOf(p, head_at(first + h));
    if (first + h == item) scale = of_head;
  }
  if (item >= end) return;
  const Parts parts = TakeParts<kHeadDim>(p, item / heads, head_at(item), p.q_norm, scale, number);
  BFloat16* const to =
      static_cast<BFloat16*>(p.q) + int64_t{item} * kHeadDim + number * kPartElements;
  StoreParts(parts, to, to + kHeadDim / 2);
}

// Appends one tile, by all threads of the CTA. REQUIRES: the page is in the device tier.
template <int kHeadDim>
__device__ void AppendPromptTile(const AppendHeadsLaunch& p, const QueryTile& tile, int64_t head) {
  using Shared = typename PromptShape<kHeadDim>::Shared;
  __shared__ alignas(16) std::byte memory[sizeof(Shared)];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  const Target<BFloat16> to = TargetOf<BFloat16>(p, tile, head);
  FindScales<BFloat16>(p, tile, head, shared.scales);
  StoreKeys<kHeadDim>(p, tile, head, to, shared);
  StoreValues<kHeadDim>(p, tile, head, to);
  ExtendBounds<kHeadDim>(to, shared);
  EncodeKeys(p, tile, head, to);
}

template <int kHeadDim, bool kCoded>
__global__ void __launch_bounds__(kPromptThreads, kPromptBlocks)
    AppendPromptKernel(const __grid_constant__ AppendHeadsLaunch p) {
  using Shape = PromptShape<kHeadDim>;
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  const int64_t kv_heads = p.kv.layout.num_kv_heads;
  const int64_t pages = p.num_tiles * kv_heads;
  if (blockIdx.x >= pages) {
    const auto number = static_cast<uint32_t>(blockIdx.x - pages);
    const uint32_t warp = number * Shape::kWarps + threadIdx.x / kWarpThreads;
    TakeQueryHeads<kHeadDim>(p, warp * Shape::kWarpHeads);
    return;
  }
  const int64_t head = blockIdx.x % kv_heads;
  ForTilesOfPage(p, blockIdx.x / kv_heads, head, [&](const QueryTile& tile) {
    if constexpr (kCoded) {
      static_assert(kPromptThreads == kCodingThreads);
      AppendCodes<BFloat16, kHeadDim / kWarpThreads>(p, tile, head);
    } else {
      AppendPromptTile<kHeadDim>(p, tile, head);
    }
  });
}

}  // namespace
}  // namespace kvasir::kernels
