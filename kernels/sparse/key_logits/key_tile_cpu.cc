#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/append/key_code_math.h"
#include "kernels/base/cpu_isa.h"
#include "kernels/base/dtype.h"
#include "kernels/base/float16.h"
#include "kernels/sparse/key_logits/key_tile.h"

namespace kvasir::kernels {
namespace {

template <typename T>
void PackKeys(const void* const* keys, int64_t head_dim, float* tile) {
  for (int64_t t = 0; t < kTileKeys; ++t) {
    const T* key = static_cast<const T*>(keys[t]);
    for (int64_t i = 0; i < head_dim; ++i) {
      tile[i * kTileKeys + t] = key == nullptr ? 0.0f : static_cast<float>(key[i]);
    }
  }
}

void PackCodes(const CodedKeys& keys, int64_t head_dim, float* tile) {
  for (int64_t t = 0; t < kTileKeys; ++t) {
    for (int64_t i = 0; i < head_dim; ++i) {
      const uint32_t code = keys.words[t] == nullptr ? 0 : KeyCode(keys.words[t], i);
      tile[i * kTileKeys + t] = static_cast<float>(code) * keys.scales[t] + keys.zeros[t];
    }
  }
}

void Rotate(const float* cos, const float* sin, int64_t head_dim, float* tile) {
  const int64_t half = head_dim / 2 * kTileKeys;
  for (int64_t i = 0; i < half; ++i) {
    const float a = tile[i], b = tile[i + half];
    tile[i] = a * cos[i] - b * sin[i];
    tile[i + half] = b * cos[i] + a * sin[i];
  }
}

float Logit(const TileQueries& q, int64_t query, const float* tile, int64_t t) {
  float sum = 0;
  for (int64_t i = 0; i < q.head_dim; ++i) {
    sum = std::fma(q.queries[query * q.head_dim + i], tile[i * kTileKeys + t], sum);
  }
  return sum;
}

void Logits(const TileQueries& q, const float* tile, float* logits) {
  for (int64_t query = 0; query < q.count; ++query) {
    for (int64_t t = 0; t < kTileKeys; ++t) {
      logits[query * kTileKeys + t] = Logit(q, query, tile, t);
    }
  }
}

void Best(const TileQueries& q, const float* tile, float* best) {
  std::fill_n(best, kTileKeys, -std::numeric_limits<float>::infinity());
  for (int64_t query = 0; query < q.count; ++query) {
    for (int64_t t = 0; t < kTileKeys; ++t) {
      best[t] = std::max(best[t], Logit(q, query, tile, t));  // leaves out NaN
    }
  }
}

template <typename T>
void KeyLogitsOfPage(const KeyPage& page, const TileQueries& q, float* logits) {
  const T* keys = reinterpret_cast<const T*>(page.keys);
  for (int64_t query = 0; query < q.count; ++query) {
    for (int64_t t = 0; t < kTileKeys; ++t) {
      float sum = 0;
      for (int64_t i = 0; i < q.head_dim; ++i) {
        const auto element = static_cast<float>(keys[t * q.head_dim + i]);
        sum = std::fma(q.queries[query * q.head_dim + i], element, sum);
      }
      logits[query * kTileKeys + t] = sum;
    }
  }
}

void PageLogits(const CodedPage& page, const CodedQueries& q, uint32_t*, float* logits) {
  const auto half_float = [](uint16_t bits) {
    Float16 half;
    half.bits = bits;
    return static_cast<float>(half);
  };
  for (int64_t query = 0; query < q.count; ++query) {
    const uint32_t* quads = q.quads + query * 2 * q.num_words;
    for (int64_t t = 0; t < kTileKeys; ++t) {
      int32_t sum = 0;
      for (int64_t n = 0; n < 8 * q.num_words; ++n) {
        const uint32_t code = page.words[t * q.num_words + n / 8] >> (4 * (n % 8)) & 15;
        const uint32_t quad = quads[n / 8 * 2 + n % 2];
        sum += static_cast<int32_t>(code) * static_cast<int8_t>(quad >> (8 * (n % 8 / 2)) & 255);
      }
      const float scale = half_float(page.scales[t]), zero = half_float(page.zeros[t]);
      logits[query * kTileKeys + t] = std::fma(
          scale * (0.5f * q.steps[query]), static_cast<float>(2 * sum - 15 * q.code_sums[query]),
          std::fma(7.5f, scale, zero) * q.sums[query]);
    }
  }
}

float Largest(const float* logits) {
  float largest = -std::numeric_limits<float>::infinity();
  for (int64_t t = 0; t < kTileKeys; ++t) largest = std::max(largest, logits[t]);  // leaves out NaN
  return largest;
}

// The same operations in the same order as dense/simd_exp.h.
float Exp(float x) {
  if (std::isnan(x)) return x;
  x = std::clamp(x, -88.0f, 89.0f);
  const float n = std::nearbyint(x * 1.44269504f);
  const float r = std::fma(n, 2.12194440e-4f, std::fma(n, -0.693359375f, x));
  float p = 1.0f / 5040;
  for (const float factor : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
    p = std::fma(p, r, factor);
  }
  return std::ldexp(p, static_cast<int>(n));
}

void AddWeights(const TileWeights& w, float* sums) {
  for (int64_t t = 0; t < kTileKeys; ++t) sums[t] += Exp(w.scale * w.logits[t] - w.max);
}

void TakeWeights(float max, float least, float* logits) {
  for (int64_t t = 0; t < kTileKeys; ++t) {
    const float below = logits[t] - max;
    logits[t] = below >= least ? Exp(below) : 0.0f;
  }
}

}  // namespace

const KeyTileFunctions kKeyTilePlain = {.pack_float32 = PackKeys<float>,
                                        .pack_bfloat16 = PackKeys<BFloat16>,
                                        .pack_codes = PackCodes,
                                        .rotate = Rotate,
                                        .logits = Logits,
                                        .best = Best,
                                        .key_logits_float32 = KeyLogitsOfPage<float>,
                                        .key_logits_bfloat16 = KeyLogitsOfPage<BFloat16>,
                                        .page_logits = PageLogits,
                                        .largest = Largest,
                                        .add_weights = AddWeights,
                                        .take_weights = TakeWeights};

const KeyTileFunctions& ChosenKeyTile() {
  return *ChooseForm<const KeyTileFunctions>({.portable = &kKeyTilePlain,
                                              .neon = KVASIR_ON_ARM(&kKeyTileNeon),
                                              .avx2 = KVASIR_ON_X86(&kKeyTileAvx2),
                                              .avx512 = KVASIR_ON_X86(&kKeyTileAvx512)});
}

}  // namespace kvasir::kernels
