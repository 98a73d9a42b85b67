// Internal to attend_tile_simd.h, whose first lines say how these parts are compiled: keys of a
// page, transposed into a tile or in registers, and their products with rows of queries.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention/tile/attend_tile.h"
#include "kernels/simd/simd_units.h"

namespace kvasir::kernels {
namespace {

constexpr int kLaneVectors = static_cast<int>(kTileLanes / kSimdWidth);
constexpr int64_t kTokenRowBytes = kTileTokens * 4;

// Vectors of columns in a product of kRows rows: few rows leave registers for more vectors.
template <int kRows>
constexpr int kColumnVectors =
    kRows <= kProductRows / 2 && kProductVectors < 4 ? 4 : kProductVectors;
// Vectors of tokens, in one group, whose keys are transposed in registers and multiplied at once.
template <int kRows>
constexpr int kDirectVectors = kLaneVectors > 1 && kRows <= kProductRows / 2 ? 2 : 1;

// Prefetches the same place of the next page.
inline void PrefetchNext(const TilePage& page, const std::byte* here) {
  PrefetchNext(page.next_page, here - page.keys);
}

// Whether the group of kTileLanes tokens has no attended one. Such groups are skipped: their logits
// are unspecified.
inline bool GroupIsMasked(uint64_t mask, int64_t group) {
  return (mask >> (group * kTileLanes) & 0xffffu) == 0;
}

// Transposes kSimdWidth tokens, kSimdWidth four-byte columns at a time; load(i) gives the columns
// of the i-th token. Calls use(unit, vector) for the units from byte `offset` of a key on: `vector`
// holds the tokens' units.
template <typename Tile, typename LoadColumns, typename Use>
inline void TransposeColumns(int64_t offset, const LoadColumns& load, const Use& use) {
  Vec rows[static_cast<size_t>(kSimdWidth)];
#pragma GCC unroll 16
  for (int64_t i = 0; i < kSimdWidth; ++i) rows[i] = load(i);
  TransposeVectors(rows);
#pragma GCC unroll 16
  for (int64_t i = 0; i < kSimdWidth; ++i) Tile::SplitKeys(offset / 4 + i, rows[i], use);
}

// The same for consecutive tokens from `token` on.
template <typename Tile, typename Use>
inline void TransposeKeys(const TileShape& shape, const TilePage& page, int64_t token,
                          int64_t offset, const Use& use) {
  const int64_t row_bytes = shape.head_dim * Tile::kKvBytes;
  const std::byte* keys = page.keys + token * row_bytes;
  const auto load = [&](int64_t i) {
    // Prefetches a line of the next page for each line of this one, in ascending order.
    const int64_t line = offset * kSimdWidth + i * kVectorBytes;
    if (line % 64 == 0) PrefetchNext(page, keys + line);
    return LoadUnits(keys + i * row_bytes + offset);
  };
  TransposeColumns<Tile>(offset, load, use);
}

template <typename Tile>
void PackKeys(const TileShape& shape, const TilePage& page, std::byte* to) {
  const int64_t row_bytes = shape.head_dim * Tile::kKvBytes;
  for (int64_t token = 0; token < kTileTokens; token += kSimdWidth) {
    if (GroupIsMasked(page.mask, token / kTileLanes)) continue;
    for (int64_t offset = 0; offset < row_bytes; offset += kVectorBytes) {
      TransposeKeys<Tile>(shape, page, token, offset, [&](int64_t unit, Vec keys) {
        StoreUnits(to + unit * kTokenRowBytes + token * 4, keys);
      });
    }
  }
}

// The state of up to kProductRows rows that share a mask.
struct RowBlock {
  const std::byte* q;
  float* max;
  float* sums;
  float* out;
  uint64_t mask;
};

// Keys as units of kTileTokens tokens, in a tile or still in the page. Multiply writes the logits
// [row][kTileTokens] of the groups that are not masked.
struct PackedKeys {
  const std::byte* tile;

