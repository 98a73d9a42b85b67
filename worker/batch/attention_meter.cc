#include "worker/batch/attention_meter.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/attention/attention_mass.h"
#include "kernels/base/status_macros.h"
#include "kernels/paged/page_selection.h"
#include "kernels/sparse/common/selection_accounting.h"

namespace kvasir::worker {
namespace {

using kernels::ContractOutcome;
using kernels::PageSelection;
using kernels::PageTier;
using kernels::QueryTile;
using kernels::SelectionHeader;
using kernels::SkipReason;
using kernels::TensorView;

int64_t LastPosition(const QueryTile& tile) { return tile.first_position + tile.num_rows - 1; }

// The finalizer of MurmurHash3: every input bit changes every output bit with probability 1/2.
uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdu;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53u;
  return x ^ (x >> 33);
}

// Returns the stages that a sequence's memory may serve for; none where nothing is reused.
int64_t NumReusedStages(const ServedSelector& served) {
  return served.reuse == nullptr ? 0 : std::ssize(served.selector->RefreshIntervals());
}

// Counts stages for one row that has a list and reuses selections.
void CountStages(int32_t reused_stages, int64_t num_stages, AttentionCounts& counts) {
  for (int64_t s = 0; s < num_stages; ++s) {
    ++(s < reused_stages ? counts.stages_reused : counts.stages_run)[static_cast<size_t>(s)];
  }
}

absl::Status Reserve(int64_t bytes, kernels::HostBuffer& buffer) {
  if (buffer.size_bytes() >= bytes) return absl::OkStatus();
  KVASIR_ASSIGN_OR_RETURN(buffer, kernels::HostBuffer::Allocate(bytes));
  return absl::OkStatus();
}

}  // namespace

AttentionCounts& AttentionCounts::operator+=(const AttentionCounts& other) {
  total += other.total;
  selected_out += other.selected_out;
  window += other.window;
  pruned += other.pruned;
  terminated += other.terminated;
  device_reads += other.device_reads;
  host_reads += other.host_reads;
  for (size_t s = 0; s < kernels::kMaxStages; ++s) {
    stages_run[s] += other.stages_run[s];
    stages_reused[s] += other.stages_reused[s];
  }
  return *this;
}

void AttentionMeter::BeginStep(const StepBatch& batch) {
  batch_ = &batch;
  rows_.assign(batch.row_begins.size() - 1, {});
  for (size_t r = 0; r < rows_.size(); ++r) rows_[r].policy = batch.row_policies[r];
}

void AttentionMeter::Count(const PageSelection& selection,
                           std::span<const kernels::UnreadPages> unread, const kernels::PagedKv& kv,
                           int64_t layer) {
  const int64_t num_heads = kv.layout.num_kv_heads;
  for (const SelectorGroup& group : GroupsInLayer(*batch_, layer)) {
    const SkipReason reason = group.served->selector->skip_reason();
    const int64_t num_stages = NumReusedStages(*group.served);
    for (int64_t b = group.begin; b < group.end; ++b) {
      const QueryTile& tile = batch_->tiles[static_cast<size_t>(b)];
      const TileInfo& info = batch_->infos[static_cast<size_t>(b)];
      RowAttention& to = rows_[static_cast<size_t>(info.row)];
      ObservedPages* const observed = ObservedBy(b, kv.layout);
      AttentionCounts counts;
      for (int64_t head = 0; head < num_heads; ++head) {
        const int64_t row = b * num_heads + head;
        kernels::SelectedPages walk(selection.header(row), selection.list(row), LastPosition(tile));
        counts.pruned += CountPrunedPages(selection.header(row), selection.list(row));
        const SelectionHeader& header = selection.header(row);
        if (info.memory != nullptr && header.kind == SelectionHeader::Kind::kList) {
          CountStages(header.reused_stages, num_stages, counts);
        }
        int64_t tokens = 0;
        for (; walk.valid(); walk.Next()) {
          const PageTier tier = kv.Peek(tile.slot, walk.page(), layer, head).tier();
          ++(tier == PageTier::kDevice ? counts.device_reads : counts.host_reads);
          tokens += std::popcount(walk.mask());
          if (observed != nullptr) observed->Add(layer, walk.page());
        }
        if (info.phase == Phase::kDecode) to.budgets.push_back(tokens);
        if (unread.empty()) continue;
        const kernels::UnreadPages& left = unread[static_cast<size_t>(row)];
        counts.device_reads -= left.device;
        counts.host_reads -= left.host;
        counts.terminated += left.device + left.host;
      }
      CountSkipped(tile, layer, num_heads, reason, counts);
      to.counts[static_cast<size_t>(info.phase)] += counts;
    }
  }
}

