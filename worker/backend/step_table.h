// What kernels read about a step, as one block of memory: written on the host, copied to the device
// once, read there by all layers; and what they leave behind. It hides the order of query blocks on
// a device, where those of one query each come first (one launch of decode attention), the others
// behind them (one launch of prefill attention), and within both by selector (one launch of
// selection each). Called by the CUDA backend. Plain data and functions without state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/paged/page_selection.h"
#include "kernels/paged/paged_kv.h"
#include "kernels/sparse/reuse/device_memory.h"
#include "kernels/sparse/stages.h"
#include "worker/step_batch.h"

namespace kvasir::worker {

// Query blocks [begin, end) of the device's order that one selector serves in one call: those of
// one memory follow each other, and so do not go together.
struct SelectorRange {
  const ServedSelector* served = nullptr;
  int64_t begin = 0;
  int64_t end = 0;
};

// How a batch lies in a table.
struct StepShape {
  std::vector<int64_t> order;  // block of the batch, by place on the device
  int64_t num_single = 0;      // blocks of one query: the first of them
  std::vector<SelectorRange> ranges;
  // Layers from which on a set of numbers holds, ascending, the first 0: layers that stay dense, or
  // have budgets of their own, differ from row to row.
  std::vector<int64_t> number_sets;
  int64_t num_kv_heads = 0;

  int64_t num_blocks() const { return static_cast<int64_t>(order.size()); }
  // Of number_sets, the one for `layer`.
  int64_t NumbersFor(int64_t layer) const;
};

StepShape ShapeOf(const StepBatch& batch, int64_t num_kv_heads);

// Arrays of a step in the memory of one table, on either side.
struct StepTable {
  std::span<int32_t> tokens;
  std::span<int32_t> fed_by;  // StepBatch::fed_by
  std::span<int64_t> positions;
  std::span<int32_t> sampled_tokens;
  std::span<kernels::QueryBlock> appends;
  std::span<kernels::QueryBlock> blocks;  // in the device's order, as all below
  // [number sets][blocks]
  std::span<kernels::SelectionNumbers> numbers;
  // [blocks][KV heads]: all that `all` selects; selectors write those of their rows anew.
  std::span<kernels::SelectionHeader> headers;
  // [blocks]: of their sequences, where those reuse selections. Not of Fill.
  std::span<kernels::DeviceSelectionMemory> memories;
  std::span<Truncation> truncations;
  int64_t bytes = 0;

  std::span<const kernels::SelectionNumbers> NumbersOfSet(int64_t set) const {
    return numbers.subspan(static_cast<size_t>(set) * blocks.size(), blocks.size());
  }
};

// The arrays for the batch from `memory` on; null: only `bytes` is of use.
StepTable LayOut(const StepBatch& batch, const StepShape& shape, std::byte* memory);

// What kernels leave behind of a step, as one block of memory: copied to the host once.
struct StepResults {
  std::span<kernels::SelectedCounts> counts;  // [layers][blocks, device's order][KV heads]
  std::span<uint8_t> finite;                  // [tokens]: 0: NaN or infinity in the hidden state
  std::span<uint8_t> faults;                  // [slots]: set where a page was absent
  int64_t bytes = 0;
};

// As LayOut.
StepResults LayOutResults(const StepBatch& batch, const StepShape& shape, int64_t num_layers,
                          int64_t num_slots, std::byte* memory);

// REQUIRES: `table` lies in host memory.
void Fill(const StepBatch& batch, const StepShape& shape, const StepTable& table);

}  // namespace kvasir::worker
