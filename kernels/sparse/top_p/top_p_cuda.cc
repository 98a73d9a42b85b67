#include "kernels/sparse/top_p/top_p_cuda.h"

#include "absl/strings/str_cat.h"

#include "kernels/base/cuda_status.h"
#include "kernels/base/scratch.h"
#include "kernels/base/status_macros.h"
#include "kernels/plans/plan_log.h"
#include "kernels/sparse/top_p/top_p_launch.h"
#include "kernels/sparse/top_p/top_p_plan.h"

namespace kvasir::kernels {
namespace {

// Lays out the workspace and returns its size in bytes.
int64_t LayOut(std::byte* workspace, int64_t rows, int64_t group, int64_t capacity,
               TopPLaunch& launch) {
  ScratchPieces pieces(workspace);
  launch.slots = pieces.Take<uint32_t>(rows * capacity);
  launch.weights = pieces.Take<float>(rows * group * launch.max_tokens);
  return pieces.bytes();
}

}  // namespace

int64_t TopPWorkspaceBytes(const KvLayout& layout, int64_t group, int64_t blocks, int64_t capacity,
                           int64_t max_tokens) {
  TopPLaunch launch = {.max_tokens = max_tokens};
  return LayOut(nullptr, blocks * layout.num_kv_heads, group, capacity, launch);
}

absl::Status PruneTopP(const CudaSelectParams& params, const PageSelection& selection,
                       int64_t max_tokens, std::byte* workspace, cudaStream_t stream) {
  KVASIR_ASSIGN_OR_RETURN(const SelectLaunch select,
                          MakeSelectLaunch("top_p", params, selection, workspace));
  KVASIR_RETURN_IF_ERROR(RequireKeyCodes("top_p", params.kv));
  if (select.group > kMaxCudaGroup) {
    return absl::InvalidArgumentError(absl::StrCat("top_p on the GPU: ", select.group,
                                                   " query heads a KV head; it serves at most ",
                                                   kMaxCudaGroup));
  }
  if (params.tiles.empty()) return absl::OkStatus();
  const TopPPlan plan = PlanTopP(ShapeOf(select), selection.capacity, max_tokens);
  TellPlan("top_p", plan);
  TopPLaunch launch = {.select = select,
                       .max_tokens = max_tokens,
                       .log_blocks_of_row = plan.log_ctas_of_row,
                       .blocks_of_row = plan.ctas_of_row,
                       .heads_of_block = plan.heads_of_cta,
                       .shared_tokens = plan.shared_tokens,
                       .items_at_once = plan.items_at_once};
  LayOut(workspace, selection.num_rows, select.group, selection.capacity, launch);
  return CudaStatus(LaunchTopP(launch, stream), "launching top_p");
}

namespace {

class CudaTopP final : public CudaPruner {
 public:
  int64_t WorkspaceBytes(const SelectBounds& bounds, const PagedKv& kv,
                         int64_t tiles) const override {
    return TopPWorkspaceBytes(kv.layout, bounds.group, tiles, bounds.capacity,
                              bounds.listed_tokens);
  }
  absl::Status Prune(const CudaSelectParams& params, const SelectBounds& bounds,
                     const PageSelection& selection, std::byte* workspace,
                     cudaStream_t stream) const override {
    return PruneTopP(params, selection, bounds.listed_tokens, workspace, stream);
  }
};

}  // namespace

std::unique_ptr<CudaPruner> MakeCudaTopP() { return std::make_unique<CudaTopP>(); }

}  // namespace kvasir::kernels
