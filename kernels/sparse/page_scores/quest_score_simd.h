// The score functions of quest_score.h over vectors, written once for all widths: the products of
// simd_units.h with A = signed queries, B = transposed bounds, and pages as columns. Only for
// quest_score_*.cc, which include their simd_*.h first. Everything has internal linkage.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/simd/simd_units.h"
#include "kernels/sparse/page_scores/quest_score.h"

namespace kvasir::kernels {
namespace {

// A page's bounds are whole vectors.
static_assert(2 * kQuestScoreHeadDimStep * 2 % kVectorBytes == 0);

constexpr int64_t kPageRowBytes = kQuestScorePages * 4;

// Calls store(unit, page, vector) with the transposed bounds: `vector` holds four bytes of each of
// the pages [page, page + kSimdWidth); missing pages are zero.
template <typename StoreUnit>
inline void TransposeBounds(const std::byte* const* bounds, int64_t bounds_bytes,
                            const StoreUnit& store) {
  for (int64_t page = 0; page < kQuestScorePages; page += kSimdWidth) {
    for (int64_t offset = 0; offset < bounds_bytes; offset += kVectorBytes) {
      Vec rows[static_cast<size_t>(kSimdWidth)];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kSimdWidth; ++i) {
        const std::byte* from = bounds[page + i];
        rows[i] = from != nullptr ? LoadUnits(from + offset) : Broadcast(0);
      }
      TransposeVectors(rows);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kSimdWidth; ++i) store(offset / 4 + i, page, rows[i]);
    }
  }
}

inline std::byte* PlaceOf(const QuestScoreParams& p, int64_t unit, int64_t page) {
  return p.workspace + unit * kPageRowBytes + page * 4;
}

// Raises scores[kQuestScorePages] to the scores of kRows queries.
template <typename Unit, int kRows>
inline void RaiseTo(const QuestScoreParams& p, int64_t query, float* scores) {
  const int64_t units = 2 * p.head_dim / Unit::kElements;
  const std::byte* q = static_cast<const std::byte*>(p.signed_q) + query * units * 4;
  for (int64_t page = 0; page < kQuestScorePages; page += kProductVectors * kSimdWidth) {
    Sums<kRows, kProductVectors> c;
    Clear<kRows, kProductVectors>(c);
    const auto load = [&](int64_t u, Vec* line) {
#pragma GCC unroll 4
      for (int j = 0; j < kProductVectors; ++j) {
        line[j] = LoadUnits(PlaceOf(p, u, page + j * kSimdWidth));
      }
    };
    AddProduct<Unit, kRows, kProductVectors>(q, units * 4, units, load, c);
#pragma GCC unroll 4
    for (int j = 0; j < kProductVectors; ++j) {
      float* const best = scores + page + j * kSimdWidth;
      Vec largest = Load(best);
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) largest = LargerOrSecond(c[r][j], largest);
      Store(best, largest);
    }
  }
}

// The workspace holds the transposed bounds as units of kQuestScorePages pages.
template <typename Unit>
void ScoreTile(const QuestScoreParams& p, const std::byte* const* bounds, float* scores) {
  for (int64_t i = 0; i < kQuestScorePages; ++i) scores[i] = -__builtin_inff();
  int64_t query = 0;
  for (; query + 4 <= p.num_queries; query += 4) RaiseTo<Unit, 4>(p, query, scores);
  for (; query < p.num_queries; ++query) RaiseTo<Unit, 1>(p, query, scores);
  for (int64_t i = 0; i < kQuestScorePages; ++i) {
    if (bounds[i] == nullptr) scores[i] = -__builtin_inff();
  }
}

inline void ScoresOfFloat32(const QuestScoreParams& p, const std::byte* const* bounds,
                            float* scores) {
  TransposeBounds(bounds, 2 * p.head_dim * 4, [&](int64_t element, int64_t page, Vec values) {
    StoreUnits(PlaceOf(p, element, page), values);
  });
  ScoreTile<FloatUnit>(p, bounds, scores);
}

inline void ScoresOfBFloat16(const QuestScoreParams& p, const std::byte* const* bounds,
                             float* scores) {
  TransposeBounds(bounds, 2 * p.head_dim * 2, [&](int64_t pair, int64_t page, Vec values) {
    StoreUnits(PlaceOf(p, 2 * pair, page), FirstOfPairs(values));
    StoreUnits(PlaceOf(p, 2 * pair + 1, page), SecondOfPairs(values));
  });
  ScoreTile<FloatUnit>(p, bounds, scores);
}

}  // namespace
}  // namespace kvasir::kernels
