#include "worker/backend/cuda/cuda_select.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/paged/compact_positions_cuda.h"
#include "kernels/sparse/all/all_selector.h"
#include "kernels/sparse/common/distant_queries_cuda.h"
#include "kernels/sparse/common/selection_header.h"
#include "kernels/sparse/hip/hip_cuda.h"
#include "kernels/sparse/hip/hip_selector.h"
#include "kernels/sparse/infinitehip/infinitehip_cuda.h"
#include "kernels/sparse/quest/quest_cuda.h"
#include "kernels/sparse/quest/quest_selector.h"
#include "kernels/sparse/reuse/reuse_gate_cuda.h"
#include "kernels/sparse/streaming/streaming_cuda.h"
#include "kernels/sparse/streaming/streaming_selector.h"
#include "kernels/sparse/tokenselect/tokenselect_cuda.h"
#include "kernels/sparse/tokenselect/tokenselect_selector.h"
#include "kernels/sparse/top_p/top_p_cuda.h"

namespace kvasir::worker {
namespace {

using kernels::AllSelector;
using kernels::HipCuda;
using kernels::HipSelector;
using kernels::InfiniteHipCuda;
using kernels::InfiniteHipSelector;
using kernels::kPageTokens;
using kernels::PagedKv;
using kernels::PageSelection;
using kernels::QuestSelector;
using kernels::SelectionNumbers;
using kernels::SelectParams;
using kernels::StreamingSelector;
using kernels::TokenSelectSelector;

// Query tiles beyond this take turns: tokenselect needs 20 bytes per tile, KV head and token that
// the tile's slot can hold.
constexpr int64_t kMostWorkspaceBytes = int64_t{1} << 30;

// True for `all`, whatever its numbers are. Its rows are written with the step's table.
bool ReadsAll(const ServedSelector& served) {
  return dynamic_cast<const AllSelector*>(served.selector.get()) != nullptr;
}

// Most tokens by which the window of a row grows while a list is reused.
int64_t GrowthOf(const ServedSelector& served) {
  const bool grows =
      served.reuse != nullptr && served.reuse->window() == kernels::ReuseRule::Window::kGrows;
  return grows ? kPageTokens - 1 : 0;
}

HipCuda SearchWithin(const SelectLimits& limits) {
  return {.max_budget_tokens = limits.budget_tokens};
}

InfiniteHipCuda MethodOf(const InfiniteHipSelector& selector, const SelectLimits& limits) {
  return {.preset = &selector.preset(),
          .max_budget_tokens = limits.budget_tokens,
          .scope = selector.scope()};
}

int64_t WorkspaceBytes(const ServedSelector& served, const SelectLimits& limits, const PagedKv& kv,
                       int64_t blocks) {
  const kernels::Selector* const selector = served.selector.get();
  int64_t bytes = 0;
  if (dynamic_cast<const QuestSelector*>(selector) != nullptr) {
    bytes = kernels::QuestWorkspaceBytes(kv, blocks);
  } else if (dynamic_cast<const TokenSelectSelector*>(selector) != nullptr) {
    bytes = kernels::TokenSelectWorkspaceBytes(kv, limits.group, blocks);
  } else if (dynamic_cast<const HipSelector*>(selector) != nullptr) {
    bytes = kernels::HipWorkspaceBytes(SearchWithin(limits), kv, blocks);
  } else if (const auto* hip = dynamic_cast<const InfiniteHipSelector*>(selector)) {
    bytes = kernels::InfiniteHipWorkspaceBytes(MethodOf(*hip, limits), kv, blocks);
  }
  if (served.pruner == nullptr) return bytes;
  return std::max(bytes, kernels::TopPWorkspaceBytes(kv.layout, limits.group, blocks,
                                                     limits.capacity, limits.listed_tokens));
}

int64_t BlocksAtOnce(const ServedSelector& served, const SelectLimits& limits, const PagedKv& kv) {
  const int64_t bytes = std::max<int64_t>(1, WorkspaceBytes(served, limits, kv, 1));
  return std::max<int64_t>(1, kMostWorkspaceBytes / bytes);
}

// Where keys are cached un-rotated, returns the params in the form that the selector takes.
absl::StatusOr<SelectParams> PlaceQueries(const ServedSelector& served, const SelectLimits& limits,
                                          const SelectParams& params,
                                          const kernels::TensorView& placed, cudaStream_t stream) {
  const kernels::Selector* const selector = served.selector.get();
  if (!params.device_rope.on() || !selector->ReadsQueries()) return params;
  kernels::QueryDistance distance;
  if (const auto* hip = dynamic_cast<const InfiniteHipSelector*>(selector)) {
    if (InfiniteHipSelector::IsChunkIndexed(params.layer)) return params;
    distance = MethodOf(*hip, limits).distance();
  }
  KVASIR_RETURN_IF_ERROR(kernels::RotateToDistance(params, distance, placed, stream));
  SelectParams result = params;
  result.q = placed;
  result.device_rope = {};
  return result;
}

absl::Status Run(const ServedSelector& served, const SelectLimits& limits,
                 const SelectParams& params, const PageSelection& rows, std::byte* workspace,
                 cudaStream_t stream) {
  const kernels::Selector* const selector = served.selector.get();
  if (const auto* quest = dynamic_cast<const QuestSelector*>(selector)) {
    return kernels::SelectQuest(quest->score(), params, rows, workspace, stream);
  }
  if (dynamic_cast<const TokenSelectSelector*>(selector) != nullptr) {
    return kernels::SelectTokens(selector->scope(), params, rows, workspace, stream);
  }
  if (dynamic_cast<const HipSelector*>(selector) != nullptr) {
    return kernels::SelectHip(SearchWithin(limits), params, rows, workspace, stream);
  }
  if (dynamic_cast<const StreamingSelector*>(selector) != nullptr) {
    return kernels::SelectStreaming(params, rows, stream);
  }
  if (const auto* hip = dynamic_cast<const InfiniteHipSelector*>(selector)) {
    return kernels::SelectInfiniteHip(MethodOf(*hip, limits), params, rows, workspace, stream);
  }
  return absl::InternalError("a selector that has no kernels was let pass");
}

}  // namespace

absl::StatusOr<SelectLimits> LimitsOf(const StepBatch& batch, const StepShape& shape, int64_t group,
                                      const PagedKv& kv) {
  SelectLimits limits = {.group = group};
  int64_t window_tokens = 0;
  for (const int64_t layer : shape.number_sets) {
    limits.capacity = std::max(limits.capacity, SelectionCapacity(batch, layer));
    for (const SelectorGroup& served : batch.groups) {
      for (int64_t b = served.begin; b < served.end; ++b) {
        const SelectionNumbers n = NumbersInLayer(batch, b, layer);
        const auto header = kernels::MakeHeader(batch.blocks[static_cast<size_t>(b)], n);
        const kernels::QueryBlock& block = batch.blocks[static_cast<size_t>(b)];
        if (ReadsAll(*served.served) || header.kind == kernels::SelectionHeader::Kind::kAll) {
          limits.positions = std::max(limits.positions, block.first_position + block.num_rows);
          continue;
        }
        const int64_t least = served.served->selector->MinWindowTokens();
        if (n.window_tokens < least) {
          return absl::InvalidArgumentError(absl::StrCat(
              "select: window_tokens is ", n.window_tokens, "; the selector needs ", least));
        }
        limits.budget_tokens = std::max(limits.budget_tokens, n.budget_tokens);
        // Budgets are rounded up to whole pages at most.
        limits.listed_tokens = std::max(limits.listed_tokens,
                                        n.sink_tokens + n.window_tokens + GrowthOf(*served.served) +
                                            kernels::CeilPages(n.budget_tokens) * kPageTokens);
        window_tokens = std::max(window_tokens, n.window_tokens);
      }
    }
  }
  limits.positions = std::max(limits.positions, limits.listed_tokens + kPageTokens);
  for (const SelectorGroup& served : batch.groups) {
    const auto* hip = dynamic_cast<const InfiniteHipSelector*>(served.served->selector.get());
    if (hip == nullptr) continue;
    limits.positions =
        std::max(limits.positions, window_tokens + MethodOf(*hip, limits).MaxChunks(kv));
  }
  return limits;
}

int64_t SelectWorkspaceBytes(const StepShape& shape, const SelectLimits& limits,
                             const PagedKv& kv) {
  int64_t bytes = 0;
  for (const SelectorRange& range : shape.ranges) {
    if (range.served->dense) continue;
    const int64_t blocks =
        std::min(range.end - range.begin, BlocksAtOnce(*range.served, limits, kv));
    bytes = std::max(bytes, WorkspaceBytes(*range.served, limits, kv, blocks));
  }
  return bytes;
}

absl::Status SelectOnGpu(const ServedSelector& served, const SelectLimits& limits,
                         const SelectParams& params, const PageSelection& rows,
                         const SelectMemory& memory, cudaStream_t stream) {
  if (ReadsAll(served)) return absl::OkStatus();
  KVASIR_ASSIGN_OR_RETURN(const SelectParams placed,
                          PlaceQueries(served, limits, params, memory.placed_queries, stream));
  const int64_t heads = params.kv.layout.num_kv_heads;
  const int64_t blocks = std::ssize(params.blocks);
  const int64_t at_once = BlocksAtOnce(served, limits, params.kv);
  for (int64_t begin = 0; begin < blocks; begin += at_once) {
    const int64_t count = std::min(at_once, blocks - begin);
    const auto part = [&](auto all) {
      if (all.empty()) return all;
      return all.subspan(static_cast<size_t>(begin), static_cast<size_t>(count));
    };
    const auto some_of = [&](SelectParams all) {
      all.blocks = part(all.blocks);
      all.numbers = part(all.numbers);
      all.device_memories = part(all.device_memories);
      return all;
    };
    const PageSelection some_rows = rows.Rows(begin * heads, count * heads);
    if (served.reuse != nullptr && served.reuse->ReadsQueries()) {
      KVASIR_RETURN_IF_ERROR(
          kernels::JudgeReuse(some_of(params), served.selector->scope(), some_rows, stream));
    }
    KVASIR_RETURN_IF_ERROR(
        Run(served, limits, some_of(placed), some_rows, memory.workspace, stream));
    if (params.device_rope.on()) {
      KVASIR_RETURN_IF_ERROR(kernels::AssignPositions(some_rows, stream));
    }
    if (served.pruner == nullptr) continue;
    KVASIR_RETURN_IF_ERROR(kernels::PruneTopP(some_of(params), some_rows, limits.listed_tokens,
                                              memory.workspace, stream));
  }
  return absl::OkStatus();
}

}  // namespace kvasir::worker
