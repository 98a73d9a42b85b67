// The body of the tile functions (attend_tile.h), written once for all vectors: a template over the
// layout of queries, weights and packed tiles, in units of four bytes (base/simd_units.h). For
// attend_tile_*.cc only, which include their simd_*.h before it. Everything has internal linkage.
//
// Both products are products of simd_units.h:
//   logits: A = queries, units along head_dim, B = keys transposed, columns are tokens
//   out:    A = weights, units along tokens,   B = values,          columns along head_dim
//
// When many rows use a page, keys are transposed and values converted once, into tiles. When few
// rows do (decode), both happen in registers, just before use, with the same arithmetic. The
// arithmetic is also the same for vectors of any width: sums are kept in kTileLanes lanes on every
// machine.
//
// A policy `Tile` is a unit of simd_units.h with
//   kKvBytes                  size of an element of K and V
//   SplitKeys(i, keys, use)   calls use(unit, keys) for the units in the i-th four bytes of keys
//   LoadValues<n>(page, ...)  n vectors of columns of V, for a unit's tokens; masked tokens give 0
//   KeepFirstToken(values)    drops the second token of each unit (where a unit holds two)
//   StoreWeights(p, to)       kTileTokens float weights as units
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention/tile/attend_tile.h"
#include "kernels/attention/tile/attend_tile_keys_simd.h"
#include "kernels/attention/tile/attend_tile_softmax_simd.h"
#include "kernels/simd/simd_units.h"

namespace kvasir::kernels {
namespace {

template <typename Tile>
void PackValues(const TileShape& shape, const TilePage& page, std::byte* to) {
  constexpr int kVectors = kColumnVectors<kProductRows>;
  const int64_t tokens = 64 - __builtin_clzll(page.mask);
  for (int64_t unit = 0; unit * Tile::kElements < tokens; ++unit) {
    for (int64_t column = 0; column < shape.head_dim; column += kVectors * kSimdWidth) {
      Vec line[static_cast<size_t>(kVectors)];
      Tile::template LoadValues<kVectors>(shape, page, unit, column, line);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        StoreUnits(to + (unit * shape.head_dim + column) * 4 + j * kVectorBytes, line[j]);
      }
    }
  }
}

// Values as units of columns, in a tile or still in the page.
struct PackedValues {
  const std::byte* tile;

  template <typename Tile, int kVectors>
  void Load(const TileShape& shape, int64_t unit, int64_t column, Vec* line) const {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      line[j] = LoadUnits(tile + (unit * shape.head_dim + column) * 4 + j * kVectorBytes);
    }
  }
};

struct PageValues {
  const TilePage& page;

  template <typename Tile, int kVectors>
  void Load(const TileShape& shape, int64_t unit, int64_t column, Vec* line) const {
    Tile::template LoadValues<kVectors>(shape, page, unit, column, line);
  }
};

// Calls use(unit, count) for the runs of units of kElements tokens that hold a token of the mask.
template <int64_t kElements, typename Use>
inline void ForEachUnitRun(uint64_t mask, const Use& use) {
  if constexpr (kElements == 2) {
    const uint64_t first = (mask | mask >> 1) & 0x5555555555555555u;
    mask = first | first << 1;
  }
  while (mask != 0) {
    const int begin = __builtin_ctzll(mask);
    const uint64_t after = ~(mask >> begin);
    const int count = after == 0 ? 64 : __builtin_ctzll(after);
    use(begin / kElements, count / kElements);
    mask = begin + count == 64 ? 0 : mask & ~uint64_t{0} << (begin + count);
  }
}

// out = rescale * out + weights . values, over the tokens of the mask and others in their units.
template <typename Tile, int kRows, typename Values>
inline void AddValues(const TileShape& shape, const RowBlock& block, const std::byte* weights,
                      const Values& values, const float rescale[kTileLanes]) {
  constexpr int kVectors = kColumnVectors<kRows>;
  const int64_t tokens = 64 - __builtin_clzll(block.mask);
  const int64_t whole_units = tokens / Tile::kElements;
  const int64_t whole_tokens = whole_units * Tile::kElements;
  const uint64_t whole_mask =
      whole_tokens == 64 ? block.mask : block.mask & ((uint64_t{1} << whole_tokens) - 1);
  for (int64_t column = 0; column < shape.head_dim; column += kVectors * kSimdWidth) {
    float* out = block.out + column;
    Sums<kRows, kVectors> c;
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const Vec factor = Broadcast(rescale[r]);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        c[r][j] = Load(out + r * shape.head_dim + j * kSimdWidth) * factor;
      }
    }
    ForEachUnitRun<Tile::kElements>(whole_mask, [&](int64_t begin, int64_t count) {
      const auto load = [&](int64_t u, Vec* line) {
        values.template Load<Tile, kVectors>(shape, begin + u, column, line);
      };
      AddProduct<Tile, kRows, kVectors>(weights + begin * 4, kTokenRowBytes, count, load, c);
    });
    if constexpr (Tile::kElements == 2) {
      if (tokens % 2 != 0) {
        // The row does not attend to the last unit's second token. Its weight is 0, but its value
        // may be NaN.
        const auto load_first = [&](int64_t, Vec* line) {
          values.template Load<Tile, kVectors>(shape, whole_units, column, line);
#pragma GCC unroll 4
          for (int j = 0; j < kVectors; ++j) line[j] = Tile::KeepFirstToken(line[j]);
        };
        AddProduct<Tile, kRows, kVectors>(weights + whole_units * 4, kTokenRowBytes, 1, load_first,
                                          c);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        Store(out + r * shape.head_dim + j * kSimdWidth, c[r][j]);
      }
    }
  }
}

