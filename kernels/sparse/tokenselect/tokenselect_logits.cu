// Computes logits of all candidates and the sums of their softmaxes by CTAs, reading each key once.
// Each warp copies its keys page by page into shared memory, several pages ahead, decodes them
// there where the KV is quantized, and multiplies them by tensor cores. Float32 keys are read where
// they lie.
#include <algorithm>
#include <cfloat>
#include <cuda_bf16.h>

#include "kernels/base/ampere.cuh"
#include "kernels/base/head_dim.h"
#include "kernels/base/hopper.cuh"
#include "kernels/base/overlapped_launch.h"
#include "kernels/sparse/tokenselect/key_stream.cuh"
#include "kernels/sparse/tokenselect/voting_row.cuh"

namespace kvasir::kernels {
namespace {

constexpr int kGroup = static_cast<int>(kMaxCudaGroup);
constexpr float kLog2E = 1.4426950408889634f;
constexpr SoftmaxSum kEmptySum = {-INFINITY, 0};

// --- shared by both kinds of keys ---

// NaN counts as -inf, and +inf as FLT_MAX: all infinite logits get the same share of votes.
__device__ float VotingLogit(float logit) {
  return logit > -INFINITY ? fminf(logit, FLT_MAX) : -INFINITY;
}

template <int kCount>
__device__ void Add(SoftmaxSum& to, const float (&logits)[kCount]) {
  float max = to.max;
#pragma unroll
  for (int i = 0; i < kCount; ++i) max = fmaxf(max, logits[i]);
  if (max == -INFINITY) return;
  float sum = to.sum * hopper::Exp2(to.max - max);
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum += hopper::Exp2(logits[i] - max);
  to = {max, sum};
}
__device__ SoftmaxSum Merge(const SoftmaxSum& a, const SoftmaxSum& b) {
  const float max = fmaxf(a.max, b.max);
  if (max == -INFINITY) return kEmptySum;
  return {max, a.sum * hopper::Exp2(a.max - max) + b.sum * hopper::Exp2(b.max - max)};
}

// Writes the mean queries of the row's tile to means[group], by all threads of the CTA.
template <typename Query, int kHeadDim>
__device__ void LoadMeansOf(const SelectLaunch& p, const DeviceRow& row, float (*means)[kHeadDim]) {
  using Vector = KeyVector<Query>;
  constexpr int kVectors = kHeadDim / Vector::kElements;
  const int64_t heads = p.kv.layout.num_kv_heads * p.group;
  const auto* queries = static_cast<const Vector*>(p.q);
  for (int i = static_cast<int>(threadIdx.x); i < p.group * kVectors;
       i += static_cast<int>(blockDim.x)) {
    const int g = i / kVectors;
    const Vector* from = queries +
                         (row.tile.first_row * heads + row.kv_head * p.group + g) * kVectors +
                         i % kVectors;
    float sums[Vector::kElements] = {};
#pragma unroll 8
    for (int64_t r = 0; r < row.tile.num_rows; ++r) {
      const Vector part = from[r * heads * kVectors];
#pragma unroll
      for (int e = 0; e < Vector::kElements; ++e) sums[e] += static_cast<float>(part.values[e]);
    }
    float* const to = means[g] + i % kVectors * Vector::kElements;
#pragma unroll
    for (int e = 0; e < Vector::kElements; ++e) {
      to[e] = sums[e] / static_cast<float>(row.tile.num_rows);
    }
  }
  __syncthreads();
}
template <int kHeadDim>
__device__ void LoadMeans(const SelectLaunch& p, const DeviceRow& row, float (*means)[kHeadDim]) {
  p.q_dtype == DType::kFloat32 ? LoadMeansOf<float, kHeadDim>(p, row, means)
                               : LoadMeansOf<BFloat16, kHeadDim>(p, row, means);
}

// Merges kCount sums per head into the part of this CTA. The caller puts a barrier before.
template <int kCount>
__device__ void StorePart(const TokenSelectLaunch& p, const VotingRow& row,
                          const SoftmaxSum (&sums)[kCount][kGroup]) {
  if (threadIdx.x >= static_cast<unsigned>(p.select.group)) return;
  SoftmaxSum all = kEmptySum;
  for (const auto& of_some : sums) all = Merge(all, of_some[threadIdx.x]);
  p.parts[(row.at.index * p.blocks_of_row + blockIdx.y) * p.select.group + threadIdx.x] = all;
}

// --- keys in bfloat16, or decoded to it ---

constexpr int kWarps = 2;  // of a CTA; a multiprocessor has two CTAs

template <int kHeadDim>
struct LogitMemory {
  KeyRing<kHeadDim> rings[kWarps];
  float means[kGroup][kHeadDim];
  SoftmaxSum sums[kWarps][kGroup];
};

__device__ uint32_t Pair(float low, float high) {
  const __nv_bfloat162 pair = {__float2bfloat16_rn(low), __float2bfloat16_rn(high)};
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ float Rounded(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

// Means as the right operand of the products, in tiles of four heads: column 2 h is head h in
// bfloat16, column 2 h + 1 the rest that this loses. A lane reads 8 adjacent elements of a key, but
// in a product of 16 lane c of four needs 2 c, 2 c + 1, 2 c + 8 and 2 c + 9. So the elements 8 c ..
// 8 c + 7 of 32 take those places of two products, for keys and means alike.
template <int kHeadDim, int kTiles>
struct MeanTiles {
  uint32_t at[kTiles][kHeadDim / 16][2];

  __device__ MeanTiles(const float (*means)[kHeadDim], int group) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
    const bool is_rest = lane / 4 % 2 != 0;
    const auto part = [&](float x) { return is_rest ? x - Rounded(x) : x; };
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int head = tile * 4 + lane / 8;
#pragma unroll
      for (int step = 0; step < kHeadDim / 16; ++step) {
        const float* x = means[head] + step / 2 * 32 + lane % 4 * 8 + step % 2 * 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          at[tile][step][i] = head < group ? Pair(part(x[2 * i]), part(x[2 * i + 1])) : 0;
        }
      }
    }
  }
};

// Two of 16 keys in shared memory: those of the lane's rows.
template <int kHeadDim>
struct KeyRows {
  static constexpr int kParts = kHeadDim / 32;
  uint4 parts[2][kParts];

