// Votes of all heads of a layer: a thread has four tokens, and adds what the heads give them, one
// after another.
#include <algorithm>

#include "kernels/base/overlapped_launch.h"
#include "kernels/sparse/tokenselect/head_votes.cuh"
#include "kernels/sparse/tokenselect/voting_row.cuh"

namespace kvasir::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kTileTokens = 4 * kThreads;

__global__ void __launch_bounds__(kThreads)
    LayerVotesKernel(const __grid_constant__ TokenSelectLaunch p) {
  __shared__ SoftmaxSum sums[kMostVoters];
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const auto kv_heads = static_cast<int>(p.select.kv.layout.num_kv_heads);
  const VotingRow row(p, blockIdx.x * static_cast<unsigned>(kv_heads));  // the layer's first
  const int64_t first = row.first_page() * kPageTokens + int64_t{blockIdx.y} * kTileTokens;
  const int64_t end = row.end_page() * kPageTokens;
  if (row.wanted == 0 || first >= end) return;
  const auto group = static_cast<int>(p.select.group);
  for (int head = static_cast<int>(threadIdx.x) / kWarpThreads; head < kv_heads * group;
       head += kThreads / kWarpThreads) {
    const SoftmaxSum merged = MergedParts(p, row.at.index + head / group, head % group);
    if (threadIdx.x % kWarpThreads == 0) sums[head] = merged;
  }
  __syncthreads();
  for (int64_t token = first + 4 * threadIdx.x; token < end; token += gridDim.y * kTileTokens) {
    float4 votes = {};
    for (int kv_head = 0; kv_head < kv_heads; ++kv_head) {
      const float* const logits = p.logits + (row.at.index + kv_head) * p.logits_of_row + token;
#pragma unroll 4
      for (int g = 0; g < group; ++g) {
        AddVotes(*reinterpret_cast<const float4*>(logits + g * p.max_tokens),
                 sums[kv_head * group + g], votes);
      }
    }
    *reinterpret_cast<float4*>(p.votes + row.at.index * p.max_tokens + token) = votes;
  }
}

}  // namespace

cudaError_t LaunchLayerVotes(const TokenSelectLaunch& p, cudaStream_t stream) {
  const int64_t kv_heads = p.select.kv.layout.num_kv_heads;
  const int64_t tiles = (p.max_tokens + kTileTokens - 1) / kTileTokens;
  const dim3 blocks(static_cast<unsigned>(p.select.out.num_rows / kv_heads),
                    static_cast<unsigned>(std::min(tiles, p.blocks_of_row * kv_heads)));
  return LaunchOverlapped(LayerVotesKernel, blocks, kThreads, 0, stream, p);
}

}  // namespace kvasir::kernels