template <typename Tile, int kRows, typename Keys, typename Values>
void AddToRows(const TileShape& shape, const RowBlock& block, const Keys& keys,
               const Values& values, std::byte* weights) {
  alignas(64) float rescale[kTileLanes];
  keys.template Multiply<Tile, kRows>(shape, block, reinterpret_cast<float*>(weights));
  SoftmaxStep<Tile, kRows>(shape, block, weights, rescale);
  AddValues<Tile, kRows>(shape, block, weights, values, rescale);
}

template <typename Tile, typename Keys, typename Values>
void AddToRows(int64_t num_rows, const TileShape& shape, const RowBlock& block, const Keys& keys,
               const Values& values, std::byte* weights) {
  static_assert(kProductRows == 6);
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

// Returns the tokens of the page that query i attends to.
inline uint64_t MaskOfQuery(const TilePage& page, int64_t query) {
  const int64_t last = page.first_query + query;
  const uint64_t causal = last >= kTileTokens - 1 ? ~uint64_t{0} : (uint64_t{1} << (last + 1)) - 1;
  return page.mask & causal;
}

// Calls use(num_rows, block) for runs of up to kProductRows rows with the same mask. Skips rows
// that attend to nothing of the page.
template <typename Use>
inline void ForEachRowBlock(const TileShape& shape, const TilePage& page, const TileRows& rows,
                            int64_t q_row_bytes, const Use& use) {
  const int64_t num_rows = rows.num_queries * rows.group;
  for (int64_t row = 0; row < num_rows;) {
    const uint64_t mask = MaskOfQuery(page, row / rows.group);
    int64_t end = row + 1;
    while (end < num_rows && end < row + kProductRows &&
           MaskOfQuery(page, end / rows.group) == mask) {
      ++end;
    }
    if (mask != 0) {
      use(end - row, RowBlock{.q = static_cast<const std::byte*>(rows.q) + row * q_row_bytes,
                              .max = rows.max + row,
                              .sums = rows.sums + row * kTileLanes,
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
  if (rows.num_queries == 1 && rows.group <= kProductRows) {
    const auto add = [&](int64_t num_rows, const RowBlock& block) {
      AddToRows<Tile>(num_rows, shape, block, PageKeys{page}, PageValues{page}, weights);
    };
    ForEachRowBlock(shape, page, rows, q_row_bytes, add);
    return;
  }
  std::byte* keys = weights + kProductRows * kTokenRowBytes;
  std::byte* values = keys + kTokenRowBytes * shape.head_dim;
  PackKeys<Tile>(shape, page, keys);
  PackValues<Tile>(shape, page, values);
  const auto add = [&](int64_t num_rows, const RowBlock& block) {
    AddToRows<Tile>(num_rows, shape, block, PackedKeys{keys}, PackedValues{values}, weights);
  };
  ForEachRowBlock(shape, page, rows, q_row_bytes, add);
}

// Float32 arithmetic: a unit is one float.
struct FloatTile : FloatUnit {
  static void StoreWeights(const float*, std::byte*) {}  // they already have this form
};

struct Float32Kv : FloatTile {
  static constexpr int64_t kKvBytes = 4;

  template <typename Use>
  static void SplitKeys(int64_t index, Vec keys, const Use& use) {
    use(index, keys);
  }
  template <int kVectors>
  static void LoadValues(const TileShape& shape, const TilePage& page, int64_t token,
                         int64_t column, Vec* line) {
    const std::byte* from = page.values + (token * shape.head_dim + column) * kKvBytes;
    const bool attended = (page.mask >> token & 1) != 0;
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      line[j] = attended ? LoadUnits(from + j * kVectorBytes) : Broadcast(0);
      PrefetchNext(page, from + j * kVectorBytes);
    }
  }
};

struct BFloat16Kv : FloatTile {
  static constexpr int64_t kKvBytes = 2;

  template <typename Use>
  static void SplitKeys(int64_t index, Vec keys, const Use& use) {
    use(2 * index, FirstOfPairs(keys));
    use(2 * index + 1, SecondOfPairs(keys));
  }
  template <int kVectors>
  static void LoadValues(const TileShape& shape, const TilePage& page, int64_t token,
                         int64_t column, Vec* line) {
    const std::byte* from = page.values + (token * shape.head_dim + column) * kKvBytes;
    const auto* elements = reinterpret_cast<const uint16_t*>(from);
    const bool attended = (page.mask >> token & 1) != 0;
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      line[j] = attended ? Load(elements + j * kSimdWidth) : Broadcast(0);
    }
    for (int64_t at = 0; at < kVectors * kVectorBytes / 2; at += 64) PrefetchNext(page, from + at);
  }
};

}  // namespace
}  // namespace kvasir::kernels
