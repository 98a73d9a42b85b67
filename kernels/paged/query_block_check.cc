#include "kernels/paged/query_block_check.h"

#include "absl/strings/str_cat.h"

namespace kvasir::kernels {
namespace {

absl::string_view Problem(const QueryBlock& block, int64_t num_tokens, const PagedKv& kv) {
  if (block.num_rows < 1 || block.num_rows > kPageTokens) return "num_rows is not in 1..64";
  if (block.first_row < 0 || block.first_row > num_tokens - block.num_rows) {
    return "its rows are outside the batch";
  }
  if (block.slot < 0 || block.slot >= kv.num_slots) return "there is no such slot";
  if (block.first_position < 0) return "first_position is negative";
  if (block.first_position % kPageTokens + block.num_rows > kPageTokens) {
    return "its positions cross a multiple of 64; cut it there";
  }
  if (block.first_position / kPageTokens >= kv.max_blocks_per_slot) {
    return "its positions are behind the end of the slot's block table";
  }
  return "";
}

}  // namespace

absl::Status CheckQueryBlocks(absl::string_view op, std::span<const QueryBlock> blocks,
                              int64_t num_tokens, const PagedKv& kv) {
  for (size_t i = 0; i < blocks.size(); ++i) {
    const QueryBlock& block = blocks[i];
    const absl::string_view problem = Problem(block, num_tokens, kv);
    if (problem.empty()) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        op, ": query block ", i, " (slot ", block.slot, " of ", kv.num_slots, ", rows ",
        block.first_row, " + ", block.num_rows, " of ", num_tokens, ", position ",
        block.first_position, " of ", kv.max_blocks_per_slot * kPageTokens, "): ", problem));
  }
  return absl::OkStatus();
}

}  // namespace kvasir::kernels
