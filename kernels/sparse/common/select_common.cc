#include "kernels/sparse/common/select_common.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/paged/query_tile_check.h"

namespace kvasir::kernels {

absl::StatusOr<Scope> ScopeNamed(absl::string_view selector, absl::string_view name) {
  if (name == "group") return Scope::kKvGroup;
  if (name == "layer") return Scope::kLayer;
  return absl::InvalidArgumentError(
      absl::StrCat(selector, ": scope '", name, "' is unknown; there are group, layer"));
}

absl::Status CheckSelect(absl::string_view selector, const SelectParams& p,
                         const PageSelection& out) {
  const KvLayout& layout = p.kv.layout;
  ShapeCheck check(selector);
  check.Match("q", p.q, {"tokens", "heads", layout.head_dim})
      .Require(p.q.dtype() == DType::kFloat32 || p.q.dtype() == DType::kBFloat16,
               "q must be float32 or bfloat16")
      .Require(p.layer >= 0 && p.layer < layout.num_layers, "no such layer")
      .Require(p.numbers.size() == p.tiles.size(), "numbers must be one per query tile")
      .Require(out.num_rows == static_cast<int64_t>(p.tiles.size()) * layout.num_kv_heads,
               "the selection's num_rows must be blocks x KV heads")
      .Require(static_cast<int64_t>(p.faults.size()) == p.kv.num_slots,
               "faults must be [num_slots]")
      .Require(p.memories.empty() || static_cast<int64_t>(p.memories.size()) == out.num_rows,
               "memories must be one per row of the selection")
      .Require(p.wanted.empty() || static_cast<int64_t>(p.wanted.size()) == out.num_rows,
               "wanted must be one per row of the selection")
      .Require(p.scratch != nullptr, "scratch is missing; pass the calling thread's Scratch")
      .Require(p.rope == nullptr || p.rope->head_dim() == layout.head_dim,
               "rope must be of the KV's head_dim");
  KVASIR_RETURN_IF_ERROR(check.status());
  check.Require(layout.num_kv_heads > 0 && check.dim("heads") % layout.num_kv_heads == 0,
                "the query heads must be a multiple of the KV heads");
  KVASIR_RETURN_IF_ERROR(check.status());
  KVASIR_RETURN_IF_ERROR(CheckQueryTiles(selector, p.tiles, check.dim("tokens"), p.kv));
  for (const PolicyNumbers& n : p.numbers) {
    const bool reaches =
        n.reach_tokens >= 0 && n.reach_tokens < std::min(n.window_tokens, kPageTokens);
    if (n.sink_tokens >= 0 && n.window_tokens >= 1 && n.budget_tokens >= 0 && reaches) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        selector, ": sink ", n.sink_tokens, ", window ", n.window_tokens, ", budget ",
        n.budget_tokens, ", reach ", n.reach_tokens,
        "; need sink >= 0, window >= 1 (the query's own token), budget >= 0, and a reach of 0 to ",
        kPageTokens - 1, " tokens that is less than the window"));
  }
  return absl::OkStatus();
}

absl::Status CheckCapacity(absl::string_view name, const Selector& selector, const SelectParams& p,
                           const PageSelection& out) {
  for (size_t i = 0; i < p.tiles.size(); ++i) {
    const int64_t context = p.tiles[i].first_position + p.tiles[i].num_rows;
    const int64_t needed = selector.MaxEntries(p.numbers[i], context);
    if (needed <= out.capacity) continue;
    return absl::InvalidArgumentError(absl::StrCat(name, ": query tile ", i, " may choose ", needed,
                                                   " pages, a row of the selection holds ",
                                                   out.capacity));
  }
  return absl::OkStatus();
}

void ReserveDistances(const SelectParams& p, Executor& executor) {
  if (p.rope == nullptr) return;
  int64_t longest = 0;
  for (size_t i = 0; i < p.tiles.size(); ++i) {
    if (MakeHeader(p.tiles[i], p.numbers[i]).kind == SelectionHeader::Kind::kAll) continue;
    longest = std::max(longest, SelectionDistance(p.numbers[i], p.tiles[i].num_rows - 1));
  }
  p.rope->Reserve(longest + 1, executor);
}

void ListWriter::Add(int64_t begin, int64_t end, float score) {
  while (begin < end) {
    const int64_t page = begin / kPageTokens;
    const bool opens = header_.count == 0 || list_[header_.count - 1].page != page;
    if (opens) list_[header_.count++] = {.page = page, .score = score};
    SelectionEntry& entry = list_[header_.count - 1];
    entry.chosen |= TokenMask(begin - page * kPageTokens, end - page * kPageTokens);
    entry.live = entry.chosen;
    entry.score = std::max(entry.score, score);
    begin = (page + 1) * kPageTokens;
  }
}

void ShareWithinBlock(const PageSelection& block_extents) {
  const SelectionHeader& header = block_extents.header(0);
  for (int64_t row = 1; row < block_extents.num_rows; ++row) {
    block_extents.header(row) = header;
    std::copy_n(block_extents.list(0), header.count, block_extents.list(row));
  }
}

Termination MakeTermination(const Terminator* terminator, const QueryTile& tile,
                            const PolicyNumbers& numbers) {
  const SelectionHeader header = MakeHeader(tile, numbers);
  if (terminator == nullptr || header.kind == SelectionHeader::Kind::kAll) return {};
  return {.terminator = terminator,
          .patience = numbers.patience,
          .sink_end = header.sink_end,
          .window_begin = header.window_begin};
}

}  // namespace kvasir::kernels
