// The memory of selections that decoding keeps so that they serve later steps: for each (layer, KV
// head) of one sequence, the last list, the output of every stage of the selector, and the queries
// that the stages ran with. It belongs to the sequence and goes with it: a sequence that starts,
// resumes or is forked remembers nothing. Written by SelectReusing and by selectors of several
// stages, each row by one thread at a time.
//
// Memory: a list has at most one entry (32 bytes) per page of the context, and a stage has at most
// one item (8 bytes) per 32 tokens: together at most 1/512 of the KV at 128 dimensions of bfloat16.
// Reserved for the longest context, and touched as far as it is used (in pages of
// kernels/base/buffer.h).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/base/buffer.h"
#include "kernels/paged/page_selection.h"
#include "kernels/sparse/common/device_memory.h"
#include "kernels/sparse/common/stages.h"

namespace kvasir::kernels {

// The memory of one row. A view.
struct RowMemory {
  struct StageItems {
    int64_t* items = nullptr;  // defined by the selector; for infinitehip, where chunks begin
    int64_t count = 0;
  };

  size_t num_stages = 1;
  // The verdict of this step: the first stage to run. num_stages: the list serves unchanged.
  size_t first_stage = 0;
  // Position of the query that was served last; negative: nothing is remembered. A query that does
  // not directly follow it runs all stages, as after a truncation of the sequence.
  int64_t position = kNothing;
  std::array<int64_t, kMaxStages> ran_at = {};  // the query's position when the stage ran
  std::array<StageItems, kMaxStages - 1> stages = {};
  int64_t window_begin = 0;  // of the step in which the first stage ran
  int32_t count = 0;         // entries in the list
  SelectionEntry* list = nullptr;
  int64_t query_floats = 0;  // group x head_dim; 0 under rules that read no queries
  float* query = nullptr;    // of this step, not rotated
  float* anchors = nullptr;  // [num_stages, query_floats]: the queries that the stages ran with

  bool serves() const { return first_stage == num_stages; }
  float* anchor(size_t stage) const { return anchors + static_cast<int64_t>(stage) * query_floats; }
  void Forget() {
    position = kNothing;
    first_stage = 0;
  }

  static constexpr int64_t kNothing = -2;
};

// The memory that a sequence holds, wherever it is computed.
class RememberedSelections {
 public:
  virtual ~RememberedSelections() = default;
  virtual int64_t size_bytes() const = 0;
};

// The memory of one sequence in host memory.
class SelectionMemory final : public RememberedSelections {
 public:
  struct Shape {
    int64_t num_layers = 0;
    int64_t num_kv_heads = 0;
    size_t num_stages = 1;
    int64_t max_entries = 0;      // of a list
    int64_t max_stage_items = 0;  // of a stage
    int64_t query_floats = 0;
  };
  // RESOURCE_EXHAUSTED when there is no memory.
  static absl::StatusOr<std::unique_ptr<SelectionMemory>> Create(const Shape& shape);

  RowMemory& row(int64_t layer, int64_t kv_head) {
    return rows_[static_cast<size_t>(layer * num_kv_heads_ + kv_head)];
  }
  int64_t size_bytes() const override { return memory_.size_bytes(); }

 private:
  SelectionMemory(const Shape& shape, HostBuffer memory);

  const int64_t num_kv_heads_;
  HostBuffer memory_;
  std::vector<RowMemory> rows_;
};

}  // namespace kvasir::kernels
