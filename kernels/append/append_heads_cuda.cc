#include "kernels/append/append_heads_cuda.h"

#include "kernels/append/append_heads_launch.h"
#include "kernels/base/cuda_status.h"
#include "kernels/base/device_check.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/plans/plan_log.h"

namespace kvasir::kernels {

absl::Status AppendHeads(const AppendHeadsParams& p, const RopeAngles* angles,
                         std::span<uint8_t> faults, cudaStream_t stream) {
  KVASIR_RETURN_IF_ERROR(CheckLayerHeads(p));
  const LayerHeads& h = p.heads;
  ShapeCheck check("append_heads on the GPU");
  check.Match("q", h.q, {"tokens", "heads", "head_dim"});
  if (angles != nullptr) {
    const int64_t half_dim = p.kv.layout.head_dim / 2;
    check.Match("cos", angles->cos, {"tokens", half_dim}, DType::kFloat32)
        .Match("sin", angles->sin, {"tokens", half_dim}, DType::kFloat32);
  }
  check.Require(p.kv.layout.head_dim <= kMaxCudaHeadDim, "head_dim must be at most 256")
      .Require(IsKvDType(p.kv.layout.dtype), "the KV must be float32, bfloat16, fp8_e4m3 or int8")
      .Require(std::ssize(faults) == p.kv.num_slots, "faults must be [num_slots]");
  KVASIR_RETURN_IF_ERROR(check.status());
  KVASIR_RETURN_IF_ERROR(RequireDeviceMemory("append_heads", {h.qkv, h.q_norm, h.k_norm, h.q}));
  if (h.q.num_elements() == 0 && p.tiles.empty()) return absl::OkStatus();
  const bool rotates = angles != nullptr;
  const AppendHeadsLaunch launch = {.qkv = h.qkv.data(),
                                    .dtype = h.qkv.dtype(),
                                    .num_tokens = h.q.dim(0),
                                    .num_heads = h.q.dim(1),
                                    .q_norm = h.q_norm.data(),
                                    .k_norm = h.k_norm.data(),
                                    .epsilon = h.epsilon,
                                    .cos = rotates ? angles->cos.As<float>() : nullptr,
                                    .sin = rotates ? angles->sin.As<float>() : nullptr,
                                    .q = h.q.data(),
                                    .kv = p.kv,
                                    .layer = h.layer,
                                    .tiles = p.tiles.data(),
                                    .num_tiles = std::ssize(p.tiles),
                                    .faults = faults.data()};
  const AppendHeadsPlan plan = PlanAppendHeads({.num_tokens = launch.num_tokens,
                                                .num_tiles = launch.num_tiles,
                                                .head_dim = p.kv.layout.head_dim,
                                                .dtype = launch.dtype,
                                                .kv = p.kv.layout.dtype});
  TellPlan("append_heads", plan);
  return CudaStatus(LaunchAppendHeads(launch, plan, stream), "launching append_heads");
}

}  // namespace kvasir::kernels