  template <typename Tile, int kRows>
  void Multiply(const TileShape& shape, const RowBlock& block, float* logits) const {
    constexpr int kVectors = kColumnVectors<kRows>;
    const int64_t units = shape.head_dim / Tile::kElements;
    for (int64_t token = 0; token < kTileTokens; token += kVectors * kSimdWidth) {
      if (IsMasked(block.mask, token, kVectors * kSimdWidth)) continue;
      Sums<kRows, kVectors> c;
      Clear<kRows, kVectors>(c);
      const auto load = [&](int64_t u, Vec* line) {
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) {
          line[j] = LoadUnits(tile + u * kTokenRowBytes + token * 4 + j * kVectorBytes);
        }
      };
      AddProduct<Tile, kRows, kVectors>(block.q, units * 4, units, load, c);
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) {
          Store(logits + r * kTileTokens + token + j * kSimdWidth, c[r][j]);
        }
      }
    }
  }

 private:
  static bool IsMasked(uint64_t mask, int64_t token, int64_t count) {
    for (int64_t end = token + count; token < end; token += kTileLanes) {
      if (!GroupIsMasked(mask, token / kTileLanes)) return false;
    }
    return true;
  }
};

struct PageKeys {
  const TilePage& page;

  template <typename Tile, int kRows>
  void Multiply(const TileShape& shape, const RowBlock& block, float* logits) const {
    if (__builtin_popcountll(block.mask) <= kFewTokens) {
      MultiplyFewTokens<Tile, kRows>(shape, block, logits);
    } else {
      MultiplyGroups<Tile, kRows>(shape, block, logits);
    }
  }

 private:
  // Up to this many tokens are read one by one, with nothing between them.
  static constexpr int kFewTokens = 16;

  template <typename Tile, int kRows>
  void MultiplyFewTokens(const TileShape& shape, const RowBlock& block, float* logits) const {
    const int64_t row_bytes = shape.head_dim * Tile::kKvBytes;
    const int64_t q_row_bytes = shape.head_dim / Tile::kElements * 4;
    for (uint64_t rest = block.mask; rest != 0;) {
      int64_t tokens[static_cast<size_t>(kSimdWidth)];
      int64_t count = 0;
      for (; count < kSimdWidth && rest != 0; rest &= rest - 1) {
        tokens[count++] = __builtin_ctzll(rest);
      }
      for (int64_t i = count; i < kSimdWidth; ++i) tokens[i] = tokens[count - 1];
      Sums<kRows, 1> c;
      Clear<kRows, 1>(c);
      const auto multiply = [&](int64_t unit, Vec keys) {
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r) {
          c[r][0] =
              Tile::MulAdd(c[r][0], BroadcastUnit(block.q + r * q_row_bytes + unit * 4), keys);
        }
      };
      for (int64_t offset = 0; offset < row_bytes; offset += kVectorBytes) {
        const auto load = [&](int64_t i) {
          return LoadUnits(page.keys + tokens[i] * row_bytes + offset);
        };
        TransposeColumns<Tile>(offset, load, multiply);
      }
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
        float lanes[static_cast<size_t>(kSimdWidth)];
        Store(lanes, c[r][0]);
        for (int64_t i = 0; i < count; ++i) logits[r * kTileTokens + tokens[i]] = lanes[i];
      }
    }
  }

  template <typename Tile, int kRows>
  void MultiplyGroups(const TileShape& shape, const RowBlock& block, float* logits) const {
    constexpr int kVectors = kDirectVectors<kRows>;
    const int64_t row_bytes = shape.head_dim * Tile::kKvBytes;
    const int64_t q_row_bytes = shape.head_dim / Tile::kElements * 4;
    for (int64_t token = 0; token < kTileTokens; token += kVectors * kSimdWidth) {
      if (GroupIsMasked(block.mask, token / kTileLanes)) continue;
      Sums<kRows, kVectors> c;
      Clear<kRows, kVectors>(c);
      for (int64_t offset = 0; offset < row_bytes; offset += kVectorBytes) {
#pragma GCC unroll 2
        for (int j = 0; j < kVectors; ++j) {
          const auto multiply = [&](int64_t unit, Vec keys) {
#pragma GCC unroll 6
            for (int r = 0; r < kRows; ++r) {
              const Vec element = BroadcastUnit(block.q + r * q_row_bytes + unit * 4);
              c[r][j] = Tile::MulAdd(c[r][j], element, keys);
            }
          };
          TransposeKeys<Tile>(shape, page, token + j * kSimdWidth, offset, multiply);
        }
      }
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int j = 0; j < kVectors; ++j) {
          Store(logits + r * kTileTokens + token + j * kSimdWidth, c[r][j]);
        }
      }
    }
  }
};

}  // namespace
}  // namespace kvasir::kernels
