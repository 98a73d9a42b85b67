// Compiled for AVX-512; see the warning in attend_tile.h.
#include "kernels/attention/attend_tile_avx512.h"

namespace kvasir::kernels {
namespace {

struct FloatWeights : FloatUnit {
  static void StoreWeights(const __m512 p[kColumnVectors], std::byte* to) {
    for (int j = 0; j < kColumnVectors; ++j) _mm512_storeu_ps(to + j * 64, p[j]);
  }
};

struct Float32Kv : FloatWeights {
  static void PackKeys(const TileShape& shape, const TilePage& page, std::byte* to) {
    TransposeKeys(page, shape.head_dim * 4, [&](int64_t unit, int64_t token, __m512i keys) {
      _mm512_storeu_si512(to + (unit * kTileTokens + token) * 4, keys);
    });
  }
  // In place, unless a masked token lies before the last attended one and must not be multiplied.
  static const std::byte* PackValues(const TileShape& shape, const TilePage& page, std::byte* to) {
    const int64_t row_bytes = shape.head_dim * 4;
    const int64_t tokens = 64 - __builtin_clzll(page.mask);
    if (page.next_page != nullptr) {
      const std::byte* next = page.next_page + (page.values - page.keys);
      for (int64_t i = 0; i < kTileTokens * row_bytes; i += 64) _mm_prefetch(next + i, _MM_HINT_T0);
    }
    if (page.mask == ~uint64_t{0} >> (64 - tokens)) return page.values;
    for (int64_t t = 0; t < tokens; ++t) {
      const bool attended = (page.mask >> t & 1) != 0;
      for (int64_t i = t * row_bytes; i < (t + 1) * row_bytes; i += 64) {
        _mm512_storeu_si512(
            to + i, attended ? _mm512_loadu_si512(page.values + i) : _mm512_setzero_si512());
      }
    }
    return to;
  }
};

struct BFloat16Kv : FloatWeights {
  static void PackKeys(const TileShape& shape, const TilePage& page, std::byte* to) {
    TransposeKeys(page, shape.head_dim * 2, [&](int64_t pair, int64_t token, __m512i keys) {
      _mm512_storeu_si512(to + (2 * pair * kTileTokens + token) * 4, FirstOfPairs(keys));
      _mm512_storeu_si512(to + ((2 * pair + 1) * kTileTokens + token) * 4, SecondOfPairs(keys));
    });
  }
  static const std::byte* PackValues(const TileShape& shape, const TilePage& page, std::byte* to) {
    const int64_t row_bytes = shape.head_dim * 2;
    const int64_t tokens = 64 - __builtin_clzll(page.mask);
    for (int64_t t = 0; t < tokens; ++t) {
      const bool attended = (page.mask >> t & 1) != 0;
      for (int64_t i = t * row_bytes; i < (t + 1) * row_bytes; i += 32) {
        const __m256i row =
            attended ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(page.values + i))
                     : _mm256_setzero_si256();
        if (page.next_page != nullptr) {
          _mm_prefetch(page.next_page + (page.values - page.keys) + i, _MM_HINT_T0);
        }
        _mm512_storeu_si512(to + 2 * i, FirstOfPairs(_mm512_cvtepu16_epi32(row)));
      }
    }
    return to;
  }
};

}  // namespace

void AddPageAvx512Float32(const TileShape& shape, const TilePage& page, const TileRows& rows) {
  AddPage<Float32Kv>(shape, page, rows);
}

void AddPageAvx512BFloat16(const TileShape& shape, const TilePage& page, const TileRows& rows) {
  AddPage<BFloat16Kv>(shape, page, rows);
}

}  // namespace kvasir::kernels
