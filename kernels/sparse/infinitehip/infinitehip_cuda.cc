#include "kernels/sparse/infinitehip/infinitehip_cuda.h"

#include <algorithm>

#include "kernels/base/cuda_status.h"
#include "kernels/base/scratch.h"
#include "kernels/base/status_macros.h"
#include "kernels/plans/plan_log.h"
#include "kernels/sparse/infinitehip/infinitehip_launch.h"
#include "kernels/sparse/infinitehip/infinitehip_plan.h"

namespace kvasir::kernels {
namespace {

// Lays out the workspace and returns its size in bytes.
int64_t LayOut(std::byte* workspace, Scope scope, const PagedKv& kv, int64_t tiles,
               InfiniteHipLaunch& launch) {
  const int64_t rows = tiles * kv.layout.num_kv_heads;
  ScratchPieces pieces(workspace);
  for (InfiniteHipLaunch::Kept& kept : launch.kept) {
    kept.begins = pieces.Take<int32_t>(rows * launch.max_chunks);
    kept.counts = pieces.Take<int32_t>(rows);
  }
  launch.pages.scores = pieces.Take<uint32_t>(rows * kv.max_blocks_per_slot);
  launch.chunk_scores = pieces.Take<uint32_t>(rows * launch.max_chunks);
  launch.kept_scores = pieces.Take<uint32_t>(rows * launch.max_chunks);
  if (scope == Scope::kLayer) {
    launch.layer_scores = pieces.Take<uint32_t>(rows * launch.max_chunks);
    launch.rank_scores = pieces.Take<uint32_t>(tiles * launch.max_chunks);
    launch.rank_chunks = pieces.Take<int32_t>(tiles);
  }
  return pieces.bytes();
}

// Launches all stages. Where ranks choose together, their scores of each stage become one before it
// keeps chunks.
absl::Status LaunchStages(const InfiniteHipLaunch& launch, CudaLayerRanks* ranks,
                          cudaStream_t stream) {
  const auto join = [&](int stage) -> absl::Status {
    if (ranks == nullptr) return absl::OkStatus();
    KVASIR_RETURN_IF_ERROR(CudaStatus(LaunchInfiniteHipRankScores(launch, stage, stream),
                                      "launching infinitehip's scores of ranks"));
    const int64_t tiles = launch.select.out.num_rows / launch.select.kv.layout.num_kv_heads;
    return ranks->Max({.values = launch.rank_scores,
                       .counts = launch.rank_chunks,
                       .rows = tiles,
                       .stride = launch.max_chunks},
                      stream);
  };
  const auto later = [&](const InfiniteHipSteps& steps) {
    return CudaStatus(LaunchInfiniteHipLater(launch, steps, stream),
                      "launching infinitehip's later stages");
  };
  KVASIR_RETURN_IF_ERROR(CudaStatus(LaunchInfiniteHipFirstScores(launch, stream),
                                    "launching infinitehip's first scores"));
  KVASIR_RETURN_IF_ERROR(join(0));
  KVASIR_RETURN_IF_ERROR(CudaStatus(LaunchInfiniteHipKeepFirst(launch, stream),
                                    "launching infinitehip's first choice"));
  if (ranks == nullptr) return later({});
  for (int step = 0; step < InfiniteHipSteps::kCount; ++step) {
    if (!InfiniteHipSteps::Scores(step)) {
      KVASIR_RETURN_IF_ERROR(join(InfiniteHipSteps::StageOf(step)));
    }
    KVASIR_RETURN_IF_ERROR(later({step, step + 1}));
  }
  return absl::OkStatus();
}

}  // namespace

// Counts over a context as long as a slot can hold.
int64_t InfiniteHipCuda::MaxChunks(const PagedKv& kv) const {
  return std::max(kv.max_blocks_per_slot * kPageTokens / preset->stages[0].chunk_tokens + 1,
                  MaxLaterChunks());
}

int64_t InfiniteHipCuda::MaxLaterChunks() const {
  const auto& stages = preset->stages;
  int64_t chunks = 0;
  for (size_t s = 0; s + 1 < stages.size(); ++s) {
    chunks = std::max(chunks, stages[s].KeptChunks(max_budget_tokens) * stages[s].chunk_tokens /
                                  stages[s + 1].chunk_tokens);
  }
  return chunks;
}

int64_t InfiniteHipWorkspaceBytes(const InfiniteHipCuda& method, const PagedKv& kv,
                                  int64_t blocks) {
  InfiniteHipLaunch launch = {.max_chunks = method.MaxChunks(kv)};
  return LayOut(nullptr, method.scope, kv, blocks, launch);
}

absl::Status SelectInfiniteHip(const InfiniteHipCuda& method, const CudaSelectParams& params,
                               const PageSelection& out, std::byte* workspace,
                               cudaStream_t stream) {
  KVASIR_ASSIGN_OR_RETURN(const SelectLaunch select,
                          MakeSelectLaunch("infinitehip", params, out, workspace));
  KVASIR_RETURN_IF_ERROR(RequireBounds("infinitehip", params.kv));
  KVASIR_RETURN_IF_ERROR(RequireKeyCodes("infinitehip", params.kv));
  if (params.tiles.empty()) return absl::OkStatus();
  if (params.device_rope.on() && !InfiniteHipSelector::IsChunkIndexed(params.layer)) {
    return absl::InvalidArgumentError(
        "infinitehip on the GPU: in this layer queries must be rotated before");
  }
  const InfiniteHipSelector::Preset& preset = *method.preset;
  const auto num_tiles = static_cast<int64_t>(params.tiles.size());
  InfiniteHipLaunch launch = {
      .select = select,
      .max_chunks = method.MaxChunks(params.kv),
      .later_chunks = method.MaxLaterChunks(),
      .max_rows = params.may_have_several_rows()
                      ? std::clamp<int64_t>(params.q.dim(0) - num_tiles + 1, 1, kPageTokens)
                      : 1};
  std::copy(preset.stages.begin(), preset.stages.end(), launch.stages);
  const int64_t stride = preset.stages[0].query_stride;
  launch.pages = {.select = select,
                  .query_stride = stride,
                  .chunks = preset.grid(),
                  .plan = PlanPageScores(ShapeOf(select), params.may_have_several_rows(), stride)};
  LayOut(workspace, method.scope, params.kv, num_tiles, launch);
  CudaLayerRanks* const ranks = method.scope == Scope::kLayer ? params.part.ranks : nullptr;
  if (ranks == nullptr) launch.rank_scores = nullptr;
  const InfiniteHipPlan plan = PlanInfiniteHip({.shape = ShapeOf(select),
                                                .pages = launch.pages.plan,
                                                .is_chunk_indexed = select.rope.on(),
                                                .chooses_by_layer = method.scope == Scope::kLayer,
                                                .decode_bytes = InfiniteHipDecodeBytes(launch)});
  TellPlan("infinitehip", plan);
  if (plan.is_one_kernel) {
    return CudaStatus(LaunchInfiniteHipDecode(launch, stream), "launching infinitehip");
  }
  return LaunchStages(launch, ranks, stream);
}

namespace {

class CudaInfiniteHip final : public CudaSelector {
 public:
  CudaInfiniteHip(const InfiniteHipSelector::Preset& preset, Scope scope)
      : preset_(preset), scope_(scope) {}