  // Rows lie in the same banks, so adjacent ones are read with their halves exchanged.
  __device__ explicit KeyRows(const std::byte* keys) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
    const bool is_odd = lane / 4 % 2 != 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto* row =
          reinterpret_cast<const uint4*>(keys + (lane / 4 + 8 * i) * kHeadDim * 2) + lane % 4;
#pragma unroll
      for (int part = 0; part < kParts; part += 2) {
        const uint4 first = row[(part + (is_odd ? 1 : 0)) * 4];
        const uint4 second = row[(part + (is_odd ? 0 : 1)) * 4];
        parts[i][part] = is_odd ? second : first;
        parts[i][part + 1] = is_odd ? first : second;
      }
    }
  }
};

// sums[tile] += the products of the 16 keys and the tile's means.
template <int kHeadDim, int kTiles>
__device__ void Multiply(const KeyRows<kHeadDim>& keys, const MeanTiles<kHeadDim, kTiles>& means,
                         float (&sums)[kTiles][4]) {
#pragma unroll
  for (int part = 0; part < KeyRows<kHeadDim>::kParts; ++part) {
    const uint4& low = keys.parts[0][part];
    const uint4& high = keys.parts[1][part];
    const uint32_t left[4] = {low.x, high.x, low.y, high.y};
    const uint32_t right[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      Mma16x8(sums[tile], left, means.at[tile][2 * part]);
      Mma16x8(sums[tile], right, means.at[tile][2 * part + 1]);
    }
  }
}

constexpr int kTileTokens = 16;
constexpr int kLaneTokens = 2 * static_cast<int>(kPageTokens) / kTileTokens;  // of a page
// Returns the lane's i-th token of a page.
__device__ int TokenOf(int i) {
  return i / 2 * kTileTokens + i % 2 * 8 + static_cast<int>(threadIdx.x) % kWarpThreads / 4;
}

