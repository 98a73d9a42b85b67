// Heads on their way into attention, on the GPU. Some blocks of threads write a page of one KV head
// each: the first query block of the page, and behind it, in order, the others that have tokens for
// it (decode rows of one sequence). One thread has one element of the head: it takes, stores and
// bounds it, token by token, as the CPU does. Codes are made by a warp a token from what was
// cached. The other blocks take query heads, one a warp. Compiled without fused multiply-add, so
// that all bytes are the CPU's.
#include <type_traits>

#include "kernels/base/overlapped_launch.h"
#include "kernels/base/warp.cuh"
#include "kernels/dense/rms_norm.cuh"
#include "kernels/paged/append_heads_launch.h"
#include "kernels/paged/key_codes.cuh"

namespace kvasir::kernels {
namespace {

// One head of a token, as attention takes it.
template <typename Activation>
struct Head {
  const Activation* x;     // [head_dim]
  const Activation* norm;  // null: as it is
  float scale;             // of the norm
  const float* cos;        // [head_dim / 2]; null: un-rotated
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

// By one warp, for all its lanes.
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

// Where the tokens of one query block go.
template <typename Kv>
struct Target {
  Kv* keys;        // of its first token
  Kv* values;      // likewise
  Kv* bounds;      // of the page; null: not kept
  int64_t offset;  // of its first token in the page
};

template <typename Activation, typename Kv>
__device__ Kv Cached(Activation value) {
  if constexpr (std::is_same_v<Activation, Kv>) {
    return value;
  } else {
    return static_cast<Kv>(static_cast<float>(value));
  }
}

// Element threadIdx.x of all tokens of the block; `scales` are of their norms.
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

// All threads of the block. REQUIRES: the page is in the device tier.
template <typename Activation, typename Kv>
__device__ void AppendBlock(const AppendHeadsLaunch& p, const QueryBlock& block, int64_t head) {
  const KvLayout& layout = p.kv.layout;
  const int64_t index = block.first_position / kPageTokens;
  const int64_t offset = block.first_position % kPageTokens;
  std::byte* page = p.kv.Peek(block.slot, index, p.layer, head).page();
  std::byte* bounds =
      p.kv.bounds == nullptr ? nullptr : p.kv.Bounds(block.slot, index, p.layer, head);
  const Target<Kv> to = {
      .keys = reinterpret_cast<Kv*>(page) + offset * layout.head_dim,
      .values = reinterpret_cast<Kv*>(page + layout.v_offset()) + offset * layout.head_dim,
      .bounds = reinterpret_cast<Kv*>(bounds),
      .offset = offset};
  __shared__ float scales[kPageTokens];
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int num_warps = static_cast<int>(blockDim.x) / kWarpThreads;
  if (p.k_norm != nullptr) {
    __syncthreads();  // those of an earlier block have been read
    for (int64_t r = warp; r < block.num_rows; r += num_warps) {
      const float scale =
          ScaleOf(p, HeadOf<Activation>(p, block.first_row + r, p.num_heads + head));
      if (threadIdx.x % kWarpThreads == 0) scales[r] = scale;
    }
    __syncthreads();
  }
  StoreElement<Activation, Kv>(p, block, head, scales, to);
  if (p.kv.key_codes == nullptr) return;
  __syncthreads();  // a warp codes what all have written
  const std::byte* codes = p.kv.KeyCodes(block.slot, index, p.layer, head);
  for (int64_t r = warp; r < block.num_rows; r += num_warps) {
    EncodeKey<Kv>(layout, to.keys + r * layout.head_dim, TokenCodes(layout, codes, offset + r));
  }
}

__device__ bool SharePage(const QueryBlock& a, const QueryBlock& b) {
  return a.slot == b.slot && a.first_position / kPageTokens == b.first_position / kPageTokens;
}

template <typename Activation, typename Kv>
__device__ void AppendPage(const AppendHeadsLaunch& p, int64_t first, int64_t head) {
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
  AppendBlock<Activation, Kv>(p, block, head);
  for (int64_t j = first + 1; j < p.num_blocks && !alone; ++j) {
    const QueryBlock next = p.blocks[j];
    if (SharePage(next, block)) AppendBlock<Activation, Kv>(p, next, head);
  }
}

// By one warp.
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
    AppendPage<Activation, Kv>(p, blockIdx.x / kv_heads, blockIdx.x % kv_heads);
    return;
  }
  const int64_t item =
      (blockIdx.x - pages) * (blockDim.x / kWarpThreads) + threadIdx.x / kWarpThreads;
  if (item >= p.num_tokens * p.num_heads) return;
  TakeQueryHead<Activation>(p, item / p.num_heads, item % p.num_heads);
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
  if (p.dtype == DType::kFloat32) {
    return wide_kv ? Launch<float, float>(p, stream) : Launch<float, BFloat16>(p, stream);
  }
  return wide_kv ? Launch<BFloat16, float>(p, stream) : Launch<BFloat16, BFloat16>(p, stream);
}

}  // namespace kvasir::kernels
