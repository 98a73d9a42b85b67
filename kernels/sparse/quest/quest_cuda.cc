#include "kernels/sparse/quest/quest_cuda.h"

#include "kernels/base/cuda_status.h"
#include "kernels/base/status_macros.h"
#include "kernels/plans/plan_log.h"
#include "kernels/sparse/page_scores/page_scores_launch.h"
#include "kernels/sparse/quest/quest_launch.h"
#include "kernels/sparse/quest/quest_plan.h"
#include "kernels/sparse/quest/quest_selector.h"

namespace kvasir::kernels {

int64_t QuestWorkspaceBytes(const PagedKv& kv, int64_t blocks) {
  return blocks * kv.layout.num_kv_heads * kv.max_blocks_per_slot *
         static_cast<int64_t>(sizeof(uint32_t));
}

absl::Status SelectQuest(QuestScore score, const CudaSelectParams& params, const PageSelection& out,
                         std::byte* workspace, cudaStream_t stream) {
  KVASIR_ASSIGN_OR_RETURN(const SelectLaunch select,
                          MakeSelectLaunch("quest", params, out, workspace));
  KVASIR_RETURN_IF_ERROR(RequirePlacedQueries("quest", params));
  KVASIR_RETURN_IF_ERROR(RequireBounds("quest", params.kv));
  if (params.tiles.empty()) return absl::OkStatus();
  const QuestPlan plan = PlanQuest(ShapeOf(select), params.may_have_several_rows());
  TellPlan("quest", plan);
  if (plan.is_one_kernel()) {
    return CudaStatus(LaunchQuestDecode(select, LowWeight(score), stream), "launching quest");
  }
  auto* const scores = reinterpret_cast<uint32_t*>(workspace);
  const PageScoreLaunch launch = {
      .select = select, .scores = scores, .low_weight = LowWeight(score), .plan = plan.scores};
  KVASIR_RETURN_IF_ERROR(CudaStatus(LaunchPageScores(launch, stream), "launching quest's scores"));
  return CudaStatus(LaunchQuestBest(select, scores, stream), "launching quest");
}

namespace {

class CudaQuest final : public CudaSelector {
 public:
  explicit CudaQuest(QuestScore score) : score_(score) {}

  int64_t WorkspaceBytes(const SelectBounds&, const PagedKv& kv, int64_t tiles) const override {
    return QuestWorkspaceBytes(kv, tiles);
  }
  absl::Status Select(const CudaSelectParams& params, const SelectBounds&, const PageSelection& out,
                      std::byte* workspace, cudaStream_t stream) const override {
    return SelectQuest(score_, params, out, workspace, stream);
  }

 private:
  const QuestScore score_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<CudaSelector>> MakeCudaQuest(const MethodOptions& options) {
  KVASIR_ASSIGN_OR_RETURN(const QuestScore score, QuestSelector::Parse(options));
  return std::make_unique<CudaQuest>(score);
}

}  // namespace kvasir::kernels
