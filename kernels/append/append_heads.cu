// Prepares heads for attention on the GPU. Some CTAs write one page of one KV head each: a CTA
// takes the page's first query tile, and after it, in order, the other tiles with tokens for that
// page (decode rows of one sequence). Each thread has one element of the head. It reads, stores and
// bounds the element token by token, as the CPU does. Warps then make the codes from the cached
// keys, one token each. The other CTAs prepare query heads, one a warp.
//
// That form suits one token a tile. For prompts in bfloat16, a thread has sixteen bytes of each
// half of a head, and the threads of a CTA work on different tokens at once. The bounds of their
// parts are merged in the order of tokens. Compiled without fused multiply-add, so that all bytes
// equal the CPU's.
#include <type_traits>

#include "kernels/append/append_heads_launch.h"
#include "kernels/append/key_codes.cuh"
#include "kernels/base/overlapped_launch.h"
#include "kernels/base/warp.cuh"
#include "kernels/dense/rms_norm.cuh"

namespace kvasir::kernels {
namespace {

// One head of a token, normalized and rotated as attention reads it.
template <typename Activation>
struct Head {
  const Activation* x;     // [head_dim]
  const Activation* norm;  // null: not normalized
  float scale;             // of the norm
  const float* cos;        // [head_dim / 2]; null: not rotated
  const float* sin;
  int64_t half_dim;

