// Compiled for AVX-512 with BF16; see the warning in attend_tile.h.
#include "kernels/attention/attend_tile_avx512.h"

namespace kvasir::kernels {
namespace {

// Neighbours along head_dim in queries and keys, neighbouring tokens in weights and values.
struct PairTile : PairUnit {
  static __m512i KeepFirstToken(__m512i pairs) {
    return _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff));
  }
  static void StoreWeights(const __m512 p[kColumnVectors], std::byte* to) {
    _mm512_storeu_si512(to, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(p[1], p[0])));
    _mm512_storeu_si512(to + 64, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(p[3], p[2])));
  }
  static void PackKeys(const TileShape& shape, const TilePage& page, std::byte* to) {
    TransposeKeys(page, shape.head_dim * 2, [&](int64_t pair, int64_t token, __m512i keys) {
      _mm512_storeu_si512(to + (pair * kTileTokens + token) * 4, keys);
    });
  }
  // Rows 2 u and 2 u + 1 of V interleaved; masked rows are zero.
  static const std::byte* PackValues(const TileShape& shape, const TilePage& page, std::byte* to) {
    const int64_t row_bytes = shape.head_dim * 2;
    const int64_t tokens = 64 - __builtin_clzll(page.mask);
    const __m512i low = InterleaveIndex(0);
    const __m512i high = InterleaveIndex(16);
    for (int64_t t = 0; t < tokens; t += 2) {
      for (int64_t i = t * row_bytes; i < (t + 1) * row_bytes; i += 64) {
        const __m512i first = LoadIf(page.mask >> t & 1, page.values + i);
        const __m512i second = LoadIf(page.mask >> (t + 1) & 1, page.values + i + row_bytes);
        if (page.next_page != nullptr) {
          const std::byte* next = page.next_page + (page.values - page.keys) + i;
          _mm_prefetch(next, _MM_HINT_T0);
          _mm_prefetch(next + row_bytes, _MM_HINT_T0);
        }
        std::byte* pairs = to + t * row_bytes + 2 * (i - t * row_bytes);
        _mm512_storeu_si512(pairs, _mm512_permutex2var_epi16(first, low, second));
        _mm512_storeu_si512(pairs + 64, _mm512_permutex2var_epi16(first, high, second));
      }
    }
    return to;
  }

 private:
  static __m512i LoadIf(uint64_t condition, const std::byte* from) {
    return condition != 0 ? _mm512_loadu_si512(from) : _mm512_setzero_si512();
  }
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
