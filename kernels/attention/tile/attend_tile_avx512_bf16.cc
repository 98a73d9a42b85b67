// Compiled for AVX-512 with BF16; see the warning in attend_tile.h. The vectors are included before
// the functions that use them.
// clang-format off
#include "kernels/simd/simd_avx512.h"
#include "kernels/simd/simd_avx512_bf16.h"
#include "kernels/attention/tile/attend_tile_simd.h"
// clang-format on

namespace kvasir::kernels {
namespace {

// Pairs are neighbours along head_dim in queries and keys, and neighbouring tokens in weights and
// values.
struct PairTile : PairUnit {
  static constexpr int64_t kKvBytes = 2;

  static Vec KeepFirstToken(Vec pairs) { return FromBits(Bits(pairs) & 0xffffu); }
  static void StoreWeights(const float* p, std::byte* to) {
    const __m512bh first = _mm512_cvtne2ps_pbh(Load(p + 16), Load(p));
    const __m512bh second = _mm512_cvtne2ps_pbh(Load(p + 48), Load(p + 32));
    _mm512_storeu_si512(to, reinterpret_cast<__m512i>(first));
    _mm512_storeu_si512(to + 64, reinterpret_cast<__m512i>(second));
  }
  template <typename Use>
  static void SplitKeys(int64_t index, Vec keys, const Use& use) {
    use(index, keys);
  }
  // Rows 2 unit and 2 unit + 1 of V interleaved.
  template <int kVectors>
  static void LoadValues(const TileShape& shape, const TilePage& page, int64_t unit, int64_t column,
                         Vec* line) {
    static_assert(kVectors == 4);
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
      line[2 * j] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(first, low, second));
      line[2 * j + 1] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(first, high, second));
    }
  }

 private:
  // For permutex2var: elements first, first + 1, ... of two vectors of 32, alternately.
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
