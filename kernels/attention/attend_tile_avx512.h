// The shared body of the AVX-512 tile functions, a template over the unit of four bytes in which
// queries, weights and packed tiles are laid out: one float, or a pair of bfloat16 neighbours. For
// attend_tile_avx512.cc and attend_tile_avx512_bf16.cc only; everything has internal linkage (see
// attend_tile.h).
//
// Both products are those of avx512_tile.h:
//   logits: A = queries, units along head_dim, B = keys transposed, columns are tokens
//   out:    A = weights, units along tokens,   B = values,          columns are 64 of head_dim
//
// Where many rows use a page, keys are transposed and values converted once, into tiles. Where few
// do (decode), both happen in registers, just before use; the arithmetic is the same.
//
// A policy `Tile` is a unit of avx512_tile.h with
//   kKvBytes                    of an element of K and V
//   SplitKeys(i, keys, use)     calls use(unit, keys) for the units in the i-th four bytes of keys
//   LoadValues(page, ...)       64 columns of V of a unit's tokens; masked tokens are zero
//   KeepFirstToken(values)      without the second token of each unit (where a unit holds two)
//   StoreWeights(p, to)         64 float weights as units
#pragma once

#include <cstddef>
#include <cstdint>
#include <immintrin.h>

#include "kernels/attention/attend_tile.h"
#include "kernels/base/avx512_tile.h"

namespace kvasir::kernels {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();

// exp(x) for x <= 0, at most 2 ulp off; exp(0) = 1 exactly, exp(-inf) = 0, NaN stays NaN; 0 below
// -104. x = n ln 2 + r, polynomial of degree 6 in r with the first two coefficients exact (minimax,
// relative error 3e-9).
inline __m512 Exp(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-105.0f), x);  // returns the second operand when it is NaN
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(0x1.715476p+0f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0x1.62e4p-1f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0x1.7f7d1cp-20f), r);
  __m512 p = _mm512_set1_ps(0x1.6a2434p-10f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.1239e2p-7f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.5558f2p-5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.555492p-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.fffffcp-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

// Fetches what lies at the same place of the page to come. Into the second-level cache: a page of K
// and V fills the first, whose few miss buffers would also bound what is on its way from memory.
inline void PrefetchNext(const TilePage& page, const std::byte* here) {
  if (page.next_page != nullptr) _mm_prefetch(page.next_page + (here - page.keys), _MM_HINT_T1);
}

// Calls use(unit, vector) for the units of the keys in ascending order: `vector` holds the unit of
// the 16 tokens of the group.
template <typename Tile, typename Use>
inline void TransposeKeys(const TileShape& shape, const TilePage& page, int64_t group,
                          const Use& use) {
  const int64_t row_bytes = shape.head_dim * Tile::kKvBytes;
  const std::byte* keys = page.keys + group * kVectorLanes * row_bytes;
  for (int64_t offset = 0; offset < row_bytes; offset += 64) {
    __m512i rows[16];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kVectorLanes; ++i) {
      rows[i] = _mm512_loadu_si512(keys + i * row_bytes + offset);
      PrefetchNext(page, keys + offset * kVectorLanes + i * 64);  // ascending
    }
    Transpose16(rows);
#pragma GCC unroll 16
    for (int64_t i = 0; i < kVectorLanes; ++i) Tile::SplitKeys(offset / 4 + i, rows[i], use);
  }
}

inline bool GroupIsMasked(uint64_t mask, int64_t group) {
  return (mask >> (group * kVectorLanes) & 0xffffu) == 0;
}

// Keys as units of 64 tokens, in a tile or still in the page. Logits of masked groups of 16 tokens
// are unspecified.
struct PackedKeys {
  const std::byte* tile;

  template <typename Tile, int kRows>
  void Multiply(const TileShape& shape, const std::byte* q, Accumulators<kRows>& logits) const {
    const int64_t units = shape.head_dim / Tile::kElements;
    const auto load = [&](int64_t u, __m512i* line) { LoadColumns(tile + u * kColumns * 4, line); };
    kernels::Multiply<Tile, kRows>(q, units * 4, units, load, logits);
  }
};

struct PageKeys {
  const TilePage& page;

  template <typename Tile, int kRows>
  void Multiply(const TileShape& shape, const std::byte* q, Accumulators<kRows>& logits) const {
    const int64_t q_row_bytes = shape.head_dim / Tile::kElements * 4;
    for (int64_t group = 0; group < kColumnVectors; ++group) {
      if (GroupIsMasked(page.mask, group)) continue;
      __m512 c[static_cast<size_t>(kRows)];
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) c[r] = _mm512_setzero_ps();
      TransposeKeys<Tile>(shape, page, group, [&](int64_t unit, __m512i keys) {
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r) {
          c[r] = Tile::MulAdd(c[r], BroadcastUnit(q + r * q_row_bytes + unit * 4), keys);
        }
      });
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) logits[r][group] = c[r];
    }
  }
};

