// The functions of key_tile.h over vectors, written once for all widths. key_tile_avx2.cc,
// key_tile_avx512.cc and key_tile_neon.cc include their simd_*.h, set how many registers a product
// may fill, and then include this header. Everything has internal linkage (see simd/simd_units.h).
//
// Packed data is read in units of four bytes: a float, a pair of adjacent bfloat16, or eight codes.
// kSimdWidth units of kSimdWidth keys at a time are transposed in registers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/simd/simd_exp.h"
#include "kernels/simd/simd_units.h"
#include "kernels/sparse/key_logits/key_tile.h"

namespace kvasir::kernels {
namespace {

using IntVec __attribute__((vector_size(sizeof(Vec)))) = int32_t;
using ShortVec __attribute__((vector_size(sizeof(Vec)))) = int16_t;
using FloatVec __attribute__((vector_size(sizeof(Vec)))) = float;

// Multiplies unsigned codes by the signed bytes of `quad` and sums pairs of adjacent products.
inline ShortVec MultiplyBytes(UintVec codes, uint32_t quad) {
  return reinterpret_cast<ShortVec>(MultiplyAddBytes(FromBits(codes), quad));
}
// Sums pairs of adjacent numbers.
inline IntVec AddPairs(ShortVec v) {
  return reinterpret_cast<IntVec>(AddShorts(reinterpret_cast<Vec>(v)));
}

// Transposes kSimdWidth keys' units, where load(i) returns those of the i-th key. Calls use(i,
// keys) for the first `count` units.
template <typename LoadKey, typename Use>
inline void TransposeUnits(int64_t count, const LoadKey& load, const Use& use) {
  Vec rows[static_cast<size_t>(kSimdWidth)];
#pragma GCC unroll 16
  for (int64_t i = 0; i < kSimdWidth; ++i) rows[i] = load(i);
  TransposeVectors(rows);
  if (count == kSimdWidth) {
#pragma GCC unroll 16
    for (int64_t i = 0; i < kSimdWidth; ++i) use(i, rows[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) use(i, rows[i]);
  }
}

// Calls use(unit, first key, that unit of the kSimdWidth keys from the first on) for all units.
// load(key, unit, count) returns the key's units from that one on, at most kSimdWidth.
template <typename LoadUnits, typename Use>
inline void ForEachUnit(int64_t num_units, const LoadUnits& load, const Use& use) {
  for (int64_t t = 0; t < kTileKeys; t += kSimdWidth) {
    for (int64_t begin = 0; begin < num_units; begin += kSimdWidth) {
      const int64_t count =
          num_units - begin < kSimdWidth ? num_units - begin : int64_t{kSimdWidth};
      TransposeUnits(
          count, [&](int64_t i) { return load(t + i, begin, count); },
          [&](int64_t i, Vec keys) { use(begin + i, t, keys); });
    }
  }
}
inline Vec LoadUnits(const float* units, int64_t count) {
  return count == kSimdWidth ? Load(units) : LoadPart(units, count);
}
// The same for keys at any addresses. A missing key (null) is zeros.
template <typename Use>
inline void ForEachUnit(const void* const* keys, int64_t num_units, const Use& use) {
  const auto load = [&](int64_t key, int64_t begin, int64_t count) {
    return keys[key] == nullptr ? Broadcast(0)
                                : LoadUnits(static_cast<const float*>(keys[key]) + begin, count);
  };
  ForEachUnit(num_units, load, use);
}

inline void StoreElement(float* tile, int64_t element, int64_t key, Vec v) {
  Store(tile + element * kTileKeys + key, v);
}

// The layout of keys: units of four bytes with kElements each.
struct FloatKeys {
  static constexpr int64_t kElements = 1;
  static constexpr int64_t kBytes = 4;
  // Calls use(element, keys) for a unit's elements.
  template <typename Use>
  static void Split(int64_t unit, Vec keys, const Use& use) {
    use(unit, keys);
  }
};
struct BFloat16Keys {
  static constexpr int64_t kElements = 2;
  static constexpr int64_t kBytes = 2;
  template <typename Use>
  static void Split(int64_t unit, Vec pairs, const Use& use) {
    use(2 * unit, FirstOfPairs(pairs));
    use(2 * unit + 1, SecondOfPairs(pairs));
  }
};

void PackFloat32(const void* const* keys, int64_t head_dim, float* tile) {
  ForEachUnit(keys, head_dim,
              [&](int64_t unit, int64_t key, Vec v) { StoreElement(tile, unit, key, v); });
}

// An odd last element is half a unit and is packed alone.
void PackBFloat16(const void* const* keys, int64_t head_dim, float* tile) {
  ForEachUnit(keys, head_dim / 2, [&](int64_t unit, int64_t key, Vec pairs) {
    BFloat16Keys::Split(unit, pairs,
                        [&](int64_t element, Vec v) { StoreElement(tile, element, key, v); });
  });
  if (head_dim % 2 == 0) return;
  for (int64_t t = 0; t < kTileKeys; ++t) {
    const auto* key = static_cast<const uint16_t*>(keys[t]);
    const uint32_t bits = key == nullptr ? 0 : uint32_t{key[head_dim - 1]} << 16;
    __builtin_memcpy(tile + (head_dim - 1) * kTileKeys + t, &bits, 4);
  }
}

// The product of a code and a scale is exact: fused or not, the bits are those of DecodeKey.
void PackCodes(const CodedKeys& keys, int64_t head_dim, float* tile) {
  constexpr int64_t kElementOfNibble[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  const void* words[kTileKeys];
  for (int64_t t = 0; t < kTileKeys; ++t) words[t] = keys.words[t];
  ForEachUnit(words, (head_dim + 7) / 8, [&](int64_t unit, int64_t key, Vec v) {
    const Vec scale = Load(keys.scales + key);
    const Vec zero = Load(keys.zeros + key);
#pragma GCC unroll 8
    for (int n = 0; n < 8; ++n) {
      const int64_t element = 8 * unit + kElementOfNibble[n];
      if (element >= head_dim) continue;
      const IntVec code = reinterpret_cast<IntVec>(Bits(v) >> (4 * n) & 15u);
      const Vec value = reinterpret_cast<Vec>(__builtin_convertvector(code, FloatVec));
      StoreElement(tile, element, key, Fma(value, scale, zero));
    }
  });
}

void Rotate(const float* cos, const float* sin, int64_t head_dim, float* tile) {
  const int64_t half = head_dim / 2 * kTileKeys;
  for (int64_t i = 0; i < half; i += kSimdWidth) {
    const Vec a = Load(tile + i);
    const Vec b = Load(tile + i + half);
    Store(tile + i, a * Load(cos + i) - b * Load(sin + i));
    Store(tile + i + half, b * Load(cos + i) + a * Load(sin + i));
  }
}

// Calls use(query, key, vector) with the logits of the query and the keys from `key` on.
template <int kRows, typename Use>
inline void UseProducts(const TileQueries& q, int64_t query, const float* tile, const Use& use) {
  const auto* rows = reinterpret_cast<const std::byte*>(q.queries + query * q.head_dim);
  for (int64_t key = 0; key < kTileKeys; key += kProductVectors * kSimdWidth) {
    Sums<kRows, kProductVectors> c;
    Clear<kRows, kProductVectors>(c);
    const auto load = [&](int64_t element, Vec* line) {
#pragma GCC unroll 4
      for (int j = 0; j < kProductVectors; ++j) {
        line[j] = Load(tile + element * kTileKeys + key + j * kSimdWidth);
      }
    };
    AddProduct<FloatUnit, kRows, kProductVectors>(rows, q.head_dim * 4, q.head_dim, load, c);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < kProductVectors; ++j) use(query + r, key + j * kSimdWidth, c[r][j]);
    }
  }
}

template <typename Use>
inline void ForEachProduct(const TileQueries& q, const float* tile, const Use& use) {
  int64_t query = 0;
  for (; query + kProductRows <= q.count; query += kProductRows) {
    UseProducts<kProductRows>(q, query, tile, use);
  }
  for (; query + 2 <= q.count; query += 2) UseProducts<2>(q, query, tile, use);
  if (query < q.count) UseProducts<1>(q, query, tile, use);
}

void Logits(const TileQueries& q, const float* tile, float* logits) {
  ForEachProduct(q, tile, [&](int64_t query, int64_t key, Vec v) {
    Store(logits + query * kTileKeys + key, v);
  });
}

void Best(const TileQueries& q, const float* tile, float* best) {
  for (int64_t t = 0; t < kTileKeys; ++t) best[t] = -__builtin_inff();
  ForEachProduct(q, tile, [&](int64_t, int64_t key, Vec v) {
    Store(best + key, LargerOrSecond(v, Load(best + key)));
  });
}

// The last element of kSimdWidth keys where it is half a unit.
inline Vec LastElements(const std::byte* keys, int64_t head_dim) {
  uint32_t bits[kSimdWidth];
  for (int64_t i = 0; i < kSimdWidth; ++i) {
    uint16_t last;
    __builtin_memcpy(&last, keys + (i * head_dim + head_dim - 1) * 2, 2);
    bits[i] = uint32_t{last} << 16;
  }
  return LoadUnits(reinterpret_cast<const std::byte*>(bits));
}

// Two vectors of keys at a time: with few queries, the sums of one vector would wait for each
// other.
constexpr int kPageVectors = 2;

// Calls use(element, keys) for all elements of the kSimdWidth keys from key t on, in the units from
// `begin` on, which are transposed in registers.
template <typename Keys, typename Use>
inline void ForEachElement(const KeyPage& page, int64_t head_dim, int64_t t, int64_t begin,
                           const Use& use) {
  const int64_t key_bytes = head_dim * Keys::kBytes, num_units = head_dim / Keys::kElements;
  const int64_t count = num_units - begin < kSimdWidth ? num_units - begin : int64_t{kSimdWidth};
  const auto load = [&](int64_t i) {
    const int64_t offset = (t + i) * key_bytes + begin * 4;
    PrefetchNext(page.next_keys, offset);
    return LoadUnits(reinterpret_cast<const float*>(page.keys + offset), count);
  };
  TransposeUnits(count, load, [&](int64_t i, Vec units) { Keys::Split(begin + i, units, use); });
}

// Stores the logits of kRows queries and a page.
template <typename Keys, int kRows>
inline void StoreKeyLogits(const KeyPage& page, const TileQueries& q, int64_t query,
                           float* logits) {
  const int64_t num_units = q.head_dim / Keys::kElements;
  const float* queries = q.queries + query * q.head_dim;
  for (int64_t t = 0; t < kTileKeys; t += kPageVectors * kSimdWidth) {
    Sums<kRows, kPageVectors> c;
    Clear<kRows, kPageVectors>(c);
    const auto add = [&](int j, int64_t element, Vec keys) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        c[r][j] = Fma(Broadcast(queries[r * q.head_dim + element]), keys, c[r][j]);
      }
    };
    for (int64_t begin = 0; begin < num_units; begin += kSimdWidth) {
#pragma GCC unroll 2
      for (int j = 0; j < kPageVectors; ++j) {
        ForEachElement<Keys>(page, q.head_dim, t + j * kSimdWidth, begin,
                             [&](int64_t element, Vec keys) { add(j, element, keys); });
      }
    }
    for (int j = 0; num_units * Keys::kElements < q.head_dim && j < kPageVectors; ++j) {
      const std::byte* keys = page.keys + (t + j * kSimdWidth) * q.head_dim * Keys::kBytes;
      add(j, q.head_dim - 1, LastElements(keys, q.head_dim));
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int j = 0; j < kPageVectors; ++j) {
        Store(logits + (query + r) * kTileKeys + t + j * kSimdWidth, c[r][j]);
      }
    }
  }
}

