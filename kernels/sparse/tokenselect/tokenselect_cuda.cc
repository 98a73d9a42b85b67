#include "kernels/sparse/tokenselect/tokenselect_cuda.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "kernels/base/cuda_status.h"
#include "kernels/base/multiprocessors.h"
#include "kernels/base/scratch.h"
#include "kernels/base/status_macros.h"
#include "kernels/plans/plan_log.h"
#include "kernels/sparse/tokenselect/tokenselect_launch.h"
#include "kernels/sparse/tokenselect/tokenselect_selector.h"

namespace kvasir::kernels {
namespace {

// Lays out the workspace and returns its size in bytes.
int64_t LayOut(std::byte* workspace, const PagedKv& kv, int64_t group, int64_t tiles,
               TokenSelectLaunch& launch) {
  const int64_t rows = tiles * kv.layout.num_kv_heads;
  launch.max_tokens = kv.max_blocks_per_slot * kPageTokens;
  launch.logits_of_row = launch.max_tokens * std::max<int64_t>(group, 2);
  ScratchPieces pieces(workspace);
  launch.parts = pieces.Take<SoftmaxSum>(rows * kLogitBlocks * group);
  if (launch.scope == Scope::kLayer) {
    launch.layer_votes = pieces.Take<int64_t>(tiles * launch.max_tokens);
    launch.layer_tokens = pieces.Take<int32_t>(tiles);
  } else {
    launch.votes = pieces.Take<uint32_t>(rows * launch.max_tokens);
  }
  launch.logits = pieces.Take<float>(rows * launch.logits_of_row);
  return pieces.bytes();
}

}  // namespace

int64_t TokenSelectWorkspaceBytes(Scope scope, const PagedKv& kv, int64_t group, int64_t blocks) {
  TokenSelectLaunch launch = {.scope = scope};
  return LayOut(nullptr, kv, group, blocks, launch);
}

absl::Status SelectTokens(Scope scope, const CudaSelectParams& params, const PageSelection& out,
                          std::byte* workspace, cudaStream_t stream) {
  KVASIR_ASSIGN_OR_RETURN(const SelectLaunch select,
                          MakeSelectLaunch("tokenselect", params, out, workspace));
  KVASIR_RETURN_IF_ERROR(RequirePlacedQueries("tokenselect", params));
  if (select.group > kMaxCudaGroup) {
    return absl::InvalidArgumentError(absl::StrCat("tokenselect on the GPU: ", select.group,
                                                   " query heads a KV head; it serves at most ",
                                                   kMaxCudaGroup));
  }
  if (params.kv.max_blocks_per_slot > kVoteBlocks * kVotePages) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tokenselect on the GPU: slots of ", params.kv.max_blocks_per_slot,
        " blocks; it serves at most ", kVoteBlocks * kVotePages, "; lower the longest context"));
  }
  const int64_t heads =
      scope == Scope::kLayer ? params.heads_of_layer() : params.kv.layout.num_kv_heads;
  if (const int64_t voters = heads * select.group; scope == Scope::kLayer && voters > kMostVoters) {
    return absl::InvalidArgumentError(absl::StrCat("tokenselect on the GPU: ", voters,
                                                   " heads of a layer; at most ", kMostVoters,
                                                   " choose together"));
  }
  if (params.tiles.empty()) return absl::OkStatus();
  int processors = 0;
  KVASIR_RETURN_IF_ERROR(
      CudaStatus(CountMultiprocessors(processors), "counting the device's multiprocessors"));
  const TokenSelectPlan plan = PlanTokenSelect(ShapeOf(select), scope, heads, processors);
  TellPlan("tokenselect", plan);
  TokenSelectLaunch launch = {.select = select,
                              .scope = scope,
                              .faults = params.faults.data(),
                              .blocks_of_row = plan.logit_ctas_of_row};
  const int64_t tiles = std::ssize(params.tiles);
  LayOut(workspace, params.kv, select.group, tiles, launch);
  KVASIR_RETURN_IF_ERROR(CudaStatus(LaunchTokenLogits(launch, plan, stream), "launching logits"));
  if (scope == Scope::kLayer) {
    KVASIR_RETURN_IF_ERROR(CudaStatus(LaunchLayerVotes(launch, stream), "launching votes"));
    if (params.part.ranks != nullptr) {
      KVASIR_RETURN_IF_ERROR(params.part.ranks->Sum({.values = launch.layer_votes,
                                                     .counts = launch.layer_tokens,
                                                     .rows = tiles,
                                                     .stride = launch.max_tokens},
                                                    stream));
    }
  }
  return CudaStatus(LaunchTokenVotes(launch, plan, stream), "launching the choice");
}

namespace {

class CudaTokenSelect final : public CudaSelector {
 public:
  explicit CudaTokenSelect(Scope scope) : scope_(scope) {}

  int64_t WorkspaceBytes(const SelectBounds& bounds, const PagedKv& kv,
                         int64_t tiles) const override {
    return TokenSelectWorkspaceBytes(scope_, kv, bounds.group, tiles);
  }
  absl::Status Select(const CudaSelectParams& params, const SelectBounds&, const PageSelection& out,
                      std::byte* workspace, cudaStream_t stream) const override {
    return SelectTokens(scope_, params, out, workspace, stream);
  }

 private:
  const Scope scope_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<CudaSelector>> MakeCudaTokenSelect(const MethodOptions& options) {
  KVASIR_ASSIGN_OR_RETURN(const Scope scope, TokenSelectSelector::Parse(options));
  return std::make_unique<CudaTokenSelect>(scope);
}

}  // namespace kvasir::kernels