// Values as units of 64 columns, in a tile or still in the page.
struct PackedValues {
  const std::byte* tile;

  template <typename Tile>
  void Load(const TileShape& shape, int64_t unit, int64_t column, __m512i* line) const {
    LoadColumns(tile + (unit * shape.head_dim + column) * 4, line);
  }
};

struct PageValues {
  const TilePage& page;

  template <typename Tile>
  void Load(const TileShape& shape, int64_t unit, int64_t column, __m512i* line) const {
    Tile::LoadValues(shape, page, unit, column, line);
  }
};

template <typename Tile>
void PackKeys(const TileShape& shape, const TilePage& page, std::byte* to) {
  for (int64_t group = 0; group < kColumnVectors; ++group) {
    if (GroupIsMasked(page.mask, group)) continue;
    TransposeKeys<Tile>(shape, page, group, [&](int64_t unit, __m512i keys) {
      _mm512_storeu_si512(to + (unit * kColumns + group * kVectorLanes) * 4, keys);
    });
  }
}

template <typename Tile>
void PackValues(const TileShape& shape, const TilePage& page, std::byte* to) {
  const int64_t tokens = 64 - __builtin_clzll(page.mask);
  for (int64_t unit = 0; unit * Tile::kElements < tokens; ++unit) {
    for (int64_t column = 0; column < shape.head_dim; column += kColumns) {
      __m512i line[kColumnVectors];
      Tile::LoadValues(shape, page, unit, column, line);
#pragma GCC unroll 4
      for (int j = 0; j < kColumnVectors; ++j) {
        _mm512_storeu_si512(to + (unit * shape.head_dim + column) * 4 + j * 64, line[j]);
      }
    }
  }
}

// The state of up to kMaxTileRows rows that share a mask.
struct RowBlock {
  const std::byte* q;
  float* max;
  float* sums;
  float* out;
  uint64_t mask;
};

// Logits of the rows, masked; then the online softmax step: updates max and sums, writes the
// weights as units, and returns by how much `out` is to be scaled.
template <typename Tile, int kRows, typename Keys>
inline void SoftmaxStep(const TileShape& shape, const RowBlock& block, const Keys& keys,
                        std::byte* weights, float rescale[kVectorLanes]) {
  Accumulators<kRows> c;
  ClearAccumulators<kRows>(c);
  keys.template Multiply<Tile, kRows>(shape, block.q, c);

  alignas(64) float old_max[kVectorLanes] = {};
  alignas(64) float new_max[kVectorLanes] = {};
  const __m512 scale = _mm512_set1_ps(shape.scale);
  const __m512 masked = _mm512_set1_ps(kMinusInfinity);
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
    __m512 largest = _mm512_set1_ps(block.max[r]);
#pragma GCC unroll 4
    for (int j = 0; j < kColumnVectors; ++j) {
      const __mmask16 mask = static_cast<__mmask16>(block.mask >> (j * kVectorLanes));
      c[r][j] = _mm512_mask_mul_ps(masked, mask, c[r][j], scale);
      largest = _mm512_max_ps(c[r][j], largest);  // NaN is left out here and shows in the sum
    }
    old_max[r] = block.max[r];
    new_max[r] = _mm512_reduce_max_ps(largest);
    block.max[r] = new_max[r];
    if (new_max[r] == kMinusInfinity) new_max[r] = 0;  // nothing but -inf and NaN so far
  }
  const __m512 change = _mm512_sub_ps(_mm512_load_ps(old_max), _mm512_load_ps(new_max));
  _mm512_store_ps(rescale, Exp(change));

#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
    const __m512 max = _mm512_set1_ps(new_max[r]);
#pragma GCC unroll 4
    for (int j = 0; j < kColumnVectors; ++j) c[r][j] = Exp(_mm512_sub_ps(c[r][j], max));
    const __m512 sum =
        _mm512_add_ps(_mm512_add_ps(c[r][0], c[r][1]), _mm512_add_ps(c[r][2], c[r][3]));
    float* sums = block.sums + r * kVectorLanes;
    _mm512_storeu_ps(sums, _mm512_fmadd_ps(_mm512_loadu_ps(sums), _mm512_set1_ps(rescale[r]), sum));
    Tile::StoreWeights(c[r], weights + r * kTileTokens * 4);
  }
}

