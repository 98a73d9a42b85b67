#include "kernels/attention/prepared_pages.h"

#include <algorithm>

namespace kvasir::kernels {
namespace {

constexpr int64_t kWantedBytes = int64_t{512} << 20;
constexpr int64_t kMostBytes = int64_t{1} << 30;
// A page that is prepared is read and written once, which takes as long as what a few tiles save.
constexpr int64_t kLeastReads = 4;

int64_t PagesOf(int64_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

PreparedSequence* Find(PreparedPages& pages, int64_t slot) {
  PreparedSequence* const end = pages.sequences + pages.num_sequences;
  return std::find_if(pages.sequences, end,
                      [&](const PreparedSequence& sequence) { return sequence.slot == slot; });
}

}  // namespace

KvLayout PreparedLayout(const KvLayout& layout) {
  KvLayout prepared = layout;
  prepared.dtype = layout.element_dtype();
  return prepared;
}

int64_t PreparedBytes(const KvLayout& layout, int64_t max_tokens) {
  const int64_t of_head = PagesOf(max_tokens) * PreparedLayout(layout).page_bytes();
  return std::min(layout.num_kv_heads * of_head, std::clamp(of_head, kWantedBytes, kMostBytes));
}

std::optional<PreparedPages> PlanPreparedPages(std::span<const QueryTile> tiles,
                                               const KvLayout& layout, int64_t bytes) {
  PreparedPages plan;
  int64_t reads = 0;
  for (const QueryTile& tile : tiles) {
    PreparedSequence* const sequence = Find(plan, tile.slot);
    if (sequence == plan.sequences + plan.num_sequences) {
      if (plan.num_sequences == kMostPreparedSequences) return std::nullopt;
      *sequence = {.slot = static_cast<int32_t>(tile.slot)};
      ++plan.num_sequences;
    }
    const int64_t tokens = tile.first_position + tile.num_rows;
    reads += PagesOf(tokens);
    sequence->num_tokens = std::max(sequence->num_tokens, static_cast<int32_t>(tokens));
  }
  for (int32_t i = 0; i < plan.num_sequences; ++i) {
    plan.sequences[i].first_page = plan.num_pages;
    plan.num_pages += static_cast<int32_t>(PagesOf(plan.sequences[i].num_tokens));
  }
  if (reads == 0 || reads < kLeastReads * plan.num_pages) return std::nullopt;
  const int64_t fitting = bytes / (plan.num_pages * PreparedLayout(layout).page_bytes());
  if (fitting == 0) return std::nullopt;
  const int64_t heads = layout.num_kv_heads;
  const int64_t passes = (heads + fitting - 1) / fitting;
  plan.num_heads = static_cast<int32_t>((heads + passes - 1) / passes);
  return plan;
}

}  // namespace kvasir::kernels
