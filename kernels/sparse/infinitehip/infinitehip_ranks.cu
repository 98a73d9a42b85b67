// The scores of a stage of infinitehip before ranks make theirs one, where the heads of a layer lie
// on several ranks: a thread has a chunk of a query tile and takes the best score of this rank's
// heads.
#include <algorithm>

#include "kernels/base/overlapped_launch.h"
#include "kernels/sparse/infinitehip/chunk_row.cuh"
#include "kernels/sparse/infinitehip/infinitehip_launch.h"
#include "kernels/sparse/reuse/reuse_row.cuh"

namespace kvasir::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 16;  // CTAs of a query tile

// Returns the number of chunks that the stage chooses from; 0: it does not run, or keeps all.
__device__ uint32_t NumScored(const InfiniteHipLaunch& p, const ChunkRow& row, int stage) {
  const RowReuse reuse(p.select, row.at);
  const int first_stage = reuse.FirstStage(row.header);
  if (first_stage > stage) return 0;
  if (stage == 0) return row.chooses() ? row.count : 0;
  const InfiniteHipLaunch::Stage& before = p.stages[stage - 1];
  const InfiniteHipLaunch::Stage& now = p.stages[stage];
  const int32_t left = first_stage == stage ? reuse.remembered().kept[stage - 1]
                                            : p.kept[stage - 1].counts[row.at.index];
  const int64_t chunks = left * (before.chunk_tokens / now.chunk_tokens);
  return chunks > now.KeptChunks(row.at.numbers.budget_tokens) ? static_cast<uint32_t>(chunks) : 0;
}

// Returns the best score of a chunk over the rank's heads.
__device__ uint32_t BestOf(const InfiniteHipLaunch& p, const ChunkRow& row, int stage,
                           uint32_t chunk) {
  if (stage == 0) return row.ScoreInMemory(p, chunk);
  const InfiniteHipLaunch::Rows together = p.Together(row.at.index);
  uint32_t best = 0;
  for (int64_t head = together.begin; head < together.end; ++head) {
    best = max(best, p.ScoresOf(stage)[head * p.max_chunks + chunk]);
  }
  return best;
}

__global__ void __launch_bounds__(kThreads)
    RankScoresKernel(const __grid_constant__ InfiniteHipLaunch p, const int stage) {
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const auto heads = static_cast<uint32_t>(p.select.kv.layout.num_kv_heads);
  const ChunkRow row(p, blockIdx.x * heads);  // the tile's first
  const uint32_t scored = NumScored(p, row, stage);
  if (blockIdx.y == 0 && threadIdx.x == 0) p.rank_chunks[blockIdx.x] = static_cast<int32_t>(scored);
  uint32_t* const to = p.RankScores(row.at.index);
  for (uint32_t i = blockIdx.y * kThreads + threadIdx.x; i < scored; i += gridDim.y * kThreads) {
    to[i] = BestOf(p, row, stage, i);
  }
}

}  // namespace

cudaError_t LaunchInfiniteHipRankScores(const InfiniteHipLaunch& p, int stage,
                                        cudaStream_t stream) {
  const int64_t tiles = p.select.out.num_rows / p.select.kv.layout.num_kv_heads;
  const int64_t useful = (p.max_chunks + kThreads - 1) / kThreads;
  const dim3 blocks(static_cast<unsigned>(tiles),
                    static_cast<unsigned>(std::min(useful, kMostBlocks)));
  return LaunchOverlapped(RankScoresKernel, blocks, kThreads, 0, stream, p, stage);
}

}  // namespace kvasir::kernels
