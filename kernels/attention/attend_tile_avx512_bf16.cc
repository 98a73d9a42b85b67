// Compiled for AVX-512 with BF16; see the warning in attend_tile.h.
#include "kernels/attention/attend_tile_avx512.h"

namespace kvasir::kernels {
namespace {

// Neighbours along head_dim in queries and keys, neighbouring tokens in weights and values.
struct PairTile : PairUnit {
  static constexpr int64_t kKvBytes = 2;

  static __m512i KeepFirstToken(__m512i pairs) {
    return _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff));
  }
  static void StoreWeights(const __m512 p[kColumnVectors], std::byte* to) {
    _mm512_storeu_si512(to, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(p[1], p[0])));
    _mm512_storeu_si512(to + 64, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(p[3], p[2])));
  }
  template <typename Use>
  static void SplitKeys(int64_t index, __m512i keys, const Use& use) {
    use(index, keys);
  }
  // Rows 2 unit and 2 unit + 1 of V interleaved.
  static void LoadValues(const TileShape& shape, const TilePage& page, int64_t unit, int64_t column,
                         __m512i line[kColumnVectors]) {
    const int64_t row_bytes = shape.head_dim * kKvBytes;
    const std::byte* from = page.values + 2 * unit * row_bytes + column * kKvBytes;
    const __mmask32 first_attended = (page.mask >> (2 * unit) & 1) != 0 ? ~__mmask32{0} : 0;
    const __mmask32 second_attended = (page.mask >> (2 * unit + 1) & 1) != 0 ? ~__mmask32{0} : 0;
    const __m512i low = InterleaveIndex(0);
    const __m512i high = InterleaveIndex(16);
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const std::byte* here = from + j * 64;
      const __m512i first = _mm512_maskz_loadu_epi16(first_attended, here);
      const __m512i second = _mm512_maskz_loadu_epi16(second_attended, here + row_bytes);
      PrefetchNext(page, here);
      PrefetchNext(page, here + row_bytes);
      line[2 * j] = _mm512_permutex2var_epi16(first, low, second);
      line[2 * j + 1] = _mm512_permutex2var_epi16(first, high, second);
    }
  }

 private:
  // For permutex2var: elements first, first + 1, ... of two vectors of 32, by turns.
  static __m512i InterleaveIndex(int first) {
    const __m512i counter = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i index = _mm512_add_epi32(counter, _mm512_set1_epi32(first));
    const __m512i of_second = _mm512_add_epi32(index, _mm512_set1_epi32(32));
    return _mm512_or_si512(index, _mm512_slli_epi32(of_second, 16));
  }
};

}  // namespace

void AddPageAvx512Bf16Pairs(const TileShape& shape, const TilePage& page, const TileRows& rows) {
  AddPage<PairTile>(shape, page, rows);
}

}  // namespace kvasir::kernels
