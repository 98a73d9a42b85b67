#include "kernels/sparse/quest/quest_cuda.h"

#include "kernels/base/cuda_status.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/sparse/quest/quest_launch.h"

namespace kvasir::kernels {
namespace {

bool IsFloat32OrBFloat16(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16;
}

absl::Status Check(const SelectParams& p, const PageSelection& out, const std::byte* workspace) {
  const KvLayout& layout = p.kv.layout;
  ShapeCheck check("quest on the GPU");
  check.Match("q", p.q, {"tokens", "heads", layout.head_dim})
      .Require(IsFloat32OrBFloat16(p.q.dtype()), "q must be float32 or bfloat16")
      .Require(p.q.device() == Device::kCuda, "q must be in device memory")
      .Require(IsFloat32OrBFloat16(layout.dtype), "the KV must be float32 or bfloat16")
      .Require(layout.head_dim == 64 || layout.head_dim == 128, "head_dim must be 64 or 128")
      .Require(p.layer >= 0 && p.layer < layout.num_layers, "no such layer")
      .Require(p.numbers.size() == p.blocks.size(), "numbers must be one per query block")
      .Require(out.num_rows == static_cast<int64_t>(p.blocks.size()) * layout.num_kv_heads,
               "the selection's num_rows must be blocks x KV heads")
      .Require(p.rope == nullptr, "keys must be cached rotated")
      .Require(p.memories.empty(), "rows cannot remember earlier steps")
      .Require(p.wanted.empty(), "all rows are selected")
      .Require(workspace != nullptr || p.blocks.empty(), "the workspace is missing");
  KVASIR_RETURN_IF_ERROR(check.status());
  check.Require(layout.num_kv_heads > 0 && check.dim("heads") % layout.num_kv_heads == 0,
                "the query heads must be a multiple of the KV heads");
  KVASIR_RETURN_IF_ERROR(check.status());
  if (p.kv.bounds != nullptr) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "quest: the KV has no page bounds; declare the policy before the KV store is made");
}

}  // namespace

int64_t QuestWorkspaceBytes(const PagedKv& kv, int64_t blocks) {
  return blocks * kv.layout.num_kv_heads * kv.max_blocks_per_slot *
         static_cast<int64_t>(sizeof(uint32_t));
}

absl::Status SelectQuest(const SelectParams& p, const PageSelection& out, std::byte* workspace,
                         cudaStream_t stream) {
  KVASIR_RETURN_IF_ERROR(Check(p, out, workspace));
  if (p.blocks.empty()) return absl::OkStatus();
  const QuestLaunch launch = {.q = p.q.data(),
                              .q_dtype = p.q.dtype(),
                              .group = p.q.dim(1) / p.kv.layout.num_kv_heads,
                              .kv = p.kv,
                              .layer = p.layer,
                              .blocks = p.blocks.data(),
                              .numbers = p.numbers.data(),
                              .out = out,
                              .scores = reinterpret_cast<uint32_t*>(workspace)};
  return CudaStatus(LaunchQuest(launch, stream), "launching quest");
}

}  // namespace kvasir::kernels