// out = rescale * out + weights . values, over the tokens up to the last of the mask.
template <typename Tile, int kRows, typename Values>
inline void AddValues(const TileShape& shape, const RowBlock& block, const std::byte* weights,
                      const Values& values, const float rescale[kVectorLanes]) {
  constexpr int64_t kWeightsRowBytes = kTileTokens * 4;
  const int64_t tokens = 64 - __builtin_clzll(block.mask);
  const int64_t whole_units = tokens / Tile::kElements;
  for (int64_t column = 0; column < shape.head_dim; column += kColumns) {
    float* out = block.out + column;
    Accumulators<kRows> c;
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const __m512 factor = _mm512_set1_ps(rescale[r]);
#pragma GCC unroll 4
      for (int j = 0; j < kColumnVectors; ++j) {
        const float* from = out + r * shape.head_dim + j * kVectorLanes;
        c[r][j] = _mm512_mul_ps(_mm512_loadu_ps(from), factor);
      }
    }
    const auto load = [&](int64_t u, __m512i* line) {
      values.template Load<Tile>(shape, u, column, line);
    };
    Multiply<Tile, kRows>(weights, kWeightsRowBytes, whole_units, load, c);
    if constexpr (Tile::kElements == 2) {
      if (tokens % 2 != 0) {
        // The second token of the last unit is not this row's: its weight is 0, but it may be NaN.
        const auto load_first = [&](int64_t, __m512i* line) {
          load(whole_units, line);
#pragma GCC unroll 4
          for (int j = 0; j < kColumnVectors; ++j) line[j] = Tile::KeepFirstToken(line[j]);
        };
        Multiply<Tile, kRows>(weights + whole_units * 4, kWeightsRowBytes, 1, load_first, c);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < kColumnVectors; ++j) {
        _mm512_storeu_ps(out + r * shape.head_dim + j * kVectorLanes, c[r][j]);
      }
    }
  }
}

template <typename Tile, int kRows, typename Keys, typename Values>
void AddToRows(const TileShape& shape, const RowBlock& block, const Keys& keys,
               const Values& values, std::byte* weights) {
  alignas(64) float rescale[kVectorLanes];
  SoftmaxStep<Tile, kRows>(shape, block, keys, weights, rescale);
  AddValues<Tile, kRows>(shape, block, weights, values, rescale);
}

template <typename Tile, typename Keys, typename Values>
void AddToRows(int64_t num_rows, const TileShape& shape, const RowBlock& block, const Keys& keys,
               const Values& values, std::byte* weights) {
  switch (num_rows) {
    case 1:
      return AddToRows<Tile, 1>(shape, block, keys, values, weights);
    case 2:
      return AddToRows<Tile, 2>(shape, block, keys, values, weights);
    case 3:
      return AddToRows<Tile, 3>(shape, block, keys, values, weights);
    case 4:
      return AddToRows<Tile, 4>(shape, block, keys, values, weights);
    case 5:
      return AddToRows<Tile, 5>(shape, block, keys, values, weights);
    default:
      return AddToRows<Tile, 6>(shape, block, keys, values, weights);
  }
}

// Tokens of the page that query i attends to.
inline uint64_t MaskOfQuery(const TilePage& page, int64_t query) {
  const int64_t last = page.first_query + query;
  const uint64_t causal = last >= kTileTokens - 1 ? ~uint64_t{0} : (uint64_t{1} << (last + 1)) - 1;
  return page.mask & causal;
}

// Calls use(num_rows, block) for runs of up to kMaxTileRows rows with the same mask;
// rows that attend to nothing of the page are left out.
template <typename Use>
inline void ForEachRowBlock(const TileShape& shape, const TilePage& page, const TileRows& rows,
                            int64_t q_row_bytes, const Use& use) {
  const int64_t num_rows = rows.num_queries * rows.group;
  for (int64_t row = 0; row < num_rows;) {
    const uint64_t mask = MaskOfQuery(page, row / rows.group);
    int64_t end = row + 1;
    while (end < num_rows && end < row + kMaxTileRows &&
           MaskOfQuery(page, end / rows.group) == mask) {
      ++end;
    }
    if (mask != 0) {
      use(end - row, RowBlock{.q = static_cast<const std::byte*>(rows.q) + row * q_row_bytes,
                              .max = rows.max + row,
                              .sums = rows.sums + row * kVectorLanes,
                              .out = rows.out + row * shape.head_dim,
                              .mask = mask});
    }
    row = end;
  }
}

template <typename Tile>
void AddPage(const TileShape& shape, const TilePage& page, const TileRows& rows) {
  const int64_t q_row_bytes = shape.head_dim / Tile::kElements * 4;
  std::byte* weights = shape.workspace;
  if (rows.num_queries == 1 && rows.group <= kMaxTileRows) {
    const auto add = [&](int64_t num_rows, const RowBlock& block) {
      AddToRows<Tile>(num_rows, shape, block, PageKeys{page}, PageValues{page}, weights);
    };
    ForEachRowBlock(shape, page, rows, q_row_bytes, add);
    return;
  }
  std::byte* keys = weights + kMaxTileRows * kTileTokens * 4;
  std::byte* values = keys + kTileTokens * shape.head_dim * 4;
  PackKeys<Tile>(shape, page, keys);
  PackValues<Tile>(shape, page, values);
  const auto add = [&](int64_t num_rows, const RowBlock& block) {
    AddToRows<Tile>(num_rows, shape, block, PackedKeys{keys}, PackedValues{values}, weights);
  };
  ForEachRowBlock(shape, page, rows, q_row_bytes, add);
}

}  // namespace
}  // namespace kvasir::kernels
