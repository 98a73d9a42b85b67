// What attention did in a step, per row of the plan and per phase: pages read and skipped, tiers
// they came from, and the attention mass that selections kept, measured by exact recomputation on a
// sample. It stands beside the forward pass: attention layers report to it, the engine reads it
// when the step is over. Which (sequence, position, layer) is measured is a hash of these three, so
// it depends neither on the batch nor on the rank. Thread-compatible.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"

#include "kernels/attention/attend.h"
#include "kernels/base/buffer.h"
#include "kernels/sparse/quality_contract.h"
#include "worker/step_batch.h"

namespace kvasir::worker {

// In pages (but for stages), summed over layers, query blocks and the rank's KV heads.
struct AttentionCounts {
  int64_t total = 0;         // dense attention would have read
  int64_t selected_out = 0;  // of them skipped, by reason
  int64_t window = 0;
  int64_t pruned = 0;
  int64_t terminated = 0;
  int64_t device_reads = 0;  // read, by the tier that held the page
  int64_t host_reads = 0;
  // Where selections are reused: rows (layer, KV head) in which a stage ran, and in which it served
  // with what it had left. By stage.
  std::array<int64_t, kernels::kMaxStages> stages_run = {}, stages_reused = {};

  AttentionCounts& operator+=(const AttentionCounts& other);
  friend bool operator==(const AttentionCounts&, const AttentionCounts&) = default;
};

// Rows (layer, query, KV head) of decoding under a contract of quality, and what became of them.
struct ContractCounts {
  int64_t rows = 0;
  int64_t dense = 0;    // made dense
  int64_t widened = 0;  // widened until they keep enough
  int64_t missed = 0;   // keep too little all the same
};

struct RowAttention {
  std::array<AttentionCounts, 2> counts;  // by Phase
  // Measured, one per sampled (layer, query, query head); by Phase.
  std::array<std::vector<float>, 2> masses;
  ContractCounts contract;
  std::vector<float> estimates;  // of mass, one per (layer, query, query head) under a contract
  std::vector<int64_t> budgets;  // of decoding: tokens attended to, one per (layer, query, KV head)
};

class AttentionMeter {
 public:
  // `sample_rate` of the (query block, layer) pairs are measured.
  explicit AttentionMeter(double sample_rate) : sample_rate_(sample_rate) {}

  // `batch` stays as it is until the step's end.
  void BeginStep(const StepBatch& batch);
  // Counts what attention read of the selection of a layer, and what it skipped; `unread` is what
  // rows ended before, by row, or empty.
  void Count(const kernels::PageSelection& selection, std::span<const kernels::UnreadPages> unread,
             const kernels::PagedKv& kv, int64_t layer);
  // The same where the backend counted itself: `heads` of a query block, in one layer.
  void AddCounts(int64_t block, std::span<const kernels::SelectedCounts> heads);
  // Counts what the keeper did about the selections of a group.
  void CountContract(const SelectorGroup& group, const kernels::ContractKeeper& keeper);
  // Whether mass is measured in this layer: then the attention op must deliver lse.
  bool Measures(int64_t layer);
  // Attends densely to the sampled blocks and compares (kernels/attention/attention_mass.h).
  // `sparse` is what was run, with its lse.
  absl::Status Measure(const kernels::AttendParams& sparse, kernels::Executor& executor);

  const RowAttention& row(int64_t r) const { return rows_[static_cast<size_t>(r)]; }
  int64_t num_rows() const { return std::ssize(rows_); }

 private:
  const SelectorGroup& GroupOf(int64_t block) const;
  bool IsSampled(const BlockInfo& info, int64_t position, int64_t layer) const;
  void Compare(int64_t block, const kernels::TensorView& sparse_lse,
               const kernels::TensorView& dense_lse);

  const double sample_rate_;
  const StepBatch* batch_ = nullptr;
  std::vector<RowAttention> rows_;
  std::vector<int64_t> sampled_;  // blocks measured in the layer that Measures was asked about
  // Of the dense run.
  std::vector<kernels::QueryBlock> dense_blocks_;
  std::vector<kernels::SelectionHeader> dense_headers_;
  std::vector<uint8_t> dense_faults_;
  kernels::HostBuffer dense_out_, dense_lse_;
};

}  // namespace kvasir::worker
