// The one place that knows where a byte of K or V lies. Kernels ask PagedKv for the page of (slot,
// block, layer, head) and get its address and tier. Who filled the page and when it moves is the KV
// store's business. PagedKv is a view of tables that the store owns and keeps unchanged from
// BeginStep to EndStep. Thread-safe: it only reads, except for the access record, whose entries are
// written with relaxed atomics.
//
//   slot --block_extents--> extent |--pages--> page of (layer, head): K[64][d], V[64][d],
//                                  |           contiguous; quantized: then scales of K[64], V[64]
//                                  |--bounds--> min and max of K per page (Quest's digest)
//                                  \--key_codes--> K in 4 bits (Twilight's digest), where a policy
//                                                  needs it
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/base/host_device.h"
#include "kernels/base/status_macros.h"
#include "kernels/paged/absent_pages.h"

namespace kvasir::kernels {

// Tokens of a page and of a block: block i of a sequence holds positions [64 i, 64 i + 64).
inline constexpr int64_t kPageTokens = 64;

// Shape of the KV of one rank. A block holds pages_per_block() pages, ordered by layer, then head.
// Keys and values are stored in `dtype`. Kernels compute with elements of element_dtype(), which is
// another one where the KV is quantized (quantized_kv.h).
struct KvLayout {
  int64_t num_layers = 0;
  int64_t num_kv_heads = 0;  // of this rank
  int64_t head_dim = 0;
  DType dtype = DType::kBFloat16;

  // A key as stored, without its scale.
  KVASIR_HOST_DEVICE int64_t row_bytes() const {
    return head_dim * static_cast<int64_t>(DTypeSize(dtype));
  }
  KVASIR_HOST_DEVICE DType element_dtype() const {
    return IsQuantized(dtype) ? DType::kBFloat16 : dtype;
  }
  KVASIR_HOST_DEVICE int64_t element_row_bytes() const {
    return head_dim * static_cast<int64_t>(DTypeSize(element_dtype()));
  }
  // A key and a value, with their scales.
  KVASIR_HOST_DEVICE int64_t token_bytes() const {
    return 2 * (row_bytes() + (IsQuantized(dtype) ? 1 : 0));
  }
  KVASIR_HOST_DEVICE int64_t page_bytes() const { return kPageTokens * token_bytes(); }
  KVASIR_HOST_DEVICE int64_t pages_per_block() const { return num_layers * num_kv_heads; }
  KVASIR_HOST_DEVICE int64_t page_in_block(int64_t layer, int64_t head) const {
    return layer * num_kv_heads + head;
  }
  int64_t block_bytes() const { return pages_per_block() * page_bytes(); }
  // Offset of V inside a page.
  KVASIR_HOST_DEVICE int64_t v_offset() const { return kPageTokens * row_bytes(); }
  // Offset of the scales of K, then V, inside a page of quantized KV: a byte a token.
  KVASIR_HOST_DEVICE int64_t scales_offset() const { return 2 * v_offset(); }
  // Bounds of a page are min[d] then max[d], in the element dtype. A block has pages_per_block() of
  // them.
  KVASIR_HOST_DEVICE int64_t page_bounds_bytes() const { return 2 * element_row_bytes(); }
  int64_t block_bounds_bytes() const { return pages_per_block() * page_bounds_bytes(); }
  // Key codes (key_codes.h) of a page: for each token, words of eight codes, a scale and a zero.
  KVASIR_HOST_DEVICE int64_t key_code_words() const { return (head_dim + 7) / 8; }
  KVASIR_HOST_DEVICE int64_t page_key_codes_bytes() const {
    return kPageTokens * (4 * key_code_words() + 2 * 2);
  }
  int64_t block_key_codes_bytes() const { return pages_per_block() * page_key_codes_bytes(); }
};

enum class PageTier : uint8_t { kAbsent = 0, kDevice = 1, kHost = 2 };

// Address and tier of a page in one word, as in the device table. Pages are 64-byte aligned, so the
// low bits carry the tier.
class PageRef {
 public:
  PageRef() = default;
  PageRef(std::byte* page, PageTier tier)
      : bits_(reinterpret_cast<uint64_t>(page) | static_cast<uint64_t>(tier)) {
    KVASIR_CHECK((reinterpret_cast<uint64_t>(page) & kTierMask) == 0);
  }
  // For kernels, which cannot check. REQUIRES: `page` is a multiple of 64 bytes.
  KVASIR_HOST_DEVICE static PageRef OfAligned(std::byte* page, PageTier tier) {
    PageRef ref;
    ref.bits_ = reinterpret_cast<uint64_t>(page) | static_cast<uint64_t>(tier);
    return ref;
  }
  KVASIR_HOST_DEVICE PageTier tier() const { return static_cast<PageTier>(bits_ & kTierMask); }
  KVASIR_HOST_DEVICE std::byte* page() const {
    return reinterpret_cast<std::byte*>(bits_ & ~kTierMask);
  }

