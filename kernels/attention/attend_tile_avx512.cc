// Compiled for AVX-512; see the warning in attend_tile.h.
#include "kernels/attention/attend_tile_avx512.h"

namespace kvasir::kernels {
namespace {

struct FloatTile : FloatUnit {
  static void StoreWeights(const __m512 p[kColumnVectors], std::byte* to) {
    for (int j = 0; j < kColumnVectors; ++j) _mm512_storeu_ps(to + j * 64, p[j]);
  }
};

struct Float32Kv : FloatTile {
  static constexpr int64_t kKvBytes = 4;

  template <typename Use>
  static void SplitKeys(int64_t index, __m512i keys, const Use& use) {
    use(index, keys);
  }
  static void LoadValues(const TileShape& shape, const TilePage& page, int64_t token,
                         int64_t column, __m512i line[kColumnVectors]) {
    const std::byte* from = page.values + (token * shape.head_dim + column) * kKvBytes;
    const __mmask16 attended = (page.mask >> token & 1) != 0 ? 0xffff : 0;
#pragma GCC unroll 4
    for (int j = 0; j < kColumnVectors; ++j) {
      line[j] = _mm512_maskz_loadu_epi32(attended, from + j * 64);
      PrefetchNext(page, from + j * 64);
    }
  }
};

struct BFloat16Kv : FloatTile {
  static constexpr int64_t kKvBytes = 2;

  template <typename Use>
  static void SplitKeys(int64_t index, __m512i keys, const Use& use) {
    use(2 * index, FirstOfPairs(keys));
    use(2 * index + 1, SecondOfPairs(keys));
  }
  static void LoadValues(const TileShape& shape, const TilePage& page, int64_t token,
                         int64_t column, __m512i line[kColumnVectors]) {
    const std::byte* from = page.values + (token * shape.head_dim + column) * kKvBytes;
    const __mmask16 attended = (page.mask >> token & 1) != 0 ? 0xffff : 0;
#pragma GCC unroll 4
    for (int j = 0; j < kColumnVectors; ++j) {
      const __m256i half = _mm256_maskz_loadu_epi16(attended, from + j * 32);
      line[j] = FirstOfPairs(_mm512_cvtepu16_epi32(half));
    }
    PrefetchNext(page, from);
    PrefetchNext(page, from + 64);
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
