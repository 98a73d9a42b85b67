// Bounds of pages on the GPU. One CTA makes the bounds of a page, and one thread those of one
// element of the head, token by token, as append does.
#include "kernels/append/digests_cuda.h"
#include "kernels/base/cuda_status.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/warp.cuh"
#include "kernels/paged/page_elements.cuh"

namespace kvasir::kernels {
namespace {

constexpr int64_t kMaxHeadDim = 1024;  // a thread an element

struct BoundsLaunch {
  PagedKv kv;
  const BlockKeys* blocks;  // [num_blocks], at least one
  int64_t num_blocks;
  uint8_t* faults;  // [num_slots]
};

// `Keys` reads the elements of a page's keys (kernels/paged/page_elements.cuh).
template <typename Keys>
__global__ void RebuildBoundsKernel(const __grid_constant__ BoundsLaunch p) {
  const KvLayout& layout = p.kv.layout;
  const int64_t pages = layout.pages_per_block();
  const BlockKeys keys = p.blocks[blockIdx.x / pages];
  const int64_t layer = blockIdx.x % pages / layout.num_kv_heads;
  const int64_t head = blockIdx.x % pages % layout.num_kv_heads;
  const PageRef page = p.kv.Peek(keys.slot, keys.block, layer, head);
  if (page.tier() != PageTier::kDevice) {
    if (threadIdx.x == 0) p.faults[keys.slot] = 1;
    return;
  }
  const int64_t i = threadIdx.x;
  if (i >= layout.head_dim) return;
  using Kv = typename Keys::Element;
  const Keys stored(layout, page.page());
  Kv min = Kv(INFINITY);
  Kv max = Kv(-INFINITY);
  for (int64_t t = 0; t < keys.num_tokens; ++t) {
    const Kv element = stored.At(t, i);
    // Comparisons with NaN are false: a NaN key changes nothing.
    min = static_cast<float>(element) < static_cast<float>(min) ? element : min;
    max = static_cast<float>(element) > static_cast<float>(max) ? element : max;
  }
  Kv* bounds = reinterpret_cast<Kv*>(p.kv.Bounds(keys.slot, keys.block, layer, head));
  bounds[i] = min;
  bounds[layout.head_dim + i] = max;
}

cudaError_t Launch(const BoundsLaunch& p, cudaStream_t stream) {
  const int64_t d = p.kv.layout.head_dim;
  const auto threads = static_cast<unsigned>((d + kWarpThreads - 1) / kWarpThreads * kWarpThreads);
  const auto blocks = static_cast<unsigned>(p.num_blocks * p.kv.layout.pages_per_block());
  return ForKeys(p.kv.layout.dtype, [&]<typename Keys>() {
    RebuildBoundsKernel<Keys><<<blocks, threads, 0, stream>>>(p);
    return cudaGetLastError();
  });
}

}  // namespace

absl::Status RebuildBounds(const PagedKv& kv, std::span<const BlockKeys> blocks,
                           std::span<uint8_t> faults, cudaStream_t stream) {
  ShapeCheck check("rebuild_bounds on the GPU");
  check.Require(kv.bounds != nullptr, "the KV has no page bounds")
      .Require(kv.layout.head_dim <= kMaxHeadDim, "head_dim must be at most 1,024")
      .Require(std::ssize(faults) == kv.num_slots, "faults must be [num_slots]");
  KVASIR_RETURN_IF_ERROR(check.status());
  if (blocks.empty()) return absl::OkStatus();
  const BoundsLaunch launch = {
      .kv = kv, .blocks = blocks.data(), .num_blocks = std::ssize(blocks), .faults = faults.data()};
  return CudaStatus(Launch(launch, stream), "launching rebuild_bounds");
}

}  // namespace kvasir::kernels
