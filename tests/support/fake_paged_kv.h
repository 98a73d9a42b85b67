// A paged KV for tests of kernels, without the KV store: owns pages, tables, digests and the access
// record, and lets a test put any page into any tier. Hostile by default: all memory starts as NaN
// (so what lies behind the context is poison), rows are handed out in an order unlike that of
// blocks, and every page is an allocation of its own, so that AddressSanitizer sees what leaves it.
// Thread-compatible.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/base/buffer.h"
#include "kernels/base/dtype.h"
#include "kernels/base/status_macros.h"
#include "kernels/paged/paged_kv.h"
#include "kernels/paged/quantized_kv.h"

namespace kvasir::kernels {

class FakePagedKv {
 public:
  FakePagedKv(const KvLayout& layout, int64_t num_slots, int64_t max_blocks_per_slot)
      : layout_(layout),
        num_slots_(num_slots),
        max_blocks_(max_blocks_per_slot),
        block_extents_(static_cast<size_t>(num_slots * max_blocks_per_slot), -1) {
    const int64_t rows = num_slots * max_blocks_per_slot;
    const size_t pages = static_cast<size_t>(rows * layout.pages_per_block());
    memory_.resize(pages);
    bounds_memory_.resize(static_cast<size_t>(rows));
    key_codes_memory_.resize(static_cast<size_t>(rows));
    pages_.resize(pages);
    bounds_.resize(static_cast<size_t>(rows));
    key_codes_.resize(static_cast<size_t>(rows));
    last_touched_.resize(pages);
    missed_bytes_.resize(pages);
    next_row_ = static_cast<int32_t>(rows) - 1;
  }

  // Gives the slot blocks, in the device tier, until it can hold `tokens`.
  void Grow(int64_t slot, int64_t tokens) {
    for (int64_t block = 0; block * kPageTokens < tokens; ++block) {
      int32_t& row = block_extents_[static_cast<size_t>(slot * max_blocks_ + block)];
      if (row >= 0) continue;
      KVASIR_CHECK(block < max_blocks_ && next_row_ >= 0);
      row = next_row_--;
      bounds_memory_[static_cast<size_t>(row)] = Poisoned(layout_.block_bounds_bytes());
      bounds_[static_cast<size_t>(row)] = bounds_memory_[static_cast<size_t>(row)].data();
      key_codes_memory_[static_cast<size_t>(row)] = Poisoned(layout_.block_key_codes_bytes());
      key_codes_[static_cast<size_t>(row)] = key_codes_memory_[static_cast<size_t>(row)].data();
      for (int64_t i = 0; i < layout_.pages_per_block(); ++i) {
        const size_t page = static_cast<size_t>(row * layout_.pages_per_block() + i);
        memory_[page] = Poisoned(layout_.page_bytes());
        pages_[page] = PageRef(memory_[page].data(), PageTier::kDevice);
      }
    }
  }

  // Takes a block away from the slot.
  void Remove(int64_t slot, int64_t block) {
    block_extents_[static_cast<size_t>(slot * max_blocks_ + block)] = -1;
  }

  // Moves a page to other memory in `tier`; kAbsent keeps the bytes for a later return.
  void SetTier(int64_t slot, int64_t block, int64_t layer, int64_t head, PageTier tier) {
    const size_t page = PageIndex(slot, block, layer, head);
    HostBuffer moved = Poisoned(layout_.page_bytes());
    std::memcpy(moved.data(), memory_[page].data(), static_cast<size_t>(layout_.page_bytes()));
    memory_[page] = std::move(moved);
    pages_[page] = tier == PageTier::kAbsent ? PageRef() : PageRef(memory_[page].data(), tier);
  }

  // All pages become absent, and come from `on_disk`, which reads them by memory().
  void MoveTo(AbsentPages& on_disk) {
    std::fill(pages_.begin(), pages_.end(), PageRef());
    on_disk_ = &on_disk;
  }
  // The bytes of a page, by its index in the table, whatever its tier.
  const std::byte* memory(int64_t page) const { return memory_[static_cast<size_t>(page)].data(); }

  PagedKv View(uint32_t step = 1) {
    step_ = step;
    return {.layout = layout_,
            .block_extents = block_extents_.data(),
            .num_slots = num_slots_,
            .max_blocks_per_slot = max_blocks_,
            .pages = pages_.data(),
            .bounds = bounds_.data(),
            .key_codes = key_codes_.data(),
            .accesses = {.step = &step_,
                         .last_touched = last_touched_.data(),
                         .missed_bytes = missed_bytes_.data()},
            .on_disk = on_disk_};
  }

