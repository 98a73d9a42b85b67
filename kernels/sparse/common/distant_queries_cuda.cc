#include "kernels/sparse/common/distant_queries_cuda.h"

#include "kernels/base/cuda_status.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/sparse/common/distant_queries_launch.h"

namespace kvasir::kernels {

absl::Status RotateToDistance(const CudaSelectParams& p, const QueryDistance& distance,
                              const TensorView& to, cudaStream_t stream) {
  const KvLayout& layout = p.kv.layout;
  ShapeCheck check("distant_queries");
  check.Match("q", p.q, {"tokens", "heads", layout.head_dim})
      .Match("to", to, {"tokens", "heads", layout.head_dim}, p.q.dtype())
      .Require(IsFloat32OrBFloat16(p.q.dtype()), "q must be float32 or bfloat16")
      .Require(p.numbers.size() == p.blocks.size(), "numbers must be one per query block")
      .Require(p.device_rope.on(), "keys must be cached un-rotated");
  KVASIR_RETURN_IF_ERROR(check.status());
  if (p.blocks.empty()) return absl::OkStatus();
  const int64_t blocks = std::ssize(p.blocks);
  const DistantQueriesLaunch launch = {.select = {.q = p.q.data(),
                                                  .q_dtype = p.q.dtype(),
                                                  .group = p.q.dim(1) / layout.num_kv_heads,
                                                  .kv = p.kv,
                                                  .blocks = p.blocks.data(),
                                                  .numbers = p.numbers.data(),
                                                  .rope = p.device_rope},
                                       .num_blocks = blocks,
                                       .most_rows = p.may_have_several_rows() ? kPageTokens : 1,
                                       .distance = distance,
                                       .to = to.data()};
  return CudaStatus(LaunchDistantQueries(launch, stream), "launching distant_queries");
}

}  // namespace kvasir::kernels
