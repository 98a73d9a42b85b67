// The shared body of the AVX-512 tile functions, a template over the unit of four bytes in which
// queries, weights and packed tiles are laid out: one float, or a pair of bfloat16 neighbours. For
// attend_tile_avx512.cc and attend_tile_avx512_bf16.cc only; everything has internal linkage (see
// attend_tile.h).
//
// Both products are those of avx512_tile.h:
//   logits: A = queries, units along head_dim, B = keys transposed, columns are tokens
//   out:    A = weights, units along tokens,   B = values,          columns are 64 of head_dim
//
// A policy `Unit` is one of avx512_tile.h with
//   KeepFirstToken(b)      b without the second token of each unit (where a unit holds two)
//   StoreWeights(p, to)    64 float weights as units
//   PackKeys, PackValues   pages to tiles
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

inline bool GroupIsMasked(uint64_t mask, int64_t group) {
  return (mask >> (group * kVectorLanes) & 0xffffu) == 0;
}

// Calls store(unit, tokens, vector) with the transposed keys: `vector` holds unit `unit` (four
// bytes) of the tokens [tokens, tokens + 16). Groups of tokens that are masked altogether are left
// out. Meanwhile the next page's keys are fetched.
template <typename Store>
inline void TransposeKeys(const TilePage& page, int64_t row_bytes, const Store& store) {
  for (int64_t group = 0; group < kTileTokens / kVectorLanes; ++group) {
    if (GroupIsMasked(page.mask, group)) continue;
    for (int64_t offset = 0; offset < row_bytes; offset += 64) {
      __m512i rows[16];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kVectorLanes; ++i) {
        const int64_t at = (group * kVectorLanes + i) * row_bytes + offset;
        rows[i] = _mm512_loadu_si512(page.keys + at);
        if (page.next_page != nullptr) _mm_prefetch(page.next_page + at, _MM_HINT_T0);
      }
      Transpose16(rows);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kVectorLanes; ++i)
        store(offset / 4 + i, group * kVectorLanes, rows[i]);
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

// Logits of the rows against the packed keys, masked; then the online softmax step: updates max and
// sums, writes the weights as units, and returns by how much `out` is to be scaled.
template <typename Unit, int kRows>
inline void SoftmaxStep(const TileShape& shape, const RowBlock& block, const std::byte* packed_keys,
                        std::byte* weights, float rescale[kVectorLanes]) {
  Accumulators<kRows> c;
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kColumnVectors; ++j) c[r][j] = _mm512_setzero_ps();
  }
  const int64_t units = shape.head_dim / Unit::kElements;
  Multiply<Unit, kRows>(block.q, units * 4, packed_keys, kColumns * 4, units, c);

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
    Unit::StoreWeights(c[r], weights + r * kTileTokens * 4);
  }
}

// out = rescale * out + weights . values, over the tokens up to the last of the mask.
template <typename Unit, int kRows>
inline void AddValues(const TileShape& shape, const RowBlock& block, const std::byte* weights,
                      const std::byte* packed_values, const float rescale[kVectorLanes]) {
  const int64_t tokens = 64 - __builtin_clzll(block.mask);
  const int64_t whole_units = tokens / Unit::kElements;
  const int64_t unit_bytes = shape.head_dim * 4;
  for (int64_t column = 0; column < shape.head_dim; column += kColumns) {
    Accumulators<kRows> c;
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const __m512 factor = _mm512_set1_ps(rescale[r]);
#pragma GCC unroll 4
      for (int j = 0; j < kColumnVectors; ++j) {
        const float* out = block.out + r * shape.head_dim + column + j * kVectorLanes;
        c[r][j] = _mm512_mul_ps(_mm512_loadu_ps(out), factor);
      }
    }
    const std::byte* values = packed_values + column * 4;
    Multiply<Unit, kRows>(weights, kTileTokens * 4, values, unit_bytes, whole_units, c);
    if constexpr (Unit::kElements == 2) {
      if (tokens % 2 != 0) {
        // The second token of the last unit is not this row's: its weight is 0, but it may be NaN.
        alignas(64) std::byte last[kColumns * 4];
        for (int j = 0; j < kColumnVectors; ++j) {
          const __m512i pair = _mm512_loadu_si512(values + whole_units * unit_bytes + j * 64);
          _mm512_store_si512(last + j * 64, Unit::KeepFirstToken(pair));
        }
        Multiply<Unit, kRows>(weights + whole_units * 4, kTileTokens * 4, last, 0, 1, c);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < kColumnVectors; ++j) {
        _mm512_storeu_ps(block.out + r * shape.head_dim + column + j * kVectorLanes, c[r][j]);
      }
    }
  }
}

template <typename Unit, int kRows>
void AddToRows(const TileShape& shape, const RowBlock& block, const std::byte* packed_keys,
               const std::byte* packed_values, std::byte* weights) {
  alignas(64) float rescale[kVectorLanes];
  SoftmaxStep<Unit, kRows>(shape, block, packed_keys, weights, rescale);
  AddValues<Unit, kRows>(shape, block, weights, packed_values, rescale);
}

template <typename Unit>
void AddToRows(int64_t num_rows, const TileShape& shape, const RowBlock& block,
               const std::byte* keys, const std::byte* values, std::byte* weights) {
  switch (num_rows) {
    case 1:
      return AddToRows<Unit, 1>(shape, block, keys, values, weights);
    case 2:
      return AddToRows<Unit, 2>(shape, block, keys, values, weights);
    case 3:
      return AddToRows<Unit, 3>(shape, block, keys, values, weights);
    case 4:
      return AddToRows<Unit, 4>(shape, block, keys, values, weights);
    case 5:
      return AddToRows<Unit, 5>(shape, block, keys, values, weights);
    default:
      return AddToRows<Unit, 6>(shape, block, keys, values, weights);
  }
}

// Tokens of the page that query i attends to.
inline uint64_t MaskOfQuery(const TilePage& page, int64_t query) {
  const int64_t last = page.first_query + query;
  const uint64_t causal = last >= kTileTokens - 1 ? ~uint64_t{0} : (uint64_t{1} << (last + 1)) - 1;
  return page.mask & causal;
}

template <typename Unit>
void AddPage(const TileShape& shape, const TilePage& page, const TileRows& rows) {
  std::byte* keys = shape.workspace;
  std::byte* values = keys + kTileTokens * shape.head_dim * 4;
  std::byte* weights = values + kTileTokens * shape.head_dim * 4;
  Unit::PackKeys(shape, page, keys);
  const std::byte* packed_values = Unit::PackValues(shape, page, values);
  const int64_t q_row_bytes = shape.head_dim / Unit::kElements * 4;
  const int64_t num_rows = rows.num_queries * rows.group;
  for (int64_t row = 0; row < num_rows;) {
    const uint64_t mask = MaskOfQuery(page, row / rows.group);
    int64_t end = row + 1;
    while (end < num_rows && end < row + kMaxTileRows &&
           MaskOfQuery(page, end / rows.group) == mask) {
      ++end;
    }
    if (mask != 0) {
      const RowBlock block = {.q = static_cast<const std::byte*>(rows.q) + row * q_row_bytes,
                              .max = rows.max + row,
                              .sums = rows.sums + row * kVectorLanes,
                              .out = rows.out + row * shape.head_dim,
                              .mask = mask};
      AddToRows<Unit>(end - row, shape, block, keys, packed_values, weights);
    }
    row = end;
  }
}

}  // namespace
}  // namespace kvasir::kernels