  enum class Side { kKey, kValue };
  // Where one token's key or value begins, whatever the page's tier. Get and Set are for its
  // elements where the KV is not quantized, and for bounds.
  std::byte* Token(Side side, int64_t slot, int64_t position, int64_t layer, int64_t head) {
    std::byte* page = memory_[PageIndex(slot, position / kPageTokens, layer, head)].data();
    return page + (side == Side::kValue ? layout_.v_offset() : 0) +
           position % kPageTokens * layout_.row_bytes();
  }
  float Get(const std::byte* token, int64_t i) const {
    if (layout_.dtype == DType::kFloat32) return reinterpret_cast<const float*>(token)[i];
    return static_cast<float>(reinterpret_cast<const BFloat16*>(token)[i]);
  }
  void Set(std::byte* token, int64_t i, float value) {
    if (layout_.dtype == DType::kFloat32) {
      reinterpret_cast<float*>(token)[i] = value;
    } else {
      reinterpret_cast<BFloat16*>(token)[i] = BFloat16(value);
    }
  }

  // Stores all elements of one token, and returns them as kernels see them, in any KV dtype.
  void SetToken(Side side, int64_t slot, int64_t position, int64_t layer, int64_t head,
                const std::vector<float>& elements) {
    std::byte* token = Token(side, slot, position, layer, head);
    if (IsQuantized(layout_.dtype)) {
      QuantizeToken(layout_.dtype, elements.data(), layout_.head_dim, token,
                    Scale(side, slot, position, layer, head));
      return;
    }
    for (size_t i = 0; i < elements.size(); ++i) Set(token, static_cast<int64_t>(i), elements[i]);
  }
  std::vector<float> Elements(Side side, int64_t slot, int64_t position, int64_t layer,
                              int64_t head) {
    const std::byte* token = Token(side, slot, position, layer, head);
    std::vector<float> elements(static_cast<size_t>(layout_.head_dim));
    if (IsQuantized(layout_.dtype)) {
      std::vector<BFloat16> decoded(elements.size());
      DequantizeToken(layout_, token, Scale(side, slot, position, layer, head), decoded.data());
      std::transform(decoded.begin(), decoded.end(), elements.begin(),
                     [](BFloat16 x) { return static_cast<float>(x); });
    } else {
      for (size_t i = 0; i < elements.size(); ++i)
        elements[i] = Get(token, static_cast<int64_t>(i));
    }
    return elements;
  }
  // The scale of one token of quantized KV.
  std::byte* Scale(Side side, int64_t slot, int64_t position, int64_t layer, int64_t head) {
    std::byte* page = memory_[PageIndex(slot, position / kPageTokens, layer, head)].data();
    return page + layout_.scales_offset() + (side == Side::kValue ? kPageTokens : 0) +
           position % kPageTokens;
  }

  uint32_t last_touched(int64_t slot, int64_t block, int64_t layer, int64_t head) const {
    return last_touched_[PageIndex(slot, block, layer, head)];
  }
  uint32_t missed_bytes(int64_t slot, int64_t block, int64_t layer, int64_t head) const {
    return missed_bytes_[PageIndex(slot, block, layer, head)];
  }
  const KvLayout& layout() const { return layout_; }

 private:
  static HostBuffer Poisoned(int64_t bytes) {
    HostBuffer buffer = HostBuffer::Allocate(bytes).value();
    std::memset(buffer.data(), 0xff, static_cast<size_t>(bytes));  // NaN in every float format
    return buffer;
  }
  size_t PageIndex(int64_t slot, int64_t block, int64_t layer, int64_t head) const {
    const int32_t row = block_extents_[static_cast<size_t>(slot * max_blocks_ + block)];
    KVASIR_CHECK(row >= 0);
    return static_cast<size_t>(row * layout_.pages_per_block() +
                               layout_.page_in_block(layer, head));
  }

  const KvLayout layout_;
  const int64_t num_slots_;
  const int64_t max_blocks_;
  int32_t next_row_ = 0;
  std::vector<int32_t> block_extents_;
  std::vector<HostBuffer> memory_;            // [rows * pages_per_block]
  std::vector<HostBuffer> bounds_memory_;     // [rows]
  std::vector<HostBuffer> key_codes_memory_;  // [rows]
  std::vector<PageRef> pages_;
  std::vector<std::byte*> bounds_;
  std::vector<std::byte*> key_codes_;
  std::vector<uint32_t> last_touched_;
  std::vector<uint32_t> missed_bytes_;
  uint32_t step_ = 1;  // of the last view
  AbsentPages* on_disk_ = nullptr;
};

}  // namespace kvasir::kernels
