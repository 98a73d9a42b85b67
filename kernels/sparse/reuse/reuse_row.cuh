// Reuse in the kernels of selectors on the GPU, row by row: what reusing_select.cc does around a
// selector, without a kernel of its own. Every kernel of a selector leaves out rows that a list
// serves; the last one, of one block of threads a row, is where a row recalls or remembers. Until
// then nothing of the memory changes, so that all of them decide alike.
#pragma once

#include "kernels/sparse/reuse/device_memory.h"
#include "kernels/sparse/reuse/reuse_rules.h"
#include "kernels/sparse/select_row.cuh"

namespace kvasir::kernels {

// The memory of a row. Without one nothing serves and nothing is remembered.
class RowReuse {
 public:
  __device__ RowReuse(const SelectLaunch& p, const DeviceRow& row) : p_(p), row_(row) {
    if (p.memories == nullptr) return;
    const auto heads = static_cast<uint32_t>(p.kv.layout.num_kv_heads);
    const DeviceSelectionMemory& memory = p.memories[static_cast<uint32_t>(row.index) / heads];
    if (memory.rows == nullptr) return;
    const int64_t at = p.layer * p.kv.layout.num_kv_heads + row.kv_head;
    remembered_ = memory.rows + at;
    list_ = memory.lists + at * memory.capacity;
    interval_ = memory.interval;
  }

  // `header` as of MakeHeader.
  __device__ bool Serves(const SelectionHeader& header) const {
    if (remembered_ == nullptr || header.kind == SelectionHeader::Kind::kAll) return false;
    const int64_t position = row_.block.first_position;
    return !StartsAnew(position, remembered_->position) &&
           !IntervalIsOver(position - remembered_->ran_at, interval_);
  }

  // --- by all threads of a block ---

  // REQUIRES: Serves.
  __device__ void Recall(SelectionHeader header) const {
    header.count = static_cast<int32_t>(remembered_->count);
    header.made_at = remembered_->ran_at;
    header.reused_stages = 1;
    __syncthreads();  // no thread reads the memory any more
    Copy(list_, Out(), header.count);
    if (threadIdx.x != 0) return;
    p_.out.headers[row_.index] = header;
    remembered_->position = row_.block.first_position;
  }

  // What the block wrote to `out`.
  __device__ void Remember() const {
    if (remembered_ == nullptr) return;
    __syncthreads();  // it is written, and no thread reads the memory any more
    const SelectionHeader header = p_.out.headers[row_.index];
    const bool is_all = header.kind == SelectionHeader::Kind::kAll;
    if (!is_all) Copy(Out(), list_, header.count);
    if (threadIdx.x != 0) return;
    const int64_t position = is_all ? RememberedList::kNothing : row_.block.first_position;
    *remembered_ = {.position = position, .ran_at = position, .count = header.count};
  }

 private:
  __device__ SelectionEntry* Out() const { return p_.out.entries + row_.index * p_.out.capacity; }
  __device__ static void Copy(const SelectionEntry* from, SelectionEntry* to, int64_t count) {
    for (int64_t i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
  }

  const SelectLaunch& p_;
  const DeviceRow& row_;
  RememberedList* remembered_ = nullptr;
  SelectionEntry* list_ = nullptr;
  int64_t interval_ = 0;
};

}  // namespace kvasir::kernels
