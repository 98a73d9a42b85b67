// The arithmetic of KeyLogits (key_logits.h), in its own header so that vector code and the plain
// reference can be compared. 64 keys are made a tile, in float32 and transposed, which is
// multiplied with many queries:
//
//   tile   [head_dim][kTileKeys]   element i of key t at tile[i * kTileKeys + t]
//   logit  = fma(q_d-1, k_d-1, ... fma(q_1, k_1, fma(q_0, k_0, 0)))
//
// A chain of fused operations is the same on every machine and for any number of queries, so all
// forms of a function give the same bits (a NaN stays some NaN).
//
// This header is included by files compiled with instructions that the machine may lack (see
// base/simd_units.h), so it holds plain data only. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvasir::kernels {

inline constexpr int64_t kTileKeys = 64;

// Addresses of key codes (paged/key_codes.h), with their scales and zeros.
struct CodedKeys {
  const uint32_t* words[kTileKeys];  // null: a key whose elements all are its zero
  float scales[kTileKeys];
  float zeros[kTileKeys];
};

struct TileQueries {
  const float* queries = nullptr;  // [count, head_dim]
  int64_t count = 0;
  int64_t head_dim = 0;
};

// Queries in 8 bits for keys in 4: q_i ~ step * code_i, all codes in [-127, 127].
struct CodedQueries {
  const uint32_t* quads = nullptr;     // [count, 2 * num_words], four codes each: those of the
                                       // elements in a word's even nibbles, then in its odd ones
  const float* steps = nullptr;        // [count]
  const int32_t* code_sums = nullptr;  // [count]
  const float* sums = nullptr;         // [count], of the queries' elements
  int64_t count = 0;
  int64_t num_words = 0;  // of a key
};

// The codes of a page as stored.
struct CodedPage {
  const uint32_t* words;   // [kTileKeys, num_words]
  const uint16_t* scales;  // [kTileKeys] float16
  const uint16_t* zeros;
};

// The keys of a page as stored.
struct KeyPage {
  const std::byte* keys = nullptr;       // [kTileKeys, head_dim]
  const std::byte* next_keys = nullptr;  // keys read next, or null; a prefetch hint
};

// Weights exp(scale * logit - max) of kTileKeys keys. REQUIRES: max is not below scale * logit.
struct TileWeights {
  const float* logits = nullptr;
  float scale = 1;
  float max = 0;
};

// One implementation of the functions, for any head_dim.
struct KeyTileFunctions {
  // Make a tile of rows of head_dim elements. A null row becomes zeros.
  void (*pack_float32)(const void* const keys[kTileKeys], int64_t head_dim, float* tile);
  void (*pack_bfloat16)(const void* const keys[kTileKeys], int64_t head_dim, float* tile);
  void (*pack_codes)(const CodedKeys& keys, int64_t head_dim, float* tile);
  // Rotates key t by the angles in column t of `cos` and `sin` [head_dim / 2][kTileKeys], with the
  // bits of ApplyRope (dense/rope.h).
  void (*rotate)(const float* cos, const float* sin, int64_t head_dim, float* tile);
  // logits [count, kTileKeys]
  void (*logits)(const TileQueries& queries, const float* tile, float* logits);
  // best [kTileKeys]: the largest logit of the queries, a NaN counting as -inf.
  void (*best)(const TileQueries& queries, const float* tile, float* best);
  // logits [count, kTileKeys] of a page's tokens, with the bits of pack_* and `logits`, but without
  // the tile: for few queries, each key is read once.
  void (*key_logits_float32)(const KeyPage& page, const TileQueries& queries, float* logits);
  void (*key_logits_bfloat16)(const KeyPage& page, const TileQueries& queries, float* logits);
  // logits [count, kTileKeys] of a page's tokens, by sums of integers: with codes c of a key and e
  // of a query
  //   scale * step / 2 * sum (2 c_i - 15) e_i + (zero + 7.5 scale) * sum q_i
  // `transposed` is memory of [num_words, kTileKeys].
  void (*page_logits)(const CodedPage& page, const CodedQueries& queries, uint32_t* transposed,
                      float* logits);
  // Returns the largest of kTileKeys logits that is not NaN; -inf if there is none.
  float (*largest)(const float* logits);
  // sums [kTileKeys] += weights, each within 2 units in the last place, or exp(-88) where it is
  // smaller. NaN stays.
  void (*add_weights)(const TileWeights& weights, float* sums);
  // Replaces kTileKeys logits x by exp(x - max), within 2 units in the last place, where x - max is
  // at least `least`; else, and for NaN, by 0. REQUIRES: max is finite and least >= -88.
  void (*take_weights)(float max, float least, float* logits);
};

// The fastest implementation for this machine.
const KeyTileFunctions& ChosenKeyTile();

extern const KeyTileFunctions kKeyTilePlain;
extern const KeyTileFunctions kKeyTileNeon;
extern const KeyTileFunctions kKeyTileAvx2;
extern const KeyTileFunctions kKeyTileAvx512;

}  // namespace kvasir::kernels
