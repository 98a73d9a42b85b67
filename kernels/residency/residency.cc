#include "kernels/residency/residency.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"

#include "kernels/base/scratch.h"

namespace kvasir::kernels {

absl::Status CheckResidencyShape(const ResidencyShape& s) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - kChunkPages;
  const bool positive = s.num_extents > 0 && s.pages_per_extent > 0 && s.page_bytes > 0 &&
                        s.max_fills > 0 && s.max_examined > 0;
  if (!positive || s.num_lean < 0 || s.num_blocks() > kMost / s.pages_per_extent ||
      s.num_slots > kMost || s.num_slots < 2 * s.pages_per_extent ||
      s.max_fills > s.num_slots / 2) {
    return absl::InvalidArgumentError(absl::StrCat(
        "residency: ", s.num_extents, " extents and ", s.num_lean, " lean blocks of ",
        s.pages_per_extent, " pages over ", s.num_slots, " slots, ", s.max_fills, " fills and ",
        s.max_examined, " slots examined a step: all must be positive, pages and slots at most ",
        kMost, ", slots for at least two extents and two steps' fills"));
  }
  if (s.page_bytes % 64 != 0) {
    return absl::InvalidArgumentError(absl::StrCat("residency: pages of ", s.page_bytes,
                                                   " bytes; they must be a multiple of 64"));
  }
  return absl::OkStatus();
}

ResidencyState LayOutResidency(const ResidencyShape& shape, std::byte* memory) {
  ScratchPieces pieces(memory);
  ResidencyState state = {.shape = shape};
  state.counters = pieces.Take<ResidencyCounters>(1);
  state.pages = pieces.Take<PageRef>(shape.num_pages());
  state.last_touched = pieces.Take<uint32_t>(shape.num_pages());
  state.missed_bytes = pieces.Take<uint32_t>(shape.num_pages());
  state.slot_pages = pieces.Take<int32_t>(shape.num_slots);
  state.slot_states = pieces.Take<SlotState>(shape.num_slots);
  state.slot_seen = pieces.Take<uint32_t>(shape.num_slots);
  state.free_bits = pieces.Take<uint32_t>(shape.num_free_words());
  state.fills = pieces.Take<PageFill>(shape.num_slots);
  state.taken = pieces.Take<int32_t>(shape.num_slots);
  state.candidates = pieces.Take<int32_t>(shape.num_slots);
  state.candidate_bits = pieces.Take<uint32_t>(shape.num_chunks() * kChunkWords);
  state.chunk_counts = pieces.Take<int32_t>(shape.num_chunks());
  if (const int64_t lean = shape.num_pages() - shape.first_lean_page(); lean > 0) {
    state.bring = pieces.Take<BringState>(1);
    state.needed_in = pieces.Take<uint32_t>(lean);
    state.absent = pieces.Take<AskedPage>(lean);
  }
  state.bytes = pieces.bytes();
  return state;
}

}  // namespace kvasir::kernels
