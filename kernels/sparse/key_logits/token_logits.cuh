// Logits of coded keys (kernels/append/key_codes.h) for the bfloat16 queries of one token, by the
// warp's matrix product. A warp takes 32 keys at a time, straight from memory into registers. Codes
// are operands as they lie in their words: as float16 numbers with so few bits they are subnormal,
// a code x 2^-24, or 16 times that. Queries are float16 numbers, too, scaled by powers of two so
// that no bit is lost. For kernels of decode; key_code_logits.cuh serves any queries.
//
//   a product   rows     sixteen keys, of which lane 4 g + t has g and g + 8
//               columns  eight queries; the lane gives elements of query g and gets the products
//                        with queries 2 t and 2 t + 1
//               depth    16 elements, of which the lane has four: t's share of a head is
//                        kHeadDim / 4 adjacent elements
#pragma once

#include <bit>
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <type_traits>

#include "kernels/append/key_code_math.h"
#include "kernels/base/ampere.cuh"
#include "kernels/base/hopper.cuh"
#include "kernels/sparse/common/select_row.cuh"

namespace kvasir::kernels {

// Eight queries in shared memory, laid out for the lanes of a warp.
template <int kHeadDim>
class TokenQueries {
 public:
  static constexpr int kSteps = kHeadDim / 16;
  static constexpr int kQueries = 8;

  // Loads the queries of the row's only token. Places after the last query repeat it, which changes
  // no maximum. Each warp takes one query. By all threads of the CTA, which has at least eight
  // warps.
  __device__ void Load(const SelectLaunch& p, const DeviceRow& row) {
    const int query = static_cast<int>(threadIdx.x) / kWarpThreads;
    if (query >= kQueries) return;
    const auto group = static_cast<int>(p.group);
    const auto* const from =
        static_cast<const __nv_bfloat162*>(p.q) +
        ((row.tile.first_row * p.kv.layout.num_kv_heads + row.kv_head) * group +
         min(query, group - 1)) *
            (kHeadDim / 2);
    const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
    float2 own[kLanePairs];
    float greatest = 0;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kLanePairs; ++i) {
      own[i] = __bfloat1622float2(from[lane * kLanePairs + i]);
      greatest = fmaxf(greatest, fmaxf(fabsf(own[i].x), fabsf(own[i].y)));
      sum += own[i].x + own[i].y;
    }
    greatest = __uint_as_float(__reduce_max_sync(kAllLanes, __float_as_uint(greatest)));
#pragma unroll
    for (int distance = 1; distance < kWarpThreads; distance *= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, distance);
    }
    // As float16 the largest element is in [2^14, 2^15).
    const int exponent = min(max(static_cast<int>(__float_as_uint(greatest) >> 23), 14), 244);
    const float scale = __uint_as_float(static_cast<uint32_t>(268 - exponent) << 23);
    const float back = __uint_as_float(static_cast<uint32_t>(exponent + 10) << 23);
#pragma unroll
    for (int i = 0; i < kLanePairs; ++i) {
      const int pair = lane * kLanePairs + i;
      const int of_share = pair % kSharePairs;
      // Every other pair of codes counts 16 times.
      const float half = of_share % 2 == 0 ? scale : scale / 16;
      const __half2 rounded = __floats2half2_rn(own[i].x * half, own[i].y * half);
      operands_[of_share / 2][4 * query + pair / kSharePairs].parts[of_share % 2] =
          reinterpret_cast<const uint32_t&>(rounded);
    }
    if (lane == 0) factors_[query] = {isfinite(sum) ? back : NAN, sum};
  }

  struct Operand {
    uint32_t parts[2];
  };
  // The lane's part of the operand of a step.
  __device__ Operand operand(int step) const { return operands_[step][threadIdx.x % kWarpThreads]; }
  // The unscaled logit q . k~ of query 2 t + i and a key, from the product of its codes.
  __device__ float Logit(int i, float product, float key_scale, float key_zero) const {
    const float2 factors = factors_[threadIdx.x % 4 * 2 + i];
    return key_scale * (factors.x * product) + key_zero * factors.y;
  }

 private:
  static constexpr int kLanePairs = kHeadDim / 2 / kWarpThreads;  // pairs that a lane loads
  static constexpr int kSharePairs = kHeadDim / 8;                // pairs that a lane multiplies

  alignas(8) Operand operands_[kSteps][kWarpThreads];
  float2 factors_[kQueries];  // factor of products (NaN: query not finite), sum of elements
};