 private:
  static constexpr uint64_t kTierMask = 63;
  uint64_t bits_ = 0;
};

// Stands for the step of a page that was never read. No step has this number.
inline constexpr uint32_t kNeverTouched = 0xffffffff;

// Written by kernels as they read, one entry a page: [num_extents * pages_per_block]. Null where
// nothing is recorded: a measurement reads pages without counting as a use of them.
struct AccessRecord {
  const uint32_t* step = nullptr;    // number of the step that kernels run in
  uint32_t* last_touched = nullptr;  // step of the last read
  uint32_t* missed_bytes = nullptr;  // bytes read from the host tier since the last collection
};

struct PagedKv {
  KvLayout layout;
  const int32_t* block_extents = nullptr;  // [num_slots, max_blocks_per_slot], -1 = no block
  int64_t num_slots = 0;
  int64_t max_blocks_per_slot = 0;
  int64_t num_extents = 0;             // in the tables below
  const PageRef* pages = nullptr;      // [num_extents, pages_per_block]
  std::byte* const* bounds = nullptr;  // [num_extents] -> [pages_per_block][2][head_dim]
  // [num_extents] -> [pages_per_block] key codes of a page (key_codes.h). Null when they are not
  // kept.
  std::byte* const* key_codes = nullptr;
  AccessRecord accesses;
  // Pages on disk, for kernels on the CPU. Null: an absent page cannot be read.
  AbsentPages* on_disk = nullptr;

  KVASIR_HOST_DEVICE int64_t extent(int64_t slot, int64_t block) const {
    return block_extents[slot * max_blocks_per_slot + block];
  }
  // Resolves without recording, for writers and tests. Absent when the slot has no such block.
  KVASIR_HOST_DEVICE PageRef Peek(int64_t slot, int64_t block, int64_t layer, int64_t head) const {
    if (extent(slot, block) < 0) return PageRef();
    return pages[PageIndex(slot, block, layer, head)];
  }
  // Resolves for attention to `bytes` of the page, which is brought from disk if it lies there.
  // Records the access, and the miss when the page is read in place from the host tier. Absent when
  // the slot has no such block, or its page cannot be read.
  PageRef Read(int64_t slot, int64_t block, int64_t layer, int64_t head, int64_t bytes) const {
    if (extent(slot, block) < 0) return PageRef();
    const int64_t index = PageIndex(slot, block, layer, head);
    const PageRef ref = pages[index];
    if (accesses.last_touched != nullptr) {
      std::atomic_ref<uint32_t>(accesses.last_touched[index])
          .store(*accesses.step, std::memory_order_relaxed);
      if (ref.tier() == PageTier::kHost) {
        std::atomic_ref<uint32_t>(accesses.missed_bytes[index])
            .fetch_add(static_cast<uint32_t>(bytes), std::memory_order_relaxed);
      }
    }
    return ref.tier() == PageTier::kAbsent ? Bring(slot, index, PageUse::kAttend) : ref;
  }
  // Resolves for a selector that reads keys, without recording. Otherwise as Read.
  PageRef Find(int64_t slot, int64_t block, int64_t layer, int64_t head) const {
    const PageRef ref = Peek(slot, block, layer, head);
    if (ref.tier() != PageTier::kAbsent || extent(slot, block) < 0) return ref;
    return Bring(slot, PageIndex(slot, block, layer, head), PageUse::kSelect);
  }
  // Returns min[head_dim] then max[head_dim] of the keys of a page, in the element dtype.
  KVASIR_HOST_DEVICE std::byte* Bounds(int64_t slot, int64_t block, int64_t layer,
                                       int64_t head) const {
    return bounds[extent(slot, block)] +
           layout.page_in_block(layer, head) * layout.page_bounds_bytes();
  }
  // REQUIRES: key_codes are kept.
  KVASIR_HOST_DEVICE std::byte* KeyCodes(int64_t slot, int64_t block, int64_t layer,
                                         int64_t head) const {
    return key_codes[extent(slot, block)] +
           layout.page_in_block(layer, head) * layout.page_key_codes_bytes();
  }
  // Returns the page's index in `pages`. REQUIRES: the slot has the block.
  KVASIR_HOST_DEVICE int64_t PageIndex(int64_t slot, int64_t block, int64_t layer,
                                       int64_t head) const {
    return extent(slot, block) * layout.pages_per_block() + layout.page_in_block(layer, head);
  }

 private:
  PageRef Bring(int64_t slot, int64_t index, PageUse use) const {
    if (on_disk == nullptr) return PageRef();
    std::byte* const page = on_disk->Bring(slot, index, use);
    return page == nullptr ? PageRef() : PageRef(page, PageTier::kHost);
  }
};

// Consecutive queries of one sequence that share a selection: one token in decode and in a prompt's
// tail, up to 64 in prefill, all inside one block of positions [64 i, 64 i + 64).
struct QueryTile {
  int64_t slot = 0;
  int64_t first_row = 0;       // row of the first query in the batch's q and out tensors
  int64_t num_rows = 0;        // 1..64
  int64_t first_position = 0;  // position of the first query; query r is at first_position + r
};

}  // namespace kvasir::kernels