// In a layer with a window of the model, dense attention reads no more than that.
void AttentionMeter::CountSkipped(const QueryTile& tile, int64_t layer, int64_t num_heads,
                                  SkipReason reason, AttentionCounts& counts) const {
  const int64_t met = counts.device_reads + counts.host_reads + counts.pruned + counts.terminated;
  counts.total = WindowOfLayer(*batch_, layer) != 0
                     ? met
                     : num_heads * (LastPosition(tile) / kernels::kPageTokens + 1);
  (reason == SkipReason::kWindow ? counts.window : counts.selected_out) = counts.total - met;
}

ObservedPages* AttentionMeter::ObservedBy(int64_t tile, const kernels::KvLayout& layout) {
  const auto row = static_cast<size_t>(batch_->infos[static_cast<size_t>(tile)].row);
  const QueryTile& queries = batch_->tiles[static_cast<size_t>(tile)];
  const bool is_last = queries.first_row + queries.num_rows == batch_->row_begins[row + 1];
  if (batch_->row_observed[row] == 0 || !is_last) return nullptr;
  ObservedPages& observed = rows_[row].observed;
  if (observed.num_pages == 0) {
    observed = ObservedPages::Of(LastPosition(queries) / kernels::kPageTokens + 1,
                                 layout.num_layers, layout.num_kv_heads);
  }
  return &observed;
}

const SelectorGroup& AttentionMeter::GroupOf(int64_t layer, int64_t tile) const {
  const auto groups = GroupsInLayer(*batch_, layer);
  return *std::find_if(groups.begin(), groups.end(),
                       [tile](const SelectorGroup& group) { return tile < group.end; });
}

void AttentionMeter::AddCounts(int64_t layer, int64_t tile,
                               std::span<const kernels::SelectedCounts> heads) {
  const TileInfo& info = batch_->infos[static_cast<size_t>(tile)];
  const QueryTile& queries = batch_->tiles[static_cast<size_t>(tile)];
  const ServedSelector& served = *GroupOf(layer, tile).served;
  const SkipReason reason = served.selector->skip_reason();
  const int64_t num_stages = NumReusedStages(served);
  RowAttention& to = rows_[static_cast<size_t>(info.row)];
  AttentionCounts counts;
  for (const kernels::SelectedCounts& head : heads) {
    counts.device_reads += head.pages - head.unread_pages;
    counts.terminated += head.unread_pages;
    counts.pruned += head.pruned_pages;
    if (info.phase == Phase::kDecode) to.budgets.push_back(head.tokens);
    if (info.memory != nullptr && head.is_list != 0) {
      CountStages(head.reused_stages, num_stages, counts);
    }
  }
  CountSkipped(queries, layer, std::ssize(heads), reason, counts);
  to.counts[static_cast<size_t>(info.phase)] += counts;
}

void AttentionMeter::CountContract(const SelectorGroup& group,
                                   const kernels::ContractKeeper& keeper) {
  const auto outcomes = keeper.outcomes();
  if (outcomes.empty()) return;
  const size_t num_heads = outcomes.size() / static_cast<size_t>(group.end - group.begin);
  const size_t group_size = keeper.masses().size() / outcomes.size();
  for (size_t i = 0; i < outcomes.size(); ++i) {
    if (outcomes[i] == ContractOutcome::kNone) continue;
    const TileInfo& info = batch_->infos[static_cast<size_t>(group.begin) + i / num_heads];
    RowAttention& to = rows_[static_cast<size_t>(info.row)];
    ++to.contract.rows;
    to.contract.dense += outcomes[i] == ContractOutcome::kDense;
    to.contract.widened += outcomes[i] == ContractOutcome::kWidened;
    to.contract.missed += outcomes[i] == ContractOutcome::kMissed;
    for (const float mass : keeper.masses().subspan(i * group_size, group_size)) {
      if (!std::isnan(mass)) to.estimates.push_back(mass);  // NaN: the row fails anyway
    }
  }
}

