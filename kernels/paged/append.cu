// Append on the GPU. One block of threads writes a page of one KV head: the first query block of
// the page, and behind it, in order, the others that have tokens for it (decode rows of one
// sequence). One thread has one element of the head: it converts, stores and bounds it, token by
// token, as the CPU does. Codes are made by a warp a token from what was cached. Compiled without
// fused multiply-add, so that all bytes are the CPU's.
#include <type_traits>

#include "kernels/base/warp.cuh"
#include "kernels/paged/append_launch.h"
#include "kernels/paged/key_codes.cuh"

namespace kvasir::kernels {
namespace {

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

// Element threadIdx.x of all tokens of the block.
template <typename Activation, typename Kv>
__device__ void StoreElement(const AppendLaunch& p, const QueryBlock& block, int64_t head,
                             const Target<Kv>& to) {
  const int64_t d = p.kv.layout.head_dim;
  const int64_t i = threadIdx.x;
  if (i >= d) return;
  const int64_t stride = p.kv.layout.num_kv_heads * d;
  const auto* k = static_cast<const Activation*>(p.k) + block.first_row * stride + head * d + i;
  const auto* v = static_cast<const Activation*>(p.v) + block.first_row * stride + head * d + i;
  const bool opens_page = to.offset == 0;
  Kv min = Kv(INFINITY);
  Kv max = Kv(-INFINITY);
  if (to.bounds != nullptr && !opens_page) {
    min = to.bounds[i];
    max = to.bounds[d + i];
  }
  for (int64_t r = 0; r < block.num_rows; ++r) {
    const Kv key = Cached<Activation, Kv>(k[r * stride]);
    to.keys[r * d + i] = key;
    to.values[r * d + i] = Cached<Activation, Kv>(v[r * stride]);
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
__device__ void AppendBlock(const AppendLaunch& p, const QueryBlock& block, int64_t head) {
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
  StoreElement<Activation, Kv>(p, block, head, to);
  if (p.kv.key_codes == nullptr) return;
  __syncthreads();  // a warp codes what all have written
  const std::byte* codes = p.kv.KeyCodes(block.slot, index, p.layer, head);
  const int num_warps = static_cast<int>(blockDim.x) / kWarpThreads;
  for (int64_t r = threadIdx.x / kWarpThreads; r < block.num_rows; r += num_warps) {
    EncodeKey<Kv>(layout, to.keys + r * layout.head_dim, TokenCodes(layout, codes, offset + r));
  }
}

__device__ bool SharePage(const QueryBlock& a, const QueryBlock& b) {
  return a.slot == b.slot && a.first_position / kPageTokens == b.first_position / kPageTokens;
}

template <typename Activation, typename Kv>
__global__ void AppendKernel(const __grid_constant__ AppendLaunch p) {
  const int64_t heads = p.kv.layout.num_kv_heads;
  const int64_t first = blockIdx.x / heads;
  const int64_t head = blockIdx.x % heads;
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

template <typename Activation, typename Kv>
cudaError_t Launch(const AppendLaunch& p, cudaStream_t stream) {
  const int64_t d = p.kv.layout.head_dim;
  const auto threads = static_cast<unsigned>((d + kWarpThreads - 1) / kWarpThreads * kWarpThreads);
  const auto blocks = static_cast<unsigned>(p.num_blocks * p.kv.layout.num_kv_heads);
  AppendKernel<Activation, Kv><<<blocks, threads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchAppend(const AppendLaunch& p, cudaStream_t stream) {
  const bool wide_kv = p.kv.layout.dtype == DType::kFloat32;
  if (p.dtype == DType::kFloat32) {
    return wide_kv ? Launch<float, float>(p, stream) : Launch<float, BFloat16>(p, stream);
  }
  return wide_kv ? Launch<BFloat16, float>(p, stream) : Launch<BFloat16, BFloat16>(p, stream);
}

}  // namespace kvasir::kernels