template <typename Keys>
void KeyLogitsOfPage(const KeyPage& page, const TileQueries& q, float* logits) {
  constexpr int64_t kMostRows = 4;
  for (int64_t query = 0; query < q.count; query += kMostRows) {
    switch (q.count - query) {
      case 1:
        return StoreKeyLogits<Keys, 1>(page, q, query, logits);
      case 2:
        return StoreKeyLogits<Keys, 2>(page, q, query, logits);
      case 3:
        return StoreKeyLogits<Keys, 3>(page, q, query, logits);
      default:
        StoreKeyLogits<Keys, 4>(page, q, query, logits);
    }
  }
}

// The products of kRows queries and the kSimdWidth keys from column `key` on. 16 bits hold the sums
// of four words: 8 * 2 * 15 * 127 is below 2^15.
template <int kRows>
inline void MultiplyCodes(const CodedQueries& q, int64_t query, const uint32_t* words, int64_t key,
                          IntVec (&sums)[static_cast<size_t>(kRows)]) {
  constexpr int64_t kWordsIn16Bits = 4;
  const uint32_t* quads = q.quads + query * 2 * q.num_words;
  for (int r = 0; r < kRows; ++r) sums[r] = IntVec{};
  for (int64_t begin = 0; begin < q.num_words; begin += kWordsIn16Bits) {
    const int64_t end = q.num_words - begin < kWordsIn16Bits ? q.num_words : begin + kWordsIn16Bits;
    ShortVec short_sums[static_cast<size_t>(kRows)] = {};
    for (int64_t w = begin; w < end; ++w) {
      const UintVec all = Bits(Load(reinterpret_cast<const float*>(words + w * kTileKeys + key)));
      const UintVec even = all & 0x0f0f0f0fu;
      const UintVec odd = all >> 4 & 0x0f0f0f0fu;
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const uint32_t* of_word = quads + 2 * (r * q.num_words + w);
        short_sums[r] += MultiplyBytes(even, of_word[0]) + MultiplyBytes(odd, of_word[1]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sums[r] += AddPairs(short_sums[r]);
  }
}

template <int kRows>
inline void StoreCodeLogits(const CodedPage& page, const CodedQueries& q, int64_t query,
                            const uint32_t* words, float* logits) {
  for (int64_t key = 0; key < kTileKeys; key += kSimdWidth) {
    IntVec sums[static_cast<size_t>(kRows)];
    MultiplyCodes<kRows>(q, query, words, key, sums);
    const Vec scale = LoadHalf(page.scales + key);
    const Vec middle = Fma(Broadcast(7.5f), scale, LoadHalf(page.zeros + key));
    for (int r = 0; r < kRows; ++r) {
      const IntVec twice = 2 * sums[r] - 15 * q.code_sums[query + r];
      const Vec product = reinterpret_cast<Vec>(__builtin_convertvector(twice, FloatVec));
      Store(logits + (query + r) * kTileKeys + key,
            Fma(scale * Broadcast(0.5f * q.steps[query + r]), product,
                middle * Broadcast(q.sums[query + r])));
    }
  }
}

void PageLogits(const CodedPage& page, const CodedQueries& q, uint32_t* transposed, float* logits) {
  const auto* words = reinterpret_cast<const float*>(page.words);
  const auto load = [&](int64_t key, int64_t begin, int64_t count) {
    return LoadUnits(words + key * q.num_words + begin, count);
  };
  ForEachUnit(q.num_words, load, [&](int64_t unit, int64_t key, Vec v) {
    Store(reinterpret_cast<float*>(transposed + unit * kTileKeys + key), v);
  });
  int64_t query = 0;
  for (; query + 4 <= q.count; query += 4) {
    StoreCodeLogits<4>(page, q, query, transposed, logits);
  }
  for (; query < q.count; ++query) StoreCodeLogits<1>(page, q, query, transposed, logits);
}

float Largest(const float* logits) {
  Vec largest = Broadcast(-__builtin_inff());
  for (int64_t t = 0; t < kTileKeys; t += kSimdWidth) {
    largest = LargerOrSecond(Load(logits + t), largest);
  }
  float lanes[kSimdWidth];
  Store(lanes, largest);
  float result = lanes[0];
  for (const float lane : lanes) result = lane > result ? lane : result;
  return result;
}

void AddWeights(const TileWeights& w, float* sums) {
  const Vec scale = Broadcast(w.scale), max = Broadcast(w.max);
  for (int64_t t = 0; t < kTileKeys; t += kSimdWidth) {
    Store(sums + t, Load(sums + t) + Exp(scale * Load(w.logits + t) - max));
  }
}

void TakeWeights(float max, float least, float* logits) {
  for (int64_t t = 0; t < kTileKeys; t += kSimdWidth) {
    const Vec below = Load(logits + t) - Broadcast(max);
    const auto counts = reinterpret_cast<UintVec>(below >= Broadcast(least));
    Store(logits + t, FromBits(Bits(Exp(below)) & counts));
  }
}

constexpr KeyTileFunctions kFunctions = {.pack_float32 = PackFloat32,
                                         .pack_bfloat16 = PackBFloat16,
                                         .pack_codes = PackCodes,
                                         .rotate = Rotate,
                                         .logits = Logits,
                                         .best = Best,
                                         .key_logits_float32 = KeyLogitsOfPage<FloatKeys>,
                                         .key_logits_bfloat16 = KeyLogitsOfPage<BFloat16Keys>,
                                         .page_logits = PageLogits,
                                         .largest = Largest,
                                         .add_weights = AddWeights,
                                         .take_weights = TakeWeights};

}  // namespace
}  // namespace kvasir::kernels
