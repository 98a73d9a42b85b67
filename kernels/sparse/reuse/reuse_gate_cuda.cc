#include "kernels/sparse/reuse/reuse_gate_cuda.h"

#include "kernels/base/cuda_status.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/sparse/reuse/reuse_gate_launch.h"

namespace kvasir::kernels {

absl::Status JudgeReuse(const CudaSelectParams& p, Scope scope, const PageSelection& rows,
                        cudaStream_t stream) {
  const KvLayout& layout = p.kv.layout;
  ShapeCheck check("reuse on the GPU");
  check.Match("q", p.q, {"tokens", "heads", layout.head_dim})
      .Require(IsFloat32OrBFloat16(p.q.dtype()), "q must be float32 or bfloat16")
      .Require(p.numbers.size() == p.blocks.size(), "numbers must be one per query block")
      .Require(p.device_memories.size() == p.blocks.size(), "memories must be one per query block")
      .Require(rows.num_rows == static_cast<int64_t>(p.blocks.size()) * layout.num_kv_heads,
               "the selection's num_rows must be blocks x KV heads");
  KVASIR_RETURN_IF_ERROR(check.status());
  if (p.blocks.empty()) return absl::OkStatus();
  const ReuseGateLaunch launch = {.select = {.q = p.q.data(),
                                             .q_dtype = p.q.dtype(),
                                             .group = p.q.dim(1) / layout.num_kv_heads,
                                             .kv = p.kv,
                                             .layer = p.layer,
                                             .blocks = p.blocks.data(),
                                             .numbers = p.numbers.data(),
                                             .memories = p.device_memories.data(),
                                             .out = rows},
                                  .rotation = p.rotation,
                                  .heads = scope == Scope::kLayer ? layout.num_kv_heads : 1};
  return CudaStatus(LaunchReuseGate(launch, stream), "launching the reuse gate");
}

}  // namespace kvasir::kernels
