#include "kernels/paged/append_cuda.h"

#include "kernels/base/cuda_status.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/paged/append_cpu.h"
#include "kernels/paged/append_launch.h"

namespace kvasir::kernels {

absl::Status AppendKv(const AppendParams& p, std::span<uint8_t> faults, cudaStream_t stream) {
  KVASIR_RETURN_IF_ERROR(CheckAppendShapes(p));
  ShapeCheck check("append_kv on the GPU");
  check
      .Require(p.k.device() == Device::kCuda && p.v.device() == Device::kCuda,
               "k and v must be in device memory")
      .Require(p.kv.layout.head_dim <= kMaxCudaHeadDim, "head_dim must be at most 256")
      .Require(static_cast<int64_t>(faults.size()) == p.kv.num_slots, "faults must be [num_slots]");
  KVASIR_RETURN_IF_ERROR(check.status());
  if (p.blocks.empty()) return absl::OkStatus();
  const AppendLaunch launch = {.k = p.k.data(),
                               .v = p.v.data(),
                               .dtype = p.k.dtype(),
                               .kv = p.kv,
                               .layer = p.layer,
                               .blocks = p.blocks.data(),
                               .num_blocks = static_cast<int64_t>(p.blocks.size()),
                               .faults = faults.data()};
  return CudaStatus(LaunchAppend(launch, stream), "launching append_kv");
}

}  // namespace kvasir::kernels