// Writes the lane's logits of a page: lane c of four has head c of every tile.
template <int kHeadDim, int kTiles>
__device__ void TakeLogits(const std::byte* keys, const MeanTiles<kHeadDim, kTiles>& means,
                           float scale, float (&logits)[kTiles][kLaneTokens]) {
#pragma unroll
  for (int i = 0; i < kLaneTokens; i += 2) {
    float sums[kTiles][4] = {};
    Multiply(KeyRows<kHeadDim>(keys + i / 2 * kTileTokens * kHeadDim * 2), means, sums);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        // An infinite product has no rest.
        const float whole = sums[tile][2 * row];
        const float rest = fabsf(whole) <= FLT_MAX ? sums[tile][2 * row + 1] : 0.0f;
        logits[tile][i + row] = VotingLogit(scale * (whole + rest));
      }
    }
  }
}

template <int kHeadDim, int kTiles, bool kCoded>
__global__ void __launch_bounds__(kWarps* kWarpThreads)
    ProductKernel(const __grid_constant__ TokenSelectLaunch p) {
  extern __shared__ std::byte raw[];
  auto& memory = *reinterpret_cast<LogitMemory<kHeadDim>*>(
      (reinterpret_cast<uintptr_t>(raw) + 127) / 128 * 128);
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const VotingRow row(p, blockIdx.x);
  if (row.wanted == 0) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int64_t first = row.first_page() + int64_t{blockIdx.y} * kWarps + warp;
  const int64_t step = p.blocks_of_row * kWarps;
  KeyStream<kHeadDim, kCoded> stream(p, row, memory.rings[warp], first, step);
  LoadMeans<kHeadDim>(p.select, row.at, memory.means);
  const int group = static_cast<int>(p.select.group);
  const MeanTiles<kHeadDim, kTiles> means(memory.means, group);
  const float scale = p.select.scale * kLog2E;
  float* const to = p.logits + row.at.index * p.logits_of_row;
  SoftmaxSum own[kTiles];
  for (SoftmaxSum& sum : own) sum = kEmptySum;
  for (int64_t page = first; page < row.end_page(); page += step, stream.Next()) {
    float logits[kTiles][kLaneTokens];
    if (const std::byte* keys = stream.Wait(); keys != nullptr) {
      TakeLogits(keys, means, scale, logits);
    } else {
      for (auto& of_tile : logits) {
        for (float& logit : of_tile) logit = -INFINITY;
      }
    }
    const uint64_t candidates = row.CandidatesOf(page);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int head = tile * 4 + lane % 4;
#pragma unroll
      for (int i = 0; i < kLaneTokens; ++i) {
        // Other tokens are read with their page, but do not count.
        const bool counts = (candidates >> TokenOf(i) & 1) != 0;
        if (head < group) {
          to[head * p.max_tokens + page * kPageTokens + TokenOf(i)] = counts ? logits[tile][i] : 0;
        }
        if (!counts) logits[tile][i] = -INFINITY;
      }
      Add(own[tile], logits[tile]);
    }
  }
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    for (int distance = 4; distance < kWarpThreads; distance *= 2) {
      const SoftmaxSum other = {__shfl_xor_sync(kAllLanes, own[tile].max, distance),
                                __shfl_xor_sync(kAllLanes, own[tile].sum, distance)};
      own[tile] = Merge(own[tile], other);
    }
    if (lane < 4) memory.sums[warp][tile * 4 + lane] = own[tile];
  }
  __syncthreads();
  StorePart(p, row, memory.sums);
}

template <int kHeadDim, int kTiles>
cudaError_t LaunchProducts(const TokenSelectLaunch& p, const dim3& blocks, cudaStream_t stream) {
  constexpr int kSharedBytes = static_cast<int>(sizeof(LogitMemory<kHeadDim>)) + 128;
  const auto kernel = IsQuantized(p.select.kv.layout.dtype)
                          ? ProductKernel<kHeadDim, kTiles, true>
                          : ProductKernel<kHeadDim, kTiles, false>;
  if (const cudaError_t error = AllowSharedBytes(kernel, kSharedBytes); error != cudaSuccess) {
    return error;
  }
  return LaunchOverlapped(kernel, blocks, kWarps * kWarpThreads, kSharedBytes, stream, p);
}

// --- keys in float32 ---

constexpr int kPlainThreads = 256;
constexpr int kPlainWarps = kPlainThreads / kWarpThreads;