  __device__ float Normal(int64_t i) const {
    return static_cast<float>(norm == nullptr ? x[i] : Normalized(x[i], scale, norm[i]));
  }
  __device__ Activation At(int64_t i) const {
    if (cos == nullptr) return norm == nullptr ? x[i] : Activation(Normal(i));
    const bool is_first = i < half_dim;
    const int64_t pair = is_first ? i : i - half_dim;
    const float own = Normal(i);
    const float other = Normal(is_first ? i + half_dim : pair);
    return Activation(is_first ? own * cos[pair] - other * sin[pair]
                               : own * cos[pair] + other * sin[pair]);
  }
};

template <typename Activation>
__device__ const Activation* HeadOf(const AppendHeadsLaunch& p, int64_t token, int64_t head) {
  const int64_t heads = p.num_heads + 2 * p.kv.layout.num_kv_heads;
  return static_cast<const Activation*>(p.qkv) + (token * heads + head) * p.kv.layout.head_dim;
}

// Returns the norm's scale of the head `x` to all lanes. Called by one warp.
template <typename Activation>
__device__ float ScaleOf(const AppendHeadsLaunch& p, const Activation* x) {
  float sum = 0;
  for (int64_t i = threadIdx.x % kWarpThreads; i < p.kv.layout.head_dim; i += kWarpThreads) {
    sum = AddSquare(sum, static_cast<float>(x[i]));
  }
  sum = SumOfLanes(sum);
  return NormScale(&sum, 1, p.kv.layout.head_dim, p.epsilon);
}

template <typename Activation>
__device__ Head<Activation> MakeHead(const AppendHeadsLaunch& p, int64_t token, const Activation* x,
                                     const void* norm, float scale) {
  const int64_t half_dim = p.kv.layout.head_dim / 2;
  const bool rotates = p.cos != nullptr;
  return {.x = x,
          .norm = static_cast<const Activation*>(norm),
          .scale = scale,
          .cos = rotates ? p.cos + token * half_dim : nullptr,
          .sin = rotates ? p.sin + token * half_dim : nullptr,
          .half_dim = half_dim};
}

// Destination of the tokens of one query tile.
template <typename Kv>
struct Target {
  Kv* keys;        // of the tile's first token
  Kv* values;      // likewise
  Kv* bounds;      // of the page; null: not kept
  int64_t offset;  // of the tile's first token in the page
};

template <typename Activation, typename Kv>
__device__ Kv Cached(Activation value) {
  if constexpr (std::is_same_v<Activation, Kv>) {
    return value;
  } else {
    return static_cast<Kv>(static_cast<float>(value));
  }
}

// Stores element threadIdx.x of all tokens of the tile. `scales` are those of the tokens' norms.
template <typename Activation, typename Kv>
__device__ void StoreElement(const AppendHeadsLaunch& p, const QueryBlock& block, int64_t head,
                             const float* scales, const Target<Kv>& to) {
  const int64_t d = p.kv.layout.head_dim;
  const int64_t i = threadIdx.x;
  if (i >= d) return;
  const bool opens_page = to.offset == 0;
  Kv min = Kv(INFINITY);
  Kv max = Kv(-INFINITY);
  if (to.bounds != nullptr && !opens_page) {
    min = to.bounds[i];
    max = to.bounds[d + i];
  }
  for (int64_t r = 0; r < block.num_rows; ++r) {
    const int64_t token = block.first_row + r;
    const auto* k = HeadOf<Activation>(p, token, p.num_heads + head);
    const auto* v = k + p.kv.layout.num_kv_heads * d;
    const float scale = p.k_norm == nullptr ? 1.0f : scales[r];
    const Kv key = Cached<Activation, Kv>(MakeHead(p, token, k, p.k_norm, scale).At(i));
    to.keys[r * d + i] = key;
    to.values[r * d + i] = Cached<Activation, Kv>(v[i]);
    // Comparisons with NaN are false: a NaN key changes nothing.
    min = static_cast<float>(key) < static_cast<float>(min) ? key : min;
    max = static_cast<float>(key) > static_cast<float>(max) ? key : max;
  }
  if (to.bounds == nullptr) return;
  to.bounds[i] = min;
  to.bounds[d + i] = max;
}

template <typename Kv>
__device__ Target<Kv> TargetOf(const AppendHeadsLaunch& p, const QueryBlock& block, int64_t head) {
  const KvLayout& layout = p.kv.layout;
  const int64_t index = block.first_position / kPageTokens;
  const int64_t offset = block.first_position % kPageTokens;
  std::byte* page = p.kv.Peek(block.slot, index, p.layer, head).page();
  std::byte* bounds =
      p.kv.bounds == nullptr ? nullptr : p.kv.Bounds(block.slot, index, p.layer, head);
  return {.keys = reinterpret_cast<Kv*>(page) + offset * layout.head_dim,
          .values = reinterpret_cast<Kv*>(page + layout.v_offset()) + offset * layout.head_dim,
          .bounds = reinterpret_cast<Kv*>(bounds),
          .offset = offset};
}

// Writes the scales of the norms of the tile's keys to shared memory, or nothing when keys are not
// normalized. Called by all threads of the CTA.
template <typename Activation>
__device__ void FindScales(const AppendHeadsLaunch& p, const QueryBlock& block, int64_t head,
                           float* scales) {
  if (p.k_norm == nullptr) return;
  const int64_t num_warps = blockDim.x / kWarpThreads;
  __syncthreads();  // the previous tile's scales have been read
  for (int64_t r = threadIdx.x / kWarpThreads; r < block.num_rows; r += num_warps) {
    const float scale = ScaleOf(p, HeadOf<Activation>(p, block.first_row + r, p.num_heads + head));
    if (threadIdx.x % kWarpThreads == 0) scales[r] = scale;
  }
  __syncthreads();
}

// Makes the codes of the keys just stored. Called by all threads of the CTA.
template <typename Kv>
__device__ void EncodeKeys(const AppendHeadsLaunch& p, const QueryBlock& block, int64_t head,
                           const Target<Kv>& to) {
  if (p.kv.key_codes == nullptr) return;
  const KvLayout& layout = p.kv.layout;
  const int64_t num_warps = blockDim.x / kWarpThreads;
  __syncthreads();  // a warp codes keys that all warps have written
  const std::byte* codes =
      p.kv.KeyCodes(block.slot, block.first_position / kPageTokens, p.layer, head);
  for (int64_t r = threadIdx.x / kWarpThreads; r < block.num_rows; r += num_warps) {
    EncodeKey<Kv>(layout, to.keys + r * layout.head_dim, TokenCodes(layout, codes, to.offset + r));
  }
}

// Appends one tile, by all threads of the CTA. REQUIRES: the page is in the device tier.
template <typename Activation, typename Kv>
__device__ void AppendBlock(const AppendHeadsLaunch& p, const QueryBlock& block, int64_t head) {
  const Target<Kv> to = TargetOf<Kv>(p, block, head);
  __shared__ float scales[kPageTokens];
  FindScales<Activation>(p, block, head, scales);
  StoreElement<Activation, Kv>(p, block, head, scales, to);
  EncodeKeys(p, block, head, to);
}

__device__ bool SharePage(const QueryBlock& a, const QueryBlock& b) {
  return a.slot == b.slot && a.first_position / kPageTokens == b.first_position / kPageTokens;
}

// Calls append(tile) for all tiles of the page, in order, if `first` is the page's first tile.
// Called by all threads of the CTA.
template <typename Append>
__device__ void ForBlocksOfPage(const AppendHeadsLaunch& p, int64_t first, int64_t head,
                                const Append& append) {
  const QueryBlock block = p.blocks[first];
  bool is_first = true;
  bool is_alone = true;
  for (int64_t j = threadIdx.x; j < p.num_blocks; j += blockDim.x) {
    if (j == first || !SharePage(p.blocks[j], block)) continue;
    (j < first ? is_first : is_alone) = false;
  }
  if (__syncthreads_and(is_first) == 0) return;
  const bool alone = __syncthreads_and(is_alone) != 0;
  const PageRef page = p.kv.Peek(block.slot, block.first_position / kPageTokens, p.layer, head);
  if (page.tier() != PageTier::kDevice) {
    if (threadIdx.x == 0) p.faults[block.slot] = 1;
    return;
  }
  const int64_t end = alone ? first + 1 : p.num_blocks;
  for (int64_t j = first; j < end; ++j) {
    const QueryBlock next = p.blocks[j];
    if (SharePage(next, block)) append(next);
  }
}

// Prepares one query head, by one warp.
template <typename Activation>
__device__ void TakeQueryHead(const AppendHeadsLaunch& p, int64_t token, int64_t head) {
  const int64_t d = p.kv.layout.head_dim;
  const auto* x = HeadOf<Activation>(p, token, head);
  const float scale = p.q_norm == nullptr ? 1.0f : ScaleOf(p, x);
  const Head<Activation> from = MakeHead(p, token, x, p.q_norm, scale);
  auto* const to = static_cast<Activation*>(p.q) + (token * p.num_heads + head) * d;
  for (int64_t i = threadIdx.x % kWarpThreads; i < d; i += kWarpThreads) to[i] = from.At(i);
}

template <typename Activation, typename Kv>
__global__ void AppendHeadsKernel(const __grid_constant__ AppendHeadsLaunch p) {
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  const int64_t kv_heads = p.kv.layout.num_kv_heads;
  const int64_t pages = p.num_blocks * kv_heads;
  if (blockIdx.x < pages) {
    const int64_t head = blockIdx.x % kv_heads;
    ForBlocksOfPage(p, blockIdx.x / kv_heads, head,
                    [&](const QueryBlock& block) { AppendBlock<Activation, Kv>(p, block, head); });
    return;
  }
  const int64_t item =
      (blockIdx.x - pages) * (blockDim.x / kWarpThreads) + threadIdx.x / kWarpThreads;
  if (item >= p.num_tokens * p.num_heads) return;
  TakeQueryHead<Activation>(p, item / p.num_heads, item % p.num_heads);
}

// --- prompts, in bfloat16 ---

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
__device__ void StoreKeys(const AppendHeadsLaunch& p, const QueryBlock& block, int64_t head,
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
    if (r >= block.num_rows) continue;
    const int64_t token = block.first_row + r;
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

// Extends the page's bounds by those of the tile's keys, one element a thread.
template <int kHeadDim>
__device__ void ExtendBounds(const Target<BFloat16>& to,
                             const typename PromptShape<kHeadDim>::Shared& shared) {
  if (to.bounds == nullptr) return;
  __syncthreads();  // all warps have written their bounds
  const int i = static_cast<int>(threadIdx.x);
  if (i < kHeadDim) {
    BFloat16 least(INFINITY), greatest(-INFINITY);
    if (to.offset > 0) {
      least = to.bounds[i];
      greatest = to.bounds[kHeadDim + i];
    }
    for (int warp = 0; warp < PromptShape<kHeadDim>::kWarps; ++warp) {
      const BFloat16 low = shared.least[warp][i], high = shared.greatest[warp][i];
      if (static_cast<float>(low) < static_cast<float>(least)) least = low;
      if (static_cast<float>(high) > static_cast<float>(greatest)) greatest = high;
    }
    to.bounds[i] = least;
    to.bounds[kHeadDim + i] = greatest;
  }
  __syncthreads();  // before shared memory is written again
}

template <int kHeadDim>
__device__ void StoreValues(const AppendHeadsLaunch& p, const QueryBlock& block, int64_t head,
                            const Target<BFloat16>& to) {
  constexpr int kRowParts = kHeadDim / kPartElements;
  const int64_t column = p.num_heads + p.kv.layout.num_kv_heads + head;
#pragma unroll
  for (int i = 0; i < kPageTokens * kRowParts / kPromptThreads; ++i) {
    const int part = i * kPromptThreads + static_cast<int>(threadIdx.x);
    const int r = part / kRowParts;
    if (r >= block.num_rows) continue;
    const BFloat16* const from = HeadOf<BFloat16>(p, block.first_row + r, column);
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

template <int kHeadDim>
__global__ void __launch_bounds__(kPromptThreads, kPromptBlocks)
    AppendPromptKernel(const __grid_constant__ AppendHeadsLaunch p) {
  using Shape = PromptShape<kHeadDim>;
  __shared__ alignas(16) std::byte memory[sizeof(typename Shape::Shared)];
  auto& shared = *reinterpret_cast<typename Shape::Shared*>(memory);
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  const int64_t kv_heads = p.kv.layout.num_kv_heads;
  const int64_t pages = p.num_blocks * kv_heads;
  if (blockIdx.x >= pages) {
    const auto number = static_cast<uint32_t>(blockIdx.x - pages);
    const uint32_t warp = number * Shape::kWarps + threadIdx.x / kWarpThreads;
    TakeQueryHeads<kHeadDim>(p, warp * Shape::kWarpHeads);
    return;
  }
  const int64_t head = blockIdx.x % kv_heads;
  ForBlocksOfPage(p, blockIdx.x / kv_heads, head, [&](const QueryBlock& block) {
    const Target<BFloat16> to = TargetOf<BFloat16>(p, block, head);
    FindScales<BFloat16>(p, block, head, shared.scales);
    StoreKeys<kHeadDim>(p, block, head, to, shared);
    StoreValues<kHeadDim>(p, block, head, to);
    ExtendBounds<kHeadDim>(to, shared);
    EncodeKeys(p, block, head, to);
  });
}

template <int kHeadDim>
cudaError_t LaunchPrompt(const AppendHeadsLaunch& p, cudaStream_t stream) {
  constexpr int kBlockHeads = PromptShape<kHeadDim>::kWarps * PromptShape<kHeadDim>::kWarpHeads;
  const int64_t query_blocks = (p.num_tokens * p.num_heads + kBlockHeads - 1) / kBlockHeads;
  const auto blocks = static_cast<unsigned>(p.num_blocks * p.kv.layout.num_kv_heads + query_blocks);
  return LaunchOverlapped(AppendPromptKernel<kHeadDim>, blocks, kPromptThreads, 0, stream, p);
}

template <typename Activation, typename Kv>
cudaError_t Launch(const AppendHeadsLaunch& p, cudaStream_t stream) {
  const int64_t warps = (p.kv.layout.head_dim + kWarpThreads - 1) / kWarpThreads;
  const int64_t query_blocks = (p.num_tokens * p.num_heads + warps - 1) / warps;
  const auto blocks = static_cast<unsigned>(p.num_blocks * p.kv.layout.num_kv_heads + query_blocks);
  return LaunchOverlapped(AppendHeadsKernel<Activation, Kv>, blocks,
                          static_cast<unsigned>(warps * kWarpThreads), 0, stream, p);
}

}  // namespace

cudaError_t LaunchAppendHeads(const AppendHeadsLaunch& p, cudaStream_t stream) {
  const bool wide_kv = p.kv.layout.dtype == DType::kFloat32;
  if (p.num_tokens > p.num_blocks && p.dtype == DType::kBFloat16 && !wide_kv) {
    if (p.kv.layout.head_dim == 128) return LaunchPrompt<128>(p, stream);
    if (p.kv.layout.head_dim == 64) return LaunchPrompt<64>(p, stream);
  }
  if (p.dtype == DType::kFloat32) {
    return wide_kv ? Launch<float, float>(p, stream) : Launch<float, BFloat16>(p, stream);
  }
  return wide_kv ? Launch<BFloat16, float>(p, stream) : Launch<BFloat16, BFloat16>(p, stream);
}

}  // namespace kvasir::kernels
