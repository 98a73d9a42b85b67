// Arrays that kernels read in a step, in one piece of memory that is written on the host, copied to
// the device once and read there by all layers; and the arrays that kernels write. It hides the
// order of query tiles on a device: tiles of one query come first (one launch of decode attention),
// then the others (one launch of prefill attention), and each part is ordered by selector (one
// launch of selection each). Called by the CUDA backend. Plain data and functions without state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/paged/page_selection.h"
#include "kernels/paged/paged_kv.h"
#include "kernels/sparse/common/device_memory.h"
#include "kernels/sparse/common/stages.h"
#include "worker/batch/step_batch.h"

namespace kvasir::worker {

// Query tiles [begin, end), in the device's order, that one selector serves in one call. Tiles that
// share a selection memory depend on each other, so they are in different ranges.
struct SelectorRange {
  const ServedSelector* served = nullptr;
  int64_t begin = 0;
  int64_t end = 0;
};

// Layout of a batch in a table.
struct StepShape {
  std::vector<int64_t> order;  // index of the batch's query tile, by place on the device
  int64_t num_single = 0;      // number of tiles of one query, which come first
  std::vector<SelectorRange> ranges;
  // First layer of each set of numbers, ascending, beginning with 0. There are several sets because
  // layers that stay dense, or have budgets of their own, differ from row to row.
  std::vector<int64_t> number_sets;
  int64_t num_kv_heads = 0;

  int64_t num_tiles() const { return static_cast<int64_t>(order.size()); }
  // Returns the index in number_sets of the set for `layer`.
  int64_t NumbersFor(int64_t layer) const;
};

StepShape ShapeOf(const StepBatch& batch, int64_t num_kv_heads);

// Arrays of a step in one table, in host or device memory.
struct StepTable {
  std::span<int32_t> tokens;
  std::span<int32_t> fed_by;  // StepBatch::fed_by
  std::span<int64_t> positions;
  std::span<int32_t> sampled_tokens;
  std::span<int32_t> scored_tokens;
  std::span<kernels::QueryTile> appends;
  std::span<kernels::QueryTile> tiles;  // in the device's order, as all below
  // [number sets][tiles]
  std::span<kernels::PolicyNumbers> numbers;
  // [tiles][KV heads]. Those of selector `all` are complete; other selectors overwrite those of
  // their rows.
  std::span<kernels::SelectionHeader> headers;
  // [tiles]: the memory of their sequence, if it reuses selections. Not written by Fill.
  std::span<kernels::DeviceSelectionMemory> memories;
  std::span<Truncation> truncations;
  int64_t bytes = 0;

  std::span<const kernels::PolicyNumbers> NumbersOfSet(int64_t set) const {
    return numbers.subspan(static_cast<size_t>(set) * tiles.size(), tiles.size());
  }
};

// Returns the arrays for the batch, beginning at `memory`. With null only `bytes` is valid.
StepTable LayOut(const StepBatch& batch, const StepShape& shape, std::byte* memory);

// Arrays that kernels write in a step, in one piece of memory that is copied to the host once.
struct DeviceStepOutputs {
  std::span<kernels::SelectedCounts> counts;  // [layers][blocks, device's order][KV heads]
  std::span<uint8_t> finite;                  // [tokens]: 0: NaN or infinity in the hidden state
  std::span<uint8_t> faults;                  // [slots]: set where a page was absent
  int64_t bytes = 0;
};

// Like LayOut.
DeviceStepOutputs LayOutResults(const StepBatch& batch, const StepShape& shape, int64_t num_layers,
                                int64_t num_slots, std::byte* memory);

// Returns, for each row of the batch, whether its result is valid: no token has a NaN or infinity,
// and its slot has no fault, which says that it read or wrote an absent page. REQUIRES: `outputs`
// lie in host memory.
std::vector<uint8_t> FiniteRows(const StepBatch& batch, const DeviceStepOutputs& outputs);

// REQUIRES: `table` lies in host memory.
void Fill(const StepBatch& batch, const StepShape& shape, const StepTable& table);

}  // namespace kvasir::worker
