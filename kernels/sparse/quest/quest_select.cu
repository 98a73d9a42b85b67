// One block of threads a row finds the score of the last page that the budget has room for, by
// counting, and writes the list in the order of pages: nothing is sorted.
#include <algorithm>

#include "kernels/base/overlapped_launch.h"
#include "kernels/sparse/block_select.cuh"
#include "kernels/sparse/quest/quest_launch.h"
#include "kernels/sparse/reuse/reuse_row.cuh"
#include "kernels/sparse/select_row.cuh"

namespace kvasir::kernels {
namespace {

// Scores of a row that are chosen from in shared memory: two million tokens. Others stay where they
// are.
constexpr int64_t kCopiedScores = 32 * 1024;

__global__ void __launch_bounds__(kSelectThreads)
    BestKernel(const __grid_constant__ SelectLaunch p, const uint32_t* all_scores) {
  __shared__ SelectMemory memory;
  extern __shared__ uint32_t copied[];  // [kCopiedScores]
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  const DeviceRow row(p, blockIdx.x);
  SelectionHeader header = MakeHeader(row.block, row.numbers);
  const RowReuse reuse(p, row);
  if (reuse.Serves(header)) return reuse.Recall(header);
  const PageRange candidates = CandidatePages(header, row.numbers);
  const int64_t n = candidates.size();
  const int64_t count = min(min(CeilPages(row.numbers.budget_tokens), n), p.out.capacity);
  if (threadIdx.x == 0) {
    header.count = static_cast<int32_t>(count);
    p.out.headers[row.index] = header;
  }
  if (count == 0) return reuse.Remember();
  const uint32_t* scores = all_scores + row.index * p.kv.max_blocks_per_slot;
  const bool fits = n <= kCopiedScores;
  for (int64_t i = threadIdx.x; i < n && fits; i += kSelectThreads) copied[i] = scores[i];
  __syncthreads();
  SelectionEntry* list = p.out.entries + row.index * p.out.capacity;
  ForEachBest(fits ? copied : scores, n, count, memory,
              [&](int64_t place, int64_t item, uint32_t score) {
                list[place] = {.page = candidates.begin + item,
                               .chosen = ~uint64_t{0},
                               .live = ~uint64_t{0},
                               .score = ScoreOfOrdered(score)};
              });
  reuse.Remember();
}

}  // namespace

cudaError_t LaunchQuestBest(const SelectLaunch& p, const uint32_t* scores, cudaStream_t stream) {
  const int copy_bytes =
      static_cast<int>(std::min<int64_t>(kCopiedScores, p.kv.max_blocks_per_slot) *
                       static_cast<int64_t>(sizeof(uint32_t)));
  if (const cudaError_t error =
          cudaFuncSetAttribute(BestKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, copy_bytes);
      error != cudaSuccess) {
    return error;
  }
  return LaunchOverlapped(BestKernel, static_cast<unsigned>(p.out.num_rows), kSelectThreads,
                          copy_bytes, stream, p, scores);
}

}  // namespace kvasir::kernels
