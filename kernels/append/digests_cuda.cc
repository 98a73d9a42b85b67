#include "kernels/append/digests_cuda.h"

#include "kernels/append/digests_launch.h"
#include "kernels/base/cuda_status.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kMaxHeadDim = 1024;  // a thread an element

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
  return CudaStatus(LaunchRebuildBounds(launch, stream), "launching rebuild_bounds");
}

}  // namespace kvasir::kernels
