#include "worker/backend/cpu/cpu_attention.h"

#include <algorithm>
#include <limits>

#include "kernels/base/status_macros.h"
#include "kernels/paged/compact_positions.h"
#include "kernels/sparse/common/select_common.h"
#include "kernels/sparse/reuse/reusing_select.h"
#include "worker/parallel/collective_ranks.h"

namespace kvasir::worker {
namespace {

using kernels::DType;
using kernels::Executor;
using kernels::PageSelection;
using kernels::QueryTile;
using kernels::SelectParams;
using kernels::TensorView;

// A row that selected an absent page has no result. NaN makes it fail on every rank of the group,
// through the sums that follow, and on no other row.
void PoisonRows(const TensorView& out, const QueryTile& tile) {
  const int64_t width = out.dim(1) * out.dim(2);
  for (int64_t i = tile.first_row * width; i < (tile.first_row + tile.num_rows) * width; ++i) {
    if (out.dtype() == DType::kFloat32) {
      out.As<float>()[i] = std::numeric_limits<float>::quiet_NaN();
    } else {
      out.As<kernels::BFloat16>()[i] = kernels::BFloat16(std::numeric_limits<float>::quiet_NaN());
    }
  }
}

}  // namespace

absl::Status CpuAttention::Select(const StepInputs& step, const CpuRotation& rotation,
                                  const LayerQueries& queries, Executor& executor) {
  const StepBatch& batch = step.batch;
  const int64_t num_kv_heads = step.kv.layout.num_kv_heads;
  faults_.assign(static_cast<size_t>(step.kv.num_slots), 0);
  SetNumbers(batch, queries.layer);
  KVASIR_RETURN_IF_ERROR(MakeSelection(step, queries.layer));
  CollectiveRanks ranks(step.shard, step.collective);
  for (const SelectorGroup& group : GroupsInLayer(batch, queries.layer)) {
    const size_t begin = static_cast<size_t>(group.begin);
    const size_t count = static_cast<size_t>(group.end - group.begin);
    PageSelection rows =
        selection_.Rows(group.begin * num_kv_heads, (group.end - group.begin) * num_kv_heads);
    SelectParams params = {{.q = queries.q,
                            .kv = step.kv,
                            .layer = queries.layer,
                            .scale = queries.scale,
                            .tiles = std::span(batch.tiles).subspan(begin, count),
                            .numbers = std::span(numbers_).subspan(begin, count),
                            .faults = std::span(faults_),
                            .rotation = rotation.queries}};
    params.scratch = &scratch_;
    params.rope = rotation.positions;
    params.memories = MemoriesOf(step, group, queries.layer);
    params.ranks = &ranks;
    KVASIR_RETURN_IF_ERROR(SelectGroup(group, params, rows, step, executor));
  }
  MakeTerminations(step, queries.layer);
  return absl::OkStatus();
}

absl::Status CpuAttention::MakeSelection(const StepInputs& step, int64_t layer) {
  const StepBatch& batch = step.batch;
  const int64_t num_rows = std::ssize(batch.tiles) * step.kv.layout.num_kv_heads;
  const int64_t capacity = SelectionCapacity(batch, layer);
  headers_.resize(static_cast<size_t>(num_rows));
  const int64_t bytes = num_rows * capacity * static_cast<int64_t>(sizeof(kernels::SelectionEntry));
  KVASIR_ASSIGN_OR_RETURN(std::byte* const memory, entries_.Reserve(bytes));
  selection_ = {.headers = headers_.data(),
                .entries = reinterpret_cast<kernels::SelectionEntry*>(memory),
                .num_rows = num_rows,
                .capacity = capacity};
  return absl::OkStatus();
}

void CpuAttention::SetNumbers(const StepBatch& batch, int64_t layer) {
  numbers_.clear();
  for (int64_t b = 0; b < std::ssize(batch.tiles); ++b) {
    numbers_.push_back(NumbersInLayer(batch, b, layer));
  }
}

absl::Status CpuAttention::SelectGroup(const SelectorGroup& group, const SelectParams& params,
                                       PageSelection& rows, const StepInputs& step,
                                       Executor& executor) {
  const ServedSelector& served = *group.served;
  KVASIR_RETURN_IF_ERROR(served.reuse == nullptr ? served.selector->Select(params, rows, executor)
                                                 : SelectReusing(*served.selector, *served.reuse,
                                                                 params, rows, executor));
  if (params.rope != nullptr) AssignPositions(rows);
  if (served.pruner != nullptr) {
    SelectParams anew = params;  // pruned is what serves again, too
    anew.memories = {};
    KVASIR_RETURN_IF_ERROR(served.pruner->Prune(anew, rows, executor));
  }
  return KeepContract(step, group, params, rows, executor);
}

absl::Status CpuAttention::KeepContract(const StepInputs& step, const SelectorGroup& group,
                                        const SelectParams& params, PageSelection& rows,
                                        Executor& executor) {
  KVASIR_RETURN_IF_ERROR(contract_keeper_.Keep(
      {.selector = *group.served->selector, .pruner = group.served->pruner.get()}, params, rows,
      executor));
  // Ranks that share a KV head count the same.
  if (step.shard.replica() == 0) step.meter.CountContract(group, contract_keeper_);
  return absl::OkStatus();
}

std::span<kernels::RowMemory* const> CpuAttention::MemoriesOf(const StepInputs& step,
                                                              const SelectorGroup& group,
                                                              int64_t layer) {
  if (group.served->reuse == nullptr) return {};
  memories_.clear();
  for (int64_t b = group.begin; b < group.end; ++b) {
    auto* const memory = static_cast<kernels::SelectionMemory*>(  // of CpuBackend::Remember
        step.batch.infos[static_cast<size_t>(b)].memory);
    for (int64_t head = 0; head < step.kv.layout.num_kv_heads; ++head) {
      memories_.push_back(memory == nullptr ? nullptr : &memory->row(layer, head));
    }
  }
  return memories_;
}

void CpuAttention::MakeTerminations(const StepInputs& step, int64_t layer) {
  const auto groups = GroupsInLayer(step.batch, layer);
  terminations_.clear();
  unread_.clear();
  const bool any = std::any_of(groups.begin(), groups.end(), [](const auto& group) {
    return group.served->terminator != nullptr;
  });
  if (!any) return;
  for (const SelectorGroup& group : groups) {
    for (int64_t b = group.begin; b < group.end; ++b) {
      terminations_.push_back(kernels::MakeTermination(group.served->terminator.get(),
                                                       step.batch.tiles[static_cast<size_t>(b)],
                                                       numbers_[static_cast<size_t>(b)]));
    }
  }
  unread_.resize(terminations_.size() * static_cast<size_t>(step.kv.layout.num_kv_heads));
}

void CpuAttention::WantPages(const StepInputs& step, int64_t layer) {
  wanted_.clear();
  seen_.clear();
  const int64_t num_heads = step.kv.layout.num_kv_heads;
  for (int64_t row = 0; row < selection_.num_rows; ++row) {
    const QueryTile& tile = step.batch.tiles[static_cast<size_t>(row / num_heads)];
    const int64_t head = row % num_heads;
    const int64_t last = tile.first_position + tile.num_rows - 1;
    kernels::SelectedPages walk(selection_.header(row), selection_.list(row), last);
    for (; walk.valid(); walk.Next()) {
      if (step.kv.extent(tile.slot, walk.page()) < 0) continue;
      const int64_t page = step.kv.PageIndex(tile.slot, walk.page(), layer, head);
      const bool is_absent = step.kv.pages[page].tier() == kernels::PageTier::kAbsent;
      if (is_absent && seen_.insert(page).second) wanted_.push_back(page);
    }
  }
  step.kv.on_disk->Want(layer, wanted_);
}

absl::Status CpuAttention::Attend(const StepInputs& step, const CpuRotation& rotation,
                                  const LayerQueries& queries, const TensorView& out,
                                  Executor& executor) {
  const int64_t tokens = queries.q.dim(0);
  const int64_t num_heads = queries.q.dim(1);
  if (step.kv.on_disk != nullptr) WantPages(step, queries.layer);
  // At compact positions, dense attention to a context beyond the trained window is meaningless as
  // a reference.
  const bool compact = rotation.positions != nullptr && !rotation.grouped.on();
  const bool measures = !compact && step.meter.Measures(queries.layer);
  const int64_t lse_bytes = tokens * num_heads * static_cast<int64_t>(sizeof(float));
  KVASIR_ASSIGN_OR_RETURN(std::byte* const lse, lse_.Reserve(measures ? lse_bytes : 0));
  kernels::AttendParams params = {
      {.q = queries.q,
       .out = out,
       .lse = measures ? TensorView(lse, DType::kFloat32, {tokens, num_heads}) : TensorView(),
       .kv = step.kv,
       .layer = queries.layer,
       .scale = queries.scale,
       .tiles = step.batch.tiles,
       .selection = selection_,
       .faults = std::span(faults_),
       .grouped = rotation.grouped,
       .window_tokens = WindowOfLayer(step.batch, queries.layer)}};
  params.scratch = &scratch_;
  params.rope = rotation.positions;
  params.terminations = terminations_;
  params.unread = std::span(unread_);
  KVASIR_RETURN_IF_ERROR(kernels::Attend(params, executor));
  if (measures) KVASIR_RETURN_IF_ERROR(step.meter.Measure(params, executor));
  for (const QueryTile& tile : step.batch.tiles) {
    if (faults_[static_cast<size_t>(tile.slot)] != 0) PoisonRows(out, tile);
  }
  // Ranks that share a KV head select alike, so its pages are counted once.
  if (step.shard.replica() == 0) {
    step.meter.Count(selection_, unread_, step.kv, queries.layer);
  }
  return absl::OkStatus();
}

}  // namespace kvasir::worker
