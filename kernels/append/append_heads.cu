// Prepares heads for attention on the GPU. Some CTAs write one page of one KV head each: a CTA
// takes the page's first query tile, and after it, in order, the other tiles with tokens for that
// page (decode rows of one sequence). Each thread has one element of the head. It reads, stores and
// bounds the element token by token, as the CPU does. Warps then make the codes from the cached
// keys, one token each. The other CTAs prepare query heads, one a warp. For quantized KV a warp
// codes a key or value at a time (append_heads_codes.cuh).
//
// That form suits one token a tile. For prompts in bfloat16, a thread has sixteen bytes of each
// half of a head, and the threads of a CTA work on different tokens at once. The bounds of their
// parts are merged in the order of tokens. Compiled without fused multiply-add, so that all bytes
// equal the CPU's.
#include "kernels/append/append_heads.cuh"
#include "kernels/append/append_heads_codes.cuh"
#include "kernels/append/append_heads_launch.h"
#include "kernels/append/append_heads_prompt.cuh"
#include "kernels/base/head_dim.h"
#include "kernels/base/overlapped_launch.h"
#include "kernels/base/warp.cuh"

namespace kvasir::kernels {
namespace {

// Stores element threadIdx.x of all tokens of the tile. `scales` are those of the tokens' norms.
template <typename Activation, typename Kv>
__device__ void StoreElement(const AppendHeadsLaunch& p, const QueryTile& tile, int64_t head,
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
  for (int64_t r = 0; r < tile.num_rows; ++r) {
    const int64_t token = tile.first_row + r;
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

// Appends one tile, by all threads of the CTA. REQUIRES: the page is in the device tier.
template <typename Activation, typename Kv>
__device__ void AppendTile(const AppendHeadsLaunch& p, const QueryTile& tile, int64_t head) {
  const Target<Kv> to = TargetOf<Kv>(p, tile, head);
  __shared__ float scales[kPageTokens];
  FindScales<Activation>(p, tile, head, scales);
  StoreElement<Activation, Kv>(p, tile, head, scales, to);
  EncodeKeys(p, tile, head, to);
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
  const int64_t pages = p.num_tiles * kv_heads;
  if (blockIdx.x < pages) {
    const int64_t head = blockIdx.x % kv_heads;
    ForTilesOfPage(p, blockIdx.x / kv_heads, head, [&](const QueryTile& tile) {
      if constexpr (std::is_same_v<Kv, Codes>) {
        AppendCodes<Activation, kMostLaneElements>(p, tile, head);
      } else {
        AppendTile<Activation, Kv>(p, tile, head);
      }
    });
    return;
  }
  const int64_t item =
      (blockIdx.x - pages) * (blockDim.x / kWarpThreads) + threadIdx.x / kWarpThreads;
  if (item >= p.num_tokens * p.num_heads) return;
  TakeQueryHead<Activation>(p, item / p.num_heads, item % p.num_heads);
}

template <int kHeadDim, bool kCoded>
cudaError_t LaunchPrompt(const AppendHeadsLaunch& p, cudaStream_t stream) {
  constexpr int kBlockHeads = PromptShape<kHeadDim>::kWarps * PromptShape<kHeadDim>::kWarpHeads;
  const int64_t query_tiles = (p.num_tokens * p.num_heads + kBlockHeads - 1) / kBlockHeads;
  const auto blocks = static_cast<unsigned>(p.num_tiles * p.kv.layout.num_kv_heads + query_tiles);
  return LaunchOverlapped(AppendPromptKernel<kHeadDim, kCoded>, blocks, kPromptThreads, 0, stream,
                          p);
}

template <typename Activation, typename Kv>
cudaError_t Launch(const AppendHeadsLaunch& p, cudaStream_t stream) {
  const int64_t warps = std::is_same_v<Kv, Codes>
                            ? kCodingThreads / kWarpThreads
                            : (p.kv.layout.head_dim + kWarpThreads - 1) / kWarpThreads;
  const int64_t query_tiles = (p.num_tokens * p.num_heads + warps - 1) / warps;
  const auto blocks = static_cast<unsigned>(p.num_tiles * p.kv.layout.num_kv_heads + query_tiles);
  return LaunchOverlapped(AppendHeadsKernel<Activation, Kv>, blocks,
                          static_cast<unsigned>(warps * kWarpThreads), 0, stream, p);
}

}  // namespace

cudaError_t LaunchAppendHeads(const AppendHeadsLaunch& p, const AppendHeadsPlan& plan,
                              cudaStream_t stream) {
  if (plan.kernel == AppendHeadsPlan::Kernel::kPrompt) {
    return ForHeadDim(plan.shape.head_dim, [&]<int kHeadDim>() {
      return IsQuantized(p.kv.layout.dtype) ? LaunchPrompt<kHeadDim, true>(p, stream)
                                            : LaunchPrompt<kHeadDim, false>(p, stream);
    });
  }
  if (IsQuantized(p.kv.layout.dtype)) {
    return p.dtype == DType::kFloat32 ? Launch<float, Codes>(p, stream)
                                      : Launch<BFloat16, Codes>(p, stream);
  }
  const bool wide_kv = p.kv.layout.dtype == DType::kFloat32;
  if (p.dtype == DType::kFloat32) {
    return wide_kv ? Launch<float, float>(p, stream) : Launch<float, BFloat16>(p, stream);
  }
  return wide_kv ? Launch<BFloat16, float>(p, stream) : Launch<BFloat16, BFloat16>(p, stream);
}

}  // namespace kvasir::kernels
