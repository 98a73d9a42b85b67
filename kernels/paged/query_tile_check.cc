#include "kernels/paged/query_tile_check.h"

#include "absl/strings/str_cat.h"

namespace kvasir::kernels {
namespace {

absl::string_view Problem(const QueryTile& tile, int64_t num_tokens, const PagedKv& kv) {
  if (tile.num_rows < 1 || tile.num_rows > kPageTokens) return "num_rows is not in 1..64";
  if (tile.first_row < 0 || tile.first_row > num_tokens - tile.num_rows) {
    return "its rows are outside the batch";
  }
  if (tile.slot < 0 || tile.slot >= kv.num_slots) return "there is no such slot";
  if (tile.first_position < 0) return "first_position is negative";
  if (tile.first_position % kPageTokens + tile.num_rows > kPageTokens) {
    return "its positions cross a multiple of 64; cut it there";
  }
  if (tile.first_position / kPageTokens >= kv.max_blocks_per_slot) {
    return "its positions are behind the end of the slot's block table";
  }
  return "";
}

}  // namespace

absl::Status CheckQueryTiles(absl::string_view op, std::span<const QueryTile> tiles,
                             int64_t num_tokens, const PagedKv& kv) {
  for (size_t i = 0; i < tiles.size(); ++i) {
    const QueryTile& tile = tiles[i];
    const absl::string_view problem = Problem(tile, num_tokens, kv);
    if (problem.empty()) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        op, ": query tile ", i, " (slot ", tile.slot, " of ", kv.num_slots, ", rows ",
        tile.first_row, " + ", tile.num_rows, " of ", num_tokens, ", position ",
        tile.first_position, " of ", kv.max_blocks_per_slot * kPageTokens, "): ", problem));
  }
  return absl::OkStatus();
}

}  // namespace kvasir::kernels