  int64_t WorkspaceBytes(const SelectBounds& bounds, const PagedKv& kv,
                         int64_t tiles) const override {
    return InfiniteHipWorkspaceBytes(Method(bounds), kv, tiles);
  }
  int64_t ExtraPositions(const SelectBounds& bounds, const PagedKv& kv) const override {
    return Method(bounds).MaxChunks(kv);
  }
  std::optional<QueryDistance> RotatesQueries(int64_t layer) const override {
    if (InfiniteHipSelector::IsChunkIndexed(layer)) return std::nullopt;
    return Method({}).distance();
  }
  absl::Status Select(const CudaSelectParams& params, const SelectBounds& bounds,
                      const PageSelection& out, std::byte* workspace,
                      cudaStream_t stream) const override {
    return SelectInfiniteHip(Method(bounds), params, out, workspace, stream);
  }

 private:
  InfiniteHipCuda Method(const SelectBounds& bounds) const {
    return {.preset = &preset_, .max_budget_tokens = bounds.budget_tokens, .scope = scope_};
  }

  const InfiniteHipSelector::Preset& preset_;
  const Scope scope_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<CudaSelector>> MakeCudaInfiniteHip(const MethodOptions& options) {
  KVASIR_ASSIGN_OR_RETURN(const InfiniteHipSelector::Options parsed,
                          InfiniteHipSelector::Parse(options));
  return std::make_unique<CudaInfiniteHip>(*parsed.preset, parsed.scope);
}

}  // namespace kvasir::kernels
