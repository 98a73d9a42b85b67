// Logits of coded keys (kernels/paged/key_codes.h) on the GPU: a lane takes a token, queries lie in
// shared memory, where all lanes read the same. Keys are multiplied as they are coded, or decoded
// and rotated to places of their own. For kernels of selectors and pruners.
#pragma once

#include <cstdint>

#include "kernels/paged/key_code_math.h"
#include "kernels/sparse/select_row.cuh"

namespace kvasir::kernels {

// Queries as ForEachLogit wants them: [count][kHeadDim], and the sum of each.
template <int kHeadDim>
struct CodeQueries {
  float (*elements)[kHeadDim];
  float* sums;
};

// By all threads of the block; a barrier before the use is the caller's.
// element(query, i) gives what is to be stored.
template <int kHeadDim, typename Element>
__device__ void StoreCodeQueries(const CodeQueries<kHeadDim>& to, int count,
                                 const Element& element) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int num_warps = static_cast<int>(blockDim.x) / kWarpThreads;
  for (int query = static_cast<int>(threadIdx.x) / kWarpThreads; query < count;
       query += num_warps) {
    float own[kHeadDim / kWarpThreads];  // read side by side
#pragma unroll
    for (int i = 0; i < kHeadDim / kWarpThreads; ++i) {
      own[i] = element(query, lane + i * kWarpThreads);
    }
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kHeadDim / kWarpThreads; ++i) {
      to.elements[query][lane + i * kWarpThreads] = own[i];
      sum += own[i];
    }
    for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, distance);
    }
    if (lane == 0) to.sums[query] = sum;
  }
}

// A key's codes and grid, read once for all queries.
template <int kHeadDim>
struct CodedKey {
  static constexpr int kWords = kHeadDim / static_cast<int>(kWordCodes);

  // `page` is the page's codes, `token` counts from its start.
  __device__ void Load(const KvLayout& layout, const std::byte* page, int64_t token) {
    const TokenCodes codes(layout, page, token);
    const auto* from = reinterpret_cast<const uint4*>(codes.words);
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      const uint4 four = from[i];
      words[4 * i] = four.x;
      words[4 * i + 1] = four.y;
      words[4 * i + 2] = four.z;
      words[4 * i + 3] = four.w;
    }
    scale = static_cast<float>(*codes.scale);
    zero = static_cast<float>(*codes.zero);
  }

  uint32_t words[kWords];
  float scale;
  float zero;
};

// The code of element 8 w + i, as a float, of word w: small integers are the low bits of 2^23 + n.
__device__ inline float CodeOf(uint32_t word, int i) {
  const uint32_t code = word >> (4 * (i / 2 + i % 2 * 4)) & 15u;
  return __uint_as_float(0x4b000000u | code) - 8388608.0f;
}

// Queries whose logits a lane sums side by side.
inline constexpr int kLogitsAtOnce = 4;

// A key as floats.
template <int kHeadDim>
struct PlainKey {
  float elements[kHeadDim];
};

// A key decoded, and rotated to a position.
template <int kHeadDim>
struct PlacedKey : PlainKey<kHeadDim> {
  using PlainKey<kHeadDim>::elements;

  __device__ PlacedKey(const CodedKey<kHeadDim>& key, const RotationAt& at) {
    constexpr int kHalf = kHeadDim / 2;
#pragma unroll
    for (int i = 0; i < kHeadDim; ++i) {
      elements[i] = key.scale * CodeOf(key.words[i / kWordCodes], i % kWordCodes) + key.zero;
    }
#pragma unroll
    for (int i = 0; i < kHalf; i += 4) {
      const float4 cos = __ldg(reinterpret_cast<const float4*>(at.cos + i));
      const float4 sin = __ldg(reinterpret_cast<const float4*>(at.sin + i));
      Turn(elements[i], elements[i + kHalf], cos.x, sin.x);
      Turn(elements[i + 1], elements[i + 1 + kHalf], cos.y, sin.y);
      Turn(elements[i + 2], elements[i + 2 + kHalf], cos.z, sin.z);
      Turn(elements[i + 3], elements[i + 3 + kHalf], cos.w, sin.w);
    }
  }

 private:
  static __device__ void Turn(float& x, float& y, float cos, float sin) {
    const float turned = x * cos - y * sin;
    y = y * cos + x * sin;
    x = turned;
  }
};

// Calls use(q, q . k~), not scaled, for the queries [0, count). REQUIRES: queries are stored up to
// the next multiple of kLogitsAtOnce.
template <int kHeadDim, typename Use>
__device__ void ForEachLogit(const CodedKey<kHeadDim>& key, const CodeQueries<kHeadDim>& queries,
                             int count, const Use& use) {
#pragma unroll 1
  for (int first = 0; first < count; first += kLogitsAtOnce) {
    float sums[kLogitsAtOnce] = {};
#pragma unroll
    for (int w = 0; w < CodedKey<kHeadDim>::kWords; ++w) {
      float codes[kWordCodes];
#pragma unroll
      for (int i = 0; i < kWordCodes; ++i) codes[i] = CodeOf(key.words[w], i);
#pragma unroll
      for (int q = 0; q < kLogitsAtOnce; ++q) {
        const auto* elements =
            reinterpret_cast<const float4*>(&queries.elements[first + q][w * kWordCodes]);
        const float4 low = elements[0];
        const float4 high = elements[1];
        sums[q] += low.x * codes[0] + low.y * codes[1] + low.z * codes[2] + low.w * codes[3] +
                   high.x * codes[4] + high.y * codes[5] + high.z * codes[6] + high.w * codes[7];
      }
    }
#pragma unroll
    for (int q = 0; q < kLogitsAtOnce; ++q) {
      if (first + q < count)
        use(first + q, key.scale * sums[q] + key.zero * queries.sums[first + q]);
    }
  }
}

template <int kHeadDim, typename Use>
__device__ void ForEachLogit(const PlainKey<kHeadDim>& key, const CodeQueries<kHeadDim>& queries,
                             int count, const Use& use) {
#pragma unroll 1
  for (int first = 0; first < count; first += kLogitsAtOnce) {
    float sums[kLogitsAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kHeadDim; i += 4) {
#pragma unroll
      for (int q = 0; q < kLogitsAtOnce; ++q) {
        const float4 x = *reinterpret_cast<const float4*>(&queries.elements[first + q][i]);
        sums[q] += x.x * key.elements[i] + x.y * key.elements[i + 1] + x.z * key.elements[i + 2] +
                   x.w * key.elements[i + 3];
      }
    }
#pragma unroll
    for (int q = 0; q < kLogitsAtOnce; ++q) {
      if (first + q < count) use(first + q, sums[q]);
    }
  }
}

}  // namespace kvasir::kernels