// A lane's part of 32 keys, in registers.
template <int kHeadDim>
class TokenKeys {
 public:
  static constexpr int kKeys = 4;  // of a lane: key lane / 4 and every eighth key after it

  // Prefetches half of 32 adjacent keys to the L2 cache: those from this token of a page on, or
  // those up to it. May fetch others, too.
  __device__ static void Prefetch(const KvLayout& pages, const std::byte* page, int64_t token,
                                  bool is_last) {
    constexpr int kLineBytes = 128;
    constexpr int kLines = kWarpThreads / 2 * (kHeadDim / 2) / kLineBytes + 1;
    const TokenCodes codes(pages, page, token);
    const auto* const words = reinterpret_cast<const std::byte*>(codes.words);
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      hopper::PrefetchLine(words + (is_last ? -i : i) * kLineBytes);
    }
    hopper::PrefetchLine(codes.scale);
    hopper::PrefetchLine(codes.zero);
  }

  // Loads the adjacent keys from token `begin` on, in the pages `first` and `last` (codes; null:
  // there are none, and their logits are NaN).
  __device__ void Load(const KvLayout& pages, const std::byte* first, const std::byte* last,
                       int begin) {
    constexpr int kPage = static_cast<int>(kPageTokens);
    KvLayout layout = pages;
    layout.head_dim = kHeadDim;  // a constant, so that offsets made from it are constants
    const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int token = begin + lane / 4 + 8 * i;
      const std::byte* const page = token / kPage == begin / kPage ? first : last;
      words_[i] = {};
      scales_[i] = __ushort_as_half(0);
      zeros_[i] = __ushort_as_half(0x7e00);  // NaN
      if (page == nullptr) continue;
      const TokenCodes codes(layout, page, token % kPage);
      words_[i] = __ldg(reinterpret_cast<const Words*>(codes.words) + lane % 4);
      scales_[i] = __ldg(reinterpret_cast<const __half*>(codes.scale));
      zeros_[i] = __ldg(reinterpret_cast<const __half*>(codes.zero));
    }
  }

  // Writes the best logit of the lane's queries with its key i, ignoring NaN. By all lanes.
  __device__ void BestLogits(const TokenQueries<kHeadDim>& queries, float (&best)[kKeys]) const {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const auto upper = std::bit_cast<Array>(words_[2 * tile]);
      const auto lower = std::bit_cast<Array>(words_[2 * tile + 1]);
      float products[4] = {};
#pragma unroll
      for (int step = 0; step < TokenQueries<kHeadDim>::kSteps; ++step) {
        const int shift = step % 2 * 8;
        const uint32_t rows[2] = {upper.of[step / 2] >> shift, lower.of[step / 2] >> shift};
        const uint32_t codes[4] = {rows[0] & 0x000f000fu, rows[1] & 0x000f000fu,
                                   rows[0] & 0x00f000f0u, rows[1] & 0x00f000f0u};
        Mma16x8Float16(products, codes, queries.operand(step).parts);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = 2 * tile + i;
        const float scale = __half2float(scales_[key]);
        const float zero = __half2float(zeros_[key]);
        best[key] = fmaxf(fmaxf(-INFINITY, queries.Logit(0, products[2 * i], scale, zero)),
                          queries.Logit(1, products[2 * i + 1], scale, zero));
      }
    }
  }

 private:
  using Words = std::conditional_t<kHeadDim == 128, uint4, uint2>;
  struct Array {
    uint32_t of[kHeadDim / 32];
  };

  Words words_[kKeys];
  __half scales_[kKeys];
  __half zeros_[kKeys];
};

}  // namespace kvasir::kernels
