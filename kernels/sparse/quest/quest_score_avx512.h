// The shared body of the AVX-512 score functions: the products of avx512_tile.h with A = signed
// queries, B = bounds transposed, columns are pages. For quest_score_avx512.cc and
// quest_score_avx512_bf16.cc only; everything has internal linkage (see avx512_tile.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <immintrin.h>

#include "kernels/base/avx512_tile.h"
#include "kernels/sparse/quest/quest_score.h"

namespace kvasir::kernels {
namespace {

static_assert(kQuestScorePages == kColumns);

// Calls store(unit, page, vector) with the transposed bounds: `vector` holds four bytes of each of
// the pages [page, page + 16); missing pages are zero.
template <typename Store>
inline void TransposeBounds(const std::byte* const* bounds, int64_t bounds_bytes,
                            const Store& store) {
  for (int64_t page = 0; page < kQuestScorePages; page += kVectorLanes) {
    for (int64_t offset = 0; offset < bounds_bytes; offset += 64) {
      __m512i rows[16];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kVectorLanes; ++i) {
        const std::byte* from = bounds[page + i];
        rows[i] = from != nullptr ? _mm512_loadu_si512(from + offset) : _mm512_setzero_si512();
      }
      Transpose16(rows);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kVectorLanes; ++i) store(offset / 4 + i, page, rows[i]);
    }
  }
}

// Raises `best` to the scores of kRows queries.
template <typename Unit, int kRows>
inline void RaiseTo(const std::byte* signed_q, const std::byte* tile, int64_t units,
                    __m512 best[kColumnVectors]) {
  Accumulators<kRows> c;
  ClearAccumulators<kRows>(c);
  const auto load = [&](int64_t u, __m512i* line) { LoadColumns(tile + u * kColumns * 4, line); };
  Multiply<Unit, kRows>(signed_q, units * 4, units, load, c);
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kColumnVectors; ++j) best[j] = _mm512_max_ps(c[r][j], best[j]);
  }
}

// `tile` holds the transposed bounds as units of 64 pages.
template <typename Unit>
void ScoreTile(const QuestScoreParams& p, const std::byte* tile, const std::byte* const* bounds,
               float* scores) {
  const __m512 none = _mm512_set1_ps(-__builtin_inff());
  __m512 best[kColumnVectors] = {none, none, none, none};
  const int64_t units = 2 * p.head_dim / Unit::kElements;
  const auto* q = static_cast<const std::byte*>(p.signed_q);
  int64_t query = 0;
  for (; query + 4 <= p.num_queries; query += 4) {
    RaiseTo<Unit, 4>(q + query * units * 4, tile, units, best);
  }
  for (; query < p.num_queries; ++query) {
    RaiseTo<Unit, 1>(q + query * units * 4, tile, units, best);
  }
  for (int j = 0; j < kColumnVectors; ++j) _mm512_storeu_ps(scores + j * kVectorLanes, best[j]);
  for (int64_t i = 0; i < kQuestScorePages; ++i) {
    if (bounds[i] == nullptr) scores[i] = -__builtin_inff();
  }
}

}  // namespace
}  // namespace kvasir::kernels
