// The first stage of infinitehip on the GPU, which chooses among all chunks; decode has its own
// (infinitehip_decode.cu). A chunk's score is the best of its pages' scores by quest, which
// page_scores.cu has made. In chunk-indexed layers infinitehip_chunks.cu has scored the chunks.
#include "kernels/base/overlapped_launch.h"
#include "kernels/sparse/common/block_select.cuh"
#include "kernels/sparse/infinitehip/chunk_row.cuh"
#include "kernels/sparse/infinitehip/infinitehip_launch.h"
#include "kernels/sparse/reuse/reuse_row.cuh"

namespace kvasir::kernels {
namespace {

// Keeps the best chunks by scores in shared memory, or all where there is room.
__device__ void KeepBestChunks(const InfiniteHipLaunch& p, const ChunkRow& row,
                               const RowReuse& reuse, const uint32_t* scores,
                               SelectMemory& memory) {
  int32_t* const begins = p.kept[0].begins + row.at.index * p.max_chunks;
  const auto keep = [&](int64_t place, int64_t chunk, uint32_t) {
    const auto begin = static_cast<int32_t>(row.BeginOf(static_cast<uint32_t>(chunk)));
    begins[place] = begin;
    if (reuse.remembers()) reuse.items(0)[place] = begin;
  };
  if (row.chooses()) {
    ForEachBest(scores, row.count, row.kept, memory, keep);
  } else {
    for (uint32_t i = threadIdx.x; i < row.count; i += kSelectThreads) keep(i, i, 0);
  }
  if (threadIdx.x != 0) return;
  const auto left = static_cast<int32_t>(min(row.count, row.kept));
  p.kept[0].counts[row.at.index] = left;
  if (reuse.remembers()) reuse.remembered().kept[0] = left;
}

__global__ void __launch_bounds__(kSelectThreads)
    KeepFirstKernel(const __grid_constant__ InfiniteHipLaunch p) {
  __shared__ SelectMemory memory;
  extern __shared__ uint32_t scores[];  // [chunks of a row]
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const ChunkRow row(p, blockIdx.x);
  const RowReuse reuse(p.select, row.at);
  if (reuse.FirstStage(row.header) > 0) return;  // the chunks that it left are in the memory
  if (row.chooses()) {
    for (uint32_t i = threadIdx.x; i < row.count; i += kSelectThreads) {
      scores[i] =
          p.rank_scores == nullptr ? row.ScoreInMemory(p, i) : p.RankScores(row.at.index)[i];
    }
    __syncthreads();
  }
  KeepBestChunks(p, row, reuse, scores, memory);
}

}  // namespace

cudaError_t LaunchInfiniteHipFirstScores(const InfiniteHipLaunch& p, cudaStream_t stream) {
  return p.select.rope.on() ? LaunchChunkIndexedScores(p, stream)
                            : LaunchPageScores(p.pages, stream);
}

cudaError_t LaunchInfiniteHipKeepFirst(const InfiniteHipLaunch& p, cudaStream_t stream) {
  const auto score_bytes = static_cast<size_t>(p.max_chunks) * sizeof(uint32_t);
  if (const cudaError_t error = AllowSharedBytes(KeepFirstKernel, score_bytes);
      error != cudaSuccess) {
    return error;
  }
  return LaunchOverlapped(KeepFirstKernel, static_cast<unsigned>(p.select.out.num_rows),
                          kSelectThreads, score_bytes, stream, p);
}

}  // namespace kvasir::kernels
