#include "kernels/sparse/key_logits/code_logits.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/append/key_code_math.h"

namespace kvasir::kernels {
namespace {

constexpr float kMaxQueryCode = 127;
constexpr int64_t kCacheLine = 64;

// 0 where the quotient is NaN: the element is NaN, or all elements are 0, or one is infinite.
int32_t CodeOf(float element, float step) {
  const float code = std::rint(element / step);
  return std::abs(code) <= kMaxQueryCode ? static_cast<int32_t>(code) : 0;
}

}  // namespace

CodeLogits::Memory::Memory(ScratchPieces& pieces, const SelectParams& p) {
  const int64_t group = p.q.dim(1) / p.kv.layout.num_kv_heads;
  const int64_t words = p.kv.layout.key_code_words();
  quads = pieces.Take<uint32_t>(group * 2 * words);
  steps = pieces.Take<float>(group);
  code_sums = pieces.Take<int32_t>(group);
  sums = pieces.Take<float>(group);
  transposed = pieces.Take<uint32_t>(words * kTileKeys);
}

CodeLogits::CodeLogits(const SelectRow& row, const float* queries, const Memory& memory)
    : row_(row),
      functions_(ChosenKeyTile()),
      transposed_(memory.transposed),
      queries_{.quads = memory.quads,
               .steps = memory.steps,
               .code_sums = memory.code_sums,
               .sums = memory.sums,
               .count = row.group,
               .num_words = row.p.kv.layout.key_code_words()} {
  for (int64_t g = 0; g < row.group; ++g) {
    CodeQuery(g, queries + g * row.p.kv.layout.head_dim, memory);
  }
}

void CodeLogits::CodeQuery(int64_t g, const float* query, const Memory& memory) {
  const int64_t d = row_.p.kv.layout.head_dim;
  float largest = 0;
  for (int64_t i = 0; i < d; ++i)
    largest = std::max(largest, std::abs(query[i]));  // leaves out NaN
  const float step = largest / kMaxQueryCode;
  uint32_t* const quads = memory.quads + g * 2 * queries_.num_words;
  std::fill_n(quads, 2 * queries_.num_words, 0u);
  int32_t code_sum = 0;
  for (int64_t i = 0; i < d; ++i) {
    const int32_t code = CodeOf(query[i], step);
    code_sum += code;
    const int64_t nibble = Nibble(i);
    quads[i / kWordCodes * 2 + nibble % 2] |= (static_cast<uint32_t>(code) & 255)
                                              << (8 * (nibble / 2));
  }
  memory.steps[g] = step;
  memory.code_sums[g] = code_sum;
  memory.sums[g] = std::accumulate(query, query + d, 0.0f);
}

void CodeLogits::Logits(int64_t page, float* logits) const {
  const PagedKv& kv = row_.p.kv;
  const TokenCodes codes(kv.layout, kv.KeyCodes(row_.tile.slot, page, row_.p.layer, row_.kv_head),
                         0);
  functions_.page_logits(
      {.words = codes.words, .scales = &codes.scale->bits, .zeros = &codes.zero->bits}, queries_,
      transposed_, logits);
}

void CodeLogits::Prefetch(int64_t page) const {
  if (!Has(page)) return;
  const PagedKv& kv = row_.p.kv;
  const std::byte* codes = kv.KeyCodes(row_.tile.slot, page, row_.p.layer, row_.kv_head);
  for (int64_t at = 0; at < kv.layout.page_key_codes_bytes(); at += kCacheLine) {
    __builtin_prefetch(codes + at);
  }
}

}  // namespace kvasir::kernels
