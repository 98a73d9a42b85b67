// Rows whose listed pages have few attended tokens, by pattern.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "tests/kernels/attention/attend_cuda_fixture.h"
#include "tests/support/attention_batch.h"

namespace kvasir::kernels {

// Tokens of listed pages, by the number of the entry. From pages with few such tokens decode makes
// tiles that several pages share.
struct Pattern {
  const char* name;
  uint64_t (*mask)(int64_t entry);
};
inline constexpr Pattern kPatterns[] = {
    {"one token", [](int64_t i) { return uint64_t{1} << (i * 23 % 64); }},
    {"first or last token", [](int64_t i) { return uint64_t{1} << (i % 2 * 63); }},
    {"every other token", [](int64_t i) { return uint64_t{0x5555555555555555} << i % 2; }},
    {"aligned groups of 8", [](int64_t i) { return uint64_t{0xff} << (i * 5 % 8 * 8); }},
    {"groups of 8 anywhere", [](int64_t i) { return uint64_t{0xff} << (i * 13 % 57); }},
    {"half a page, and a token more", [](int64_t i) { return (uint64_t{1} << (32 + i % 2)) - 1; }},
    {"13 tokens: tiles end amid a page", [](int64_t i) { return uint64_t{0x1fff} << (i % 50); }},
    {"whole pages among single tokens",
     [](int64_t i) { return i % 3 == 0 ? kWholePage : uint64_t{1} << i % 64; }},
    {"nothing among groups of 8",
     [](int64_t i) { return i % 2 == 0 ? 0 : uint64_t{0xff} << (i % 8 * 8); }},
};

// A batch with so many KV heads that units are several tiles, with the rows of a pattern.
inline constexpr int64_t kPatternTokens = 3200;
inline AttentionBatch MakePatternBatch(AttentionShape shape, int64_t slots, uint64_t seed) {
  shape.kv_heads = 16;
  AttentionBatch batch(shape, slots, kPatternTokens, seed);
  for (int64_t slot = 0; slot < slots; ++slot) batch.FillContext(slot, kPatternTokens);
  return batch;
}
inline RowSelection PatternList(const Pattern& pattern, int64_t head) {
  std::vector<SelectionEntry> entries;
  for (int64_t page = 2; page < 45; ++page) {
    const uint64_t mask = pattern.mask(page - 2 + head);
    entries.push_back({.page = page, .chosen = mask | mask << 1, .live = mask});
  }
  return SelectList(128, 2880, std::move(entries));
}
inline void AddPattern(AttentionBatch& batch, int64_t slot, const Pattern& pattern) {
  batch.AddBlock(slot, kPatternTokens - 1, 1,
                 [&](int64_t head) { return PatternList(pattern, head); });
}

}  // namespace kvasir::kernels
