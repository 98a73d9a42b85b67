// Reuse of earlier selections inside the kernels of selectors on the GPU, row by row: the
// counterpart of reusing_select.cc on the CPU. The author of a selector must make sure of this:
//
//   every kernel      asks RowReuse::FirstStage (or Serves, or Runs) which stage of a row must run
//                     first, and skips all stages before it
//   the last kernel   calls Recall for a row if its list serves unchanged, and otherwise Remember
//                     after the list is in `out` (or writes with WriteEntry and WriteHeader)
//
// FirstStage reads RememberedRow::position, ran_at and first_stage. No kernel may change them
// before the last one does, or the kernels of a step would disagree. Where several CTAs serve a
// row, all of them must have called FirstStage and met before one calls Recall or Remember. Earlier
// kernels may write the outputs of their stages (items and kept). Under rules that read queries,
// JudgeReuse (reuse_gate_cuda.h) writes first_stage before the selector starts.
#pragma once

#include "kernels/sparse/common/device_memory.h"
#include "kernels/sparse/common/select_row.cuh"
#include "kernels/sparse/reuse/reuse_rules.h"

namespace kvasir::kernels {

// This thread's number among the threads that recall or remember a row together. The default is all
// threads of one CTA.
struct RowThreads {
  unsigned index = threadIdx.x;
  unsigned count = blockDim.x;
};

// The memory of a row. In a row without memory all stages run and nothing is remembered.
class RowReuse {
 public:
  __device__ RowReuse(const SelectLaunch& p, const DeviceRow& row) : p_(p), row_(row) {
    if (p.memories == nullptr) return;
    const auto heads = static_cast<uint32_t>(p.kv.layout.num_kv_heads);
    const DeviceSelectionMemory& memory = p.memories[static_cast<uint32_t>(row.index) / heads];
    if (memory.rows == nullptr) return;
    memory_ = memory;  // may be read before the kernel waits: written when the step began
    at_ = p.layer * p.kv.layout.num_kv_heads + row.kv_head;
    remembered_ = memory.rows + at_;
  }

  __device__ bool remembers() const { return remembered_ != nullptr; }
  __device__ RememberedRow& remembered() const { return *remembered_; }
  __device__ int num_stages() const { return memory_.num_stages; }
  __device__ float* anchor(int stage) const {
    return memory_.anchors + (at_ * memory_.num_stages + stage) * memory_.query_floats;
  }
  // Items that a stage before the last leaves. Their number is in remembered().
  __device__ int32_t* items(int stage) const {
    return memory_.stage_items + (at_ * (memory_.num_stages - 1) + stage) * memory_.max_items;
  }

  // Returns the first stage to run; num_stages: the list serves unchanged. `header` is from
  // MakeHeader.
  __device__ int FirstStage(const SelectionHeader& header) const {
    if (remembered_ == nullptr || header.kind == SelectionHeader::Kind::kAll) return 0;
    if (memory_.rule != DeviceReuseRule::kInterval) return remembered_->first_stage;
    return Judge([](int) { return 0.0f; });
  }
  __device__ bool Serves(const SelectionHeader& header) const {
    return remembered_ != nullptr && FirstStage(header) == memory_.num_stages;
  }

  // Applies the rule itself. cosines(stage) is the cosine of this query and the one that the stage
  // ran with.
  template <typename Cosines>
  __device__ int Judge(const Cosines& cosines) const {
    const int64_t position = row_.tile.first_position;
    if (StartsAnew(position, remembered_->position)) return 0;
#pragma unroll
    for (int stage = 0; stage < static_cast<int>(kMaxStages); ++stage) {
      if (stage == memory_.num_stages) return stage;
      const StageAge age = {.steps = position - remembered_->ran_at[stage],
                            .interval = memory_.intervals[stage],
                            .cosine = cosines(stage)};
      if (Refreshes(age)) return stage;
    }
    return memory_.num_stages;
  }