bool AttentionMeter::IsSampled(const TileInfo& info, int64_t position, int64_t layer) const {
  const uint64_t hash =
      Mix(Mix(Mix(static_cast<uint64_t>(info.sequence.value)) + static_cast<uint64_t>(position)) +
          static_cast<uint64_t>(layer));
  return static_cast<double>(hash >> 11) * 0x1.0p-53 < sample_rate_;
}

// Tiles of a dense selector, and of layers that stay dense or have a window of the model, are left
// out: they keep everything by definition and would only hide the loss of the others.
bool AttentionMeter::Measures(int64_t layer) {
  sampled_.clear();
  if (sample_rate_ <= 0 || WindowOfLayer(*batch_, layer) != 0) return false;
  for (const SelectorGroup& group : batch_->groups) {
    if (group.served->dense) continue;
    for (int64_t b = group.begin; b < group.end; ++b) {
      const TileInfo& info = batch_->infos[static_cast<size_t>(b)];
      const QueryTile& tile = batch_->tiles[static_cast<size_t>(b)];
      if (layer < info.dense_layers) continue;
      if (IsSampled(info, tile.first_position, layer)) sampled_.push_back(b);
    }
  }
  return !sampled_.empty();
}

absl::Status AttentionMeter::Measure(const kernels::AttendParams& sparse,
                                     kernels::Executor& executor) {
  dense_tiles_.clear();
  dense_headers_.clear();
  for (const int64_t b : sampled_) {
    const QueryTile& tile = batch_->tiles[static_cast<size_t>(b)];
    dense_tiles_.push_back(tile);
    for (int64_t head = 0; head < sparse.kv.layout.num_kv_heads; ++head) {
      dense_headers_.push_back({.kind = SelectionHeader::Kind::kAll,
                                .query_position = tile.first_position,
                                .made_at = tile.first_position});
    }
  }
  dense_faults_.assign(sparse.faults.size(), 0);
  KVASIR_RETURN_IF_ERROR(Reserve(sparse.out.size_bytes(), dense_out_));
  KVASIR_RETURN_IF_ERROR(Reserve(sparse.lse.size_bytes(), dense_lse_));

  kernels::AttendParams dense = sparse;
  dense.out = TensorView(dense_out_.data(), sparse.out.dtype(),
                         {sparse.out.dim(0), sparse.out.dim(1), sparse.out.dim(2)});
  dense.lse =
      TensorView(dense_lse_.data(), sparse.lse.dtype(), {sparse.lse.dim(0), sparse.lse.dim(1)});
  dense.kv.accesses = {};  // a measurement is not a use of the pages: it must not move them
  dense.tiles = dense_tiles_;
  dense.selection = {.headers = dense_headers_.data(), .num_rows = std::ssize(dense_headers_)};
  dense.faults = std::span(dense_faults_);
  dense.terminations = {};
  dense.unread = {};
  KVASIR_RETURN_IF_ERROR(Attend(dense, executor));
  for (const int64_t b : sampled_) Compare(b, sparse.lse, dense.lse);
  return absl::OkStatus();
}

void AttentionMeter::Compare(int64_t tile_index, const TensorView& sparse_lse,
                             const TensorView& dense_lse) {
  const QueryTile& tile = batch_->tiles[static_cast<size_t>(tile_index)];
  // An absent page leaves no lse to compare; the row fails anyway.
  if (dense_faults_[static_cast<size_t>(tile.slot)] != 0) return;
  const TileInfo& info = batch_->infos[static_cast<size_t>(tile_index)];
  std::vector<float>& masses =
      rows_[static_cast<size_t>(info.row)].masses[static_cast<size_t>(info.phase)];
  const int64_t num_heads = sparse_lse.dim(1);
  for (int64_t i = tile.first_row * num_heads; i < (tile.first_row + tile.num_rows) * num_heads;
       ++i) {
    const float mass =
        kernels::AttentionMassKept(sparse_lse.As<float>()[i], dense_lse.As<float>()[i]);
    if (!std::isnan(mass)) masses.push_back(mass);  // NaN: the row fails anyway
  }
}

}  // namespace kvasir::worker
