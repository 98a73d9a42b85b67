// Meter of attention in one step, per row of the plan and per phase: pages read and skipped, the
// tiers they came from, and the attention mass that selections kept. Mass is measured by exact
// recomputation on a sample. Attention layers report to the meter, and the engine reads it when the
// step is over. A hash of (sequence, first position of the query tile, layer) decides which tiles
// are measured, so the sample depends neither on the batch nor on the rank. Thread-compatible.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"

#include "kernels/attention/attend.h"
#include "kernels/base/buffer.h"
#include "kernels/sparse/quality/quality_contract.h"
#include "worker/batch/observed_pages.h"
#include "worker/batch/step_batch.h"

namespace kvasir::worker {

// Pages (except stages), summed over layers, query tiles and the rank's KV heads.
struct AttentionCounts {
  int64_t total = 0;         // pages that the model, without a policy, would have read
  int64_t selected_out = 0;  // pages of `total` that were skipped, by reason
  int64_t window = 0;
  int64_t pruned = 0;
  int64_t terminated = 0;
  int64_t device_reads = 0;  // pages that were read, by the tier that held them
  int64_t host_reads = 0;
  // Where selections are reused: by stage, rows (layer, KV head) in which the stage ran, and rows
  // in which its remembered result served again.
  std::array<int64_t, kernels::kMaxStages> stages_run = {}, stages_reused = {};

  AttentionCounts& operator+=(const AttentionCounts& other);
  friend bool operator==(const AttentionCounts&, const AttentionCounts&) = default;
};

// Rows (layer, query, KV head) of decoding under a contract of quality, and their outcomes.
struct ContractCounts {
  int64_t rows = 0;
  int64_t dense = 0;    // attended to everything
  int64_t widened = 0;  // widened until they kept enough
  int64_t missed = 0;   // kept too little
};

struct RowAttention {
  size_t policy = 0;                      // of the sequence
  std::array<AttentionCounts, 2> counts;  // by Phase
  // Measured masses, one per sampled (layer, query, query head); by Phase.
  std::array<std::vector<float>, 2> masses;
  ContractCounts contract;
  std::vector<float> estimates;  // estimated masses, one per (layer, query, query head) under a
                                 // contract
  std::vector<int64_t> budgets;  // decoding: tokens attended to, one per (layer, query, KV head)
  ObservedPages observed;        // of an observed row whose backend tells selections
};

class AttentionMeter {
 public:
  // Measures a share `sample_rate` of the (query tile, layer) pairs.
  explicit AttentionMeter(double sample_rate) : sample_rate_(sample_rate) {}

  // `batch` must not change until the step's end.
  void BeginStep(const StepBatch& batch);
  // Counts the pages that attention read and skipped in a layer. `unread` has, by row, the pages
  // before which a row ended early; it may be empty.
  void Count(const kernels::PageSelection& selection, std::span<const kernels::UnreadPages> unread,
             const kernels::PagedKv& kv, int64_t layer);
  // Adds counts that the backend made itself: `heads` of one query tile, in one layer.
  void AddCounts(int64_t layer, int64_t tile, std::span<const kernels::SelectedCounts> heads);
  // Counts the keeper's decisions about the selections of a group.
  void CountContract(const SelectorGroup& group, const kernels::ContractKeeper& keeper);
  // Whether mass is measured in this layer. If so, the attention op must deliver lse.
  bool Measures(int64_t layer);
  // Attends densely to the sampled tiles and compares (kernels/attention/attention_mass.h).
  // `sparse` is the attention that was run, with its lse.
  absl::Status Measure(const kernels::AttendParams& sparse, kernels::Executor& executor);

  const RowAttention& row(int64_t r) const { return rows_[static_cast<size_t>(r)]; }
  int64_t num_rows() const { return std::ssize(rows_); }

 private:
  const SelectorGroup& GroupOf(int64_t layer, int64_t tile) const;
  // Returns where the tile's pages are noted; null: they are not.
  ObservedPages* ObservedBy(int64_t tile, const kernels::KvLayout& layout);
  // Sets the total, and as skipped for `reason` what is neither read nor skipped for another one.
  void CountSkipped(const kernels::QueryTile& tile, int64_t layer, int64_t num_heads,
                    kernels::SkipReason reason, AttentionCounts& counts) const;
  bool IsSampled(const TileInfo& info, int64_t position, int64_t layer) const;
  void Compare(int64_t tile, const kernels::TensorView& sparse_lse,
               const kernels::TensorView& dense_lse);

  const double sample_rate_;
  const StepBatch* batch_ = nullptr;
  std::vector<RowAttention> rows_;
  std::vector<int64_t> sampled_;  // tiles measured in the layer that Measures was last asked about
  // The dense run.
  std::vector<kernels::QueryTile> dense_tiles_;
  std::vector<kernels::SelectionHeader> dense_headers_;
  std::vector<uint8_t> dense_faults_;
  kernels::HostBuffer dense_out_, dense_lse_;
};

}  // namespace kvasir::worker
