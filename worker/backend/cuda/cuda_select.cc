#include "worker/backend/cuda/cuda_select.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/paged/compact_positions_cuda.h"
#include "kernels/sparse/common/distant_queries_cuda.h"
#include "kernels/sparse/common/selection_header.h"
#include "kernels/sparse/methods_cuda.h"
#include "kernels/sparse/reuse/reuse_gate_cuda.h"
#include "proto/selector_field.h"
#include "worker/batch/policy_stages.h"

namespace kvasir::worker {
namespace {

using kernels::CudaSelectParams;
using kernels::kPageTokens;
using kernels::PagedKv;
using kernels::PageSelection;
using kernels::PolicyNumbers;
using kernels::SelectBounds;

// Query tiles beyond this take turns: tokenselect needs 20 bytes per tile, KV head and token that
// the tile's slot can hold.
constexpr int64_t kMostWorkspaceBytes = int64_t{1} << 30;

// Most tokens by which the window of a row grows while a list is reused.
int64_t GrowthOf(const ServedSelector& served) {
  const bool grows =
      served.reuse != nullptr && served.reuse->window() == kernels::ReuseRule::Window::kGrows;
  return grows ? kPageTokens - 1 : 0;
}

int64_t WorkspaceBytes(const kernels::CudaStages& stages, const SelectBounds& bounds,
                       const PagedKv& kv, int64_t blocks) {
  const int64_t bytes = stages.selector->WorkspaceBytes(bounds, kv, blocks);
  if (stages.pruner == nullptr) return bytes;
  return std::max(bytes, stages.pruner->WorkspaceBytes(bounds, kv, blocks));
}

int64_t BlocksAtOnce(const kernels::CudaStages& stages, const SelectBounds& bounds,
                     const PagedKv& kv) {
  const int64_t bytes = std::max<int64_t>(1, WorkspaceBytes(stages, bounds, kv, 1));
  return std::max<int64_t>(1, kMostWorkspaceBytes / bytes);
}

// Where keys are cached un-rotated, returns the params in the form that the selector takes.
absl::StatusOr<CudaSelectParams> PlaceQueries(const kernels::CudaSelector& selector,
                                              const CudaSelectParams& params,
                                              const kernels::TensorView& placed,
                                              cudaStream_t stream) {
  if (!params.device_rope.on()) return params;
  const auto distance = selector.RotatesQueries(params.layer);
  if (!distance.has_value()) return params;
  KVASIR_RETURN_IF_ERROR(kernels::RotateToDistance(params, *distance, placed, stream));
  CudaSelectParams result = params;
  result.q = placed;
  result.device_rope = {};
  return result;
}

}  // namespace

absl::StatusOr<kernels::CudaStages> MakeCudaStages(const v1::AttentionPolicy& policy) {
  kernels::CudaStages stages;
  KVASIR_ASSIGN_OR_RETURN(stages.selector, kernels::MakeCudaSelector(v1::SelectorName(policy),
                                                                     SelectorOptions(policy)));
  if (policy.top_p() != 0) {
    KVASIR_ASSIGN_OR_RETURN(stages.pruner, kernels::MakeCudaPruner("top_p"));
  }
  if (const std::string terminator = v1::TerminatorName(policy); !terminator.empty()) {
    KVASIR_ASSIGN_OR_RETURN(stages.terminator,
                            kernels::MakeCudaTerminator(terminator, TerminatorOptions(policy)));
  }
  return stages;
}

absl::StatusOr<SelectLimits> LimitsOf(const StepBatch& batch, const StepShape& shape, int64_t group,
                                      const PagedKv& kv) {
  SelectLimits limits = {.select = {.group = group}};
  SelectBounds& bounds = limits.select;
  int64_t window_tokens = 0;
  for (const int64_t layer : shape.number_sets) {
    bounds.capacity = std::max(bounds.capacity, SelectionCapacity(batch, layer));
    for (const SelectorGroup& served : GroupsInLayer(batch, layer)) {
      for (int64_t b = served.begin; b < served.end; ++b) {
        const PolicyNumbers n = NumbersInLayer(batch, b, layer);
        const auto header = kernels::MakeHeader(batch.tiles[static_cast<size_t>(b)], n);
        const kernels::QueryTile& tile = batch.tiles[static_cast<size_t>(b)];
        if (served.served->on_gpu.selector->ReadsAll() ||
            header.kind == kernels::SelectionHeader::Kind::kAll) {
          limits.positions = std::max(limits.positions, tile.first_position + tile.num_rows);
          continue;
        }
        const int64_t least = served.served->selector->MinWindowTokens();
        if (n.window_tokens < least) {
          return absl::InvalidArgumentError(absl::StrCat(
              "select: window_tokens is ", n.window_tokens, "; the selector needs ", least));
        }
        bounds.budget_tokens = std::max(bounds.budget_tokens, n.budget_tokens);
        // Budgets are rounded up to whole pages at most.
        bounds.listed_tokens = std::max(bounds.listed_tokens,
                                        n.sink_tokens + n.window_tokens + GrowthOf(*served.served) +
                                            kernels::CeilPages(n.budget_tokens) * kPageTokens);
        window_tokens = std::max(window_tokens, n.window_tokens);
      }
    }
  }
  limits.positions = std::max(limits.positions, bounds.listed_tokens + kPageTokens);
  for (const SelectorGroup& served : batch.groups) {
    const int64_t extra = served.served->on_gpu.selector->ExtraPositions(bounds, kv);
    if (extra > 0) limits.positions = std::max(limits.positions, window_tokens + extra);
  }
  return limits;
}

int64_t SelectWorkspaceBytes(const StepShape& shape, const SelectLimits& limits,
                             const PagedKv& kv) {
  int64_t bytes = 0;
  for (const SelectorRange& range : shape.ranges) {
    if (range.served->dense) continue;
    const int64_t blocks =
        std::min(range.end - range.begin, BlocksAtOnce(range.served->on_gpu, limits.select, kv));
    bytes = std::max({bytes, WorkspaceBytes(range.served->on_gpu, limits.select, kv, blocks),
                      kernels::JudgeReuseWorkspaceBytes(limits.heads_of_layer, blocks)});
  }
  return bytes;
}

absl::Status SelectOnGpu(const ServedSelector& served, const SelectLimits& limits,
                         const CudaSelectParams& params, const PageSelection& rows,
                         const SelectWorkspace& memory, cudaStream_t stream) {
  const kernels::CudaStages& stages = served.on_gpu;
  if (stages.selector->ReadsAll()) return absl::OkStatus();
  KVASIR_ASSIGN_OR_RETURN(const CudaSelectParams placed,
                          PlaceQueries(*stages.selector, params, memory.placed_queries, stream));
  const int64_t heads = params.kv.layout.num_kv_heads;
  const int64_t blocks = std::ssize(params.tiles);
  const int64_t at_once = BlocksAtOnce(stages, limits.select, params.kv);
  for (int64_t begin = 0; begin < blocks; begin += at_once) {
    const int64_t count = std::min(at_once, blocks - begin);
    const auto part = [&](auto all) {
      if (all.empty()) return all;
      return all.subspan(static_cast<size_t>(begin), static_cast<size_t>(count));
    };
    const auto some_of = [&](CudaSelectParams all) {
      all.tiles = part(all.tiles);
      all.numbers = part(all.numbers);
      all.device_memories = part(all.device_memories);
      return all;
    };
    const PageSelection some_rows = rows.Rows(begin * heads, count * heads);
    if (served.reuse != nullptr && served.reuse->ReadsQueries()) {
      KVASIR_RETURN_IF_ERROR(kernels::JudgeReuse(some_of(params), served.selector->scope(),
                                                 some_rows, memory.workspace, stream));
    }
    KVASIR_RETURN_IF_ERROR(stages.selector->Select(some_of(placed), limits.select, some_rows,
                                                   memory.workspace, stream));
    if (params.device_rope.on()) {
      KVASIR_RETURN_IF_ERROR(kernels::AssignPositions(some_rows, stream));
    }
    if (stages.pruner == nullptr) continue;
    KVASIR_RETURN_IF_ERROR(
        stages.pruner->Prune(some_of(params), limits.select, some_rows, memory.workspace, stream));
  }
  return absl::OkStatus();
}

}  // namespace kvasir::worker
