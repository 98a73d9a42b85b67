// Prepared pages: a copy of whole sequences' pages in the form that products read, elements of
// bfloat16 with rotated keys. Where the KV is quantized or keys are cached un-rotated, a prompt's
// query tiles would decode and rotate every page again, each for itself; prepared, a page is done
// once for all of them. For rows that attend to everything. This header says which sequences of a
// call are prepared and where their pages lie in the copy. Needs no GPU. Used by attend_cuda.h.
//
//   memory   [pages of all sequences][heads of a pass]: K[64][d], V[64][d]
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "kernels/base/host_device.h"
#include "kernels/paged/paged_kv.h"

namespace kvasir::kernels {

inline constexpr int kMostPreparedSequences = 16;

struct PreparedSequence {
  int32_t slot = 0;
  int32_t first_page = 0;  // its page 0, in the copy
  int32_t num_tokens = 0;
};

// Pages of some KV heads, which are attended to before the memory is used for others.
struct PreparedPages {
  PreparedSequence sequences[kMostPreparedSequences];
  int32_t num_sequences = 0;
  int32_t num_pages = 0;  // of all sequences
  int32_t first_head = 0;
  int32_t num_heads = 0;

  // Returns the place of page 0 of a slot's sequence; that of page i is i further on.
  KVASIR_HOST_DEVICE int32_t FirstPage(int64_t slot) const {
    int32_t first = 0;
    for (int32_t i = 0; i < num_sequences; ++i) {
      if (sequences[i].slot == slot) first = sequences[i].first_page;
    }
    return first;
  }
  // Returns the number of pages before that one in the memory. `head` is one of the KV's.
  KVASIR_HOST_DEVICE int64_t Place(int64_t page, int64_t head) const {
    return page * num_heads + head - first_head;
  }
};

// The layout of the copy.
KvLayout PreparedLayout(const KvLayout& layout);

// Returns the bytes of memory that serve sequences of up to `max_tokens` tokens: all KV heads at
// once where they fit into 512 MiB, else fewer. Beyond 1 GiB for one head the longest sequences
// are left out.
int64_t PreparedBytes(const KvLayout& layout, int64_t max_tokens);

// Plans to prepare the pages of all tiles' sequences. None where that costs more than it saves,
// because few tiles read them, or where the sequences are too many or too long for `bytes` of
// memory. The first pass of heads is returned; the others have as many, or fewer in the last.
std::optional<PreparedPages> PlanPreparedPages(std::span<const QueryTile> tiles,
                                               const KvLayout& layout, int64_t bytes);

}  // namespace kvasir::kernels