// As many lanes share a key as it has pieces of 16 bytes.
template <int kHeadDim>
struct PlainLanes {
  static constexpr int kElements = KeyVector<float>::kElements;
  static constexpr int kOfKey = kHeadDim / kElements;
  static constexpr int kKeys = kWarpThreads / kOfKey;  // keys that a warp reads at once
};

// Returns the logit of head g to lane g of a key: the products of the key's parts and the means,
// summed over the key's lanes.
template <int kHeadDim>
__device__ float PlainLogit(const KeyVector<float>& key, int group,
                            const float (*means)[kHeadDim]) {
  using L = PlainLanes<kHeadDim>;
  const int part = static_cast<int>(threadIdx.x) % L::kOfKey;
  float own = 0;
  for (int g = 0; g < group; ++g) {
    float sum = 0;
#pragma unroll
    for (int e = 0; e < L::kElements; ++e) {
      sum += means[g][part * L::kElements + e] * key.values[e];
    }
#pragma unroll
    for (int distance = 1; distance < L::kOfKey; distance *= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, distance);
    }
    if (part == g) own = sum;
  }
  return own;
}

template <int kHeadDim>
__global__ void __launch_bounds__(kPlainThreads, 2)
    PlainKernel(const __grid_constant__ TokenSelectLaunch p) {
  using L = PlainLanes<kHeadDim>;
  static_assert(L::kOfKey >= kGroup);
  __shared__ float means[kGroup][kHeadDim];
  __shared__ SoftmaxSum sums[kPlainWarps * L::kKeys][kGroup];
  cudaGridDependencySynchronize();
  const VotingRow row(p, blockIdx.x);
  if (row.wanted == 0) return;
  LoadMeans<kHeadDim>(p.select, row.at, means);
  const int group = static_cast<int>(p.select.group);
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int part = lane % L::kOfKey;
  float* const to = p.logits + row.at.index * p.logits_of_row;
  SoftmaxSum own = kEmptySum;  // of head `part`
  for (int64_t page = row.first_page() + int64_t{blockIdx.y} * kPlainWarps + warp;
       page < row.end_page(); page += p.blocks_of_row * kPlainWarps) {
    const std::byte* keys = FindKeys(p.select, row.at, page, p.faults);
    const uint64_t candidates = row.CandidatesOf(page);
#pragma unroll 2
    for (int first = 0; first < kPageTokens; first += L::kKeys) {
      const int token = first + lane / L::kOfKey;
      KeyVector<float> key = {};
      if (keys != nullptr) {
        key = reinterpret_cast<const KeyVector<float>*>(keys)[token * L::kOfKey + part];
      }
      const float sum = PlainLogit<kHeadDim>(key, group, means);
      if (part >= group) continue;
      const float logit[1] = {
          VotingLogit(keys != nullptr ? p.select.scale * kLog2E * sum : -INFINITY)};
      const bool counts = (candidates >> token & 1) != 0;  // other tokens are read, too
      to[part * p.max_tokens + page * kPageTokens + token] = counts ? logit[0] : 0;
      if (counts) Add(own, logit);
    }
  }
  if (part < kGroup) sums[warp * L::kKeys + lane / L::kOfKey][part] = own;
  __syncthreads();
  StorePart(p, row, sums);
}

}  // namespace

cudaError_t LaunchTokenLogits(const TokenSelectLaunch& p, const TokenSelectPlan& plan,
                              cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>(p.select.out.num_rows),
                    static_cast<unsigned>(plan.logit_ctas_of_row));
  return ForHeadDim(plan.shape.head_dim, [&]<int kHeadDim>() {
    switch (plan.logits) {
      case TokenSelectPlan::Logits::kPlain:
        break;
      case TokenSelectPlan::Logits::kOneTile:
        return LaunchProducts<kHeadDim, 1>(p, blocks, stream);
      case TokenSelectPlan::Logits::kTwoTiles:
        return LaunchProducts<kHeadDim, 2>(p, blocks, stream);
    }
    return LaunchOverlapped(PlainKernel<kHeadDim>, blocks, kPlainThreads, 0, stream, p);
  });
}

}  // namespace kvasir::kernels