  // --- Called by all threads of a CTA, or of several CTAs if they have met after the last of them
  // read the memory or wrote to `out`. ---

  // REQUIRES: Serves.
  __device__ void Recall(SelectionHeader header, const RowThreads& threads = {}) const {
    header.count = static_cast<int32_t>(remembered_->count);
    header.made_at = remembered_->ran_at[memory_.num_stages - 1];
    header.reused_stages = memory_.num_stages;
    if (window_grows()) header.window_begin = remembered_->window_begin;
    __syncthreads();  // all threads have read the remembered row
    Copy(List(), Out(), header.count, threads);
    if (threads.index != 0) return;
    p_.out.headers[row_.index] = header;
    remembered_->position = row_.tile.first_position;
  }

  // Remembers the row that these threads wrote to `out`. Does nothing in a row without memory.
  __device__ void Remember(const RowThreads& threads = {}) const {
    if (remembered_ == nullptr) return;
    const int first = FirstStage(MakeHeader(row_.tile, row_.numbers));
    __syncthreads();  // `out` is written, and all threads have read the remembered row
    const SelectionHeader& header = p_.out.headers[row_.index];
    if (header.kind != SelectionHeader::Kind::kAll) Copy(Out(), List(), header.count, threads);
    if (threads.index == 0) RememberHeader(header, first);
  }

  // --- For a list that is written to `out` and to the memory at once. ---

  __device__ void WriteEntry(int64_t place, const SelectionEntry& entry) const {
    Out()[place] = entry;
    if (remembered_ != nullptr) List()[place] = entry;
  }
  // Writes the row's header. Called by one thread, after all have read the memory. `first_stage` is
  // the first stage that ran.
  __device__ void WriteHeader(const SelectionHeader& header, int first_stage) const {
    p_.out.headers[row_.index] = header;
    if (remembered_ != nullptr) RememberHeader(header, first_stage);
  }

 private:
  __device__ void RememberHeader(SelectionHeader header, int first) const {
    const bool is_all = header.kind == SelectionHeader::Kind::kAll;
    remembered_->position = is_all ? RememberedRow::kNothing : row_.tile.first_position;
    if (is_all) return;
    remembered_->count = header.count;
    for (int s = first; s < memory_.num_stages; ++s) {
      remembered_->ran_at[s] = row_.tile.first_position;
    }
    if (first == 0) remembered_->window_begin = header.window_begin;
    if (window_grows()) header.window_begin = remembered_->window_begin;
    header.reused_stages = first;
    p_.out.headers[row_.index] = header;
  }

  __device__ bool window_grows() const { return memory_.rule == DeviceReuseRule::kCosine; }
  __device__ bool Refreshes(const StageAge& age) const {
    switch (memory_.rule) {
      case DeviceReuseRule::kInterval:
        return IntervalRefreshes(age);
      case DeviceReuseRule::kCosine:
        return CosineRefreshes(age, row_.numbers.reuse);
      default:
        return BothRefreshes(age, row_.numbers.reuse);
    }
  }
  __device__ SelectionEntry* List() const { return memory_.lists + at_ * memory_.capacity; }
  __device__ SelectionEntry* Out() const { return p_.out.entries + row_.index * p_.out.capacity; }
  __device__ static void Copy(const SelectionEntry* from, SelectionEntry* to, int64_t count,
                              const RowThreads& threads) {
    for (int64_t i = threads.index; i < count; i += threads.count) to[i] = from[i];
  }

  const SelectLaunch& p_;
  const DeviceRow& row_;
  DeviceSelectionMemory memory_;
  RememberedRow* remembered_ = nullptr;
  int64_t at_ = 0;  // index of the row in the memory
};

// Whether `stage` of the row's selector runs in this step.
__device__ inline bool Runs(const SelectLaunch& p, const DeviceRow& row, int stage) {
  return RowReuse(p, row).FirstStage(MakeHeader(row.tile, row.numbers)) <= stage;
}

}  // namespace kvasir::kernels
