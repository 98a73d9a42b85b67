#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/base/dtype.h"
#include "kernels/paged/key_code_math.h"
#include "kernels/sparse/key_tile.h"

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

}  // namespace

const KeyTileFunctions kKeyTilePlain = {.pack_float32 = PackKeys<float>,
                                        .pack_bfloat16 = PackKeys<BFloat16>,
                                        .pack_codes = PackCodes,
                                        .rotate = Rotate,
                                        .logits = Logits,
                                        .best = Best};

}  // namespace kvasir::kernels
