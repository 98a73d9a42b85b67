// Votes of all heads of a layer that this rank has. A thread has four tokens and adds the votes of
// the heads one after another. They are integers, so that the sum over ranks is the same on all and
// for any number of them.
#include <algorithm>

#include "kernels/base/overlapped_launch.h"
#include "kernels/sparse/tokenselect/head_votes.cuh"
#include "kernels/sparse/tokenselect/voting_row.cuh"

namespace kvasir::kernels {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kTileTokens = 4 * kThreads;
constexpr int kSoftmaxLanes = 4;

// Writes MergedParts of all heads to `sums`. By all threads.
__device__ void MergeSoftmaxes(const TokenSelectLaunch& p, const VotingRow& row, SoftmaxSum* sums) {
  const auto group = static_cast<int>(p.select.group);
  const int heads = group * static_cast<int>(p.select.kv.layout.num_kv_heads);
  for (int first = 0; first < heads; first += kThreads / kSoftmaxLanes) {
    // Some lanes of the last warps also take the last head, because all lanes must take part.
    const int head = min(first + static_cast<int>(threadIdx.x) / kSoftmaxLanes, heads - 1);
    const SoftmaxSum merged =
        MergedParts<kSoftmaxLanes>(p, row.at.index + head / group, head % group);
    if (threadIdx.x % kSoftmaxLanes == 0) sums[head] = merged;
  }
  __syncthreads();
}

// Votes for four tokens, in units of 1 / kVoteUnits.
struct alignas(16) FourVotes {
  long long of_token[4];

  __device__ void Add(const float4& logits, const SoftmaxSum& merged) {
    AddOne(0, logits.x, merged);
    AddOne(1, logits.y, merged);
    AddOne(2, logits.z, merged);
    AddOne(3, logits.w, merged);
  }

 private:
  __device__ void AddOne(int i, float logit, const SoftmaxSum& merged) {
    of_token[i] += __float2ll_rn(VoteOf(logit, merged) * static_cast<float>(kVoteUnits));
  }
};

// Groups have at most kHeads heads: that many loads are in flight together, and as many again.
template <int kHeads>
__global__ void __launch_bounds__(kThreads)
    LayerVotesKernel(const __grid_constant__ TokenSelectLaunch p) {
  __shared__ SoftmaxSum sums[kMostVoters];
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const auto kv_heads = static_cast<int>(p.select.kv.layout.num_kv_heads);
  const VotingRow row(p, blockIdx.x * static_cast<unsigned>(kv_heads));  // the layer's first row
  const int64_t first = row.first_page() * kPageTokens + int64_t{blockIdx.y} * kTileTokens;
  const int64_t end = row.end_page() * kPageTokens;
  const int64_t tile = blockIdx.x;
  if (blockIdx.y == 0 && threadIdx.x == 0) {
    p.layer_tokens[tile] =
        row.wanted == 0 ? 0 : static_cast<int32_t>(end - row.first_page() * kPageTokens);
  }
  if (row.wanted == 0 || first >= end) return;
  MergeSoftmaxes(p, row, sums);
  const auto group = static_cast<int>(p.select.group);
  int64_t* const to = p.layer_votes + tile * p.max_tokens - row.first_page() * kPageTokens;
  for (int64_t token = first + 4 * threadIdx.x; token < end; token += gridDim.y * kTileTokens) {
    const float* const logits = p.logits + row.at.index * p.logits_of_row + token;
    FourVotes votes = {};
#pragma unroll 2
    for (int kv_head = 0; kv_head < kv_heads; ++kv_head) {
      float4 of_head[kHeads];
#pragma unroll
      for (int g = 0; g < kHeads; ++g) {
        const float* from = logits + kv_head * p.logits_of_row + g * p.max_tokens;
        of_head[g] = g < group ? *reinterpret_cast<const float4*>(from) : float4{};
      }
#pragma unroll
      for (int g = 0; g < kHeads; ++g) {
        if (g < group) votes.Add(of_head[g], sums[kv_head * group + g]);
      }
    }
    *reinterpret_cast<FourVotes*>(to + token) = votes;
  }
}

}  // namespace

cudaError_t LaunchLayerVotes(const TokenSelectLaunch& p, cudaStream_t stream) {
  const int64_t kv_heads = p.select.kv.layout.num_kv_heads;
  const int64_t tiles = (p.max_tokens + kTileTokens - 1) / kTileTokens;
  // Four times as many as the CTAs that compute logits, because those are larger.
  const dim3 blocks(static_cast<unsigned>(p.select.out.num_rows / kv_heads),
                    static_cast<unsigned>(std::min(tiles, 4 * p.blocks_of_row * kv_heads)));
  const auto kernel = p.select.group <= 4 ? LayerVotesKernel<4> : LayerVotesKernel<8>;
  return LaunchOverlapped(kernel, blocks, kThreads, 0, stream, p);
}

}  // namespace kvasir::kernels
