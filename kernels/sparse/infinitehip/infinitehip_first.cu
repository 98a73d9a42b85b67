// The first stage of infinitehip on the GPU, which chooses among all chunks: their scores are those
// of their pages, as quest's are (page_scores.cu), or infinitehip_chunks.cu's where chunks have
// positions of their own; then one block of threads a row keeps the best.
#include "kernels/base/overlapped_launch.h"
#include "kernels/sparse/infinitehip/infinitehip_launch.h"
#include "kernels/sparse/infinitehip/keep_chunks.cuh"

namespace kvasir::kernels {
namespace {

__global__ void __launch_bounds__(kSelectThreads)
    KeepFirstKernel(const __grid_constant__ InfiniteHipLaunch p) {
  __shared__ SelectMemory memory;
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();  // the next one relies on it that this one has waited
  const DeviceRow row(p.select, blockIdx.x);
  const SelectionHeader header = MakeHeader(row.block, row.numbers);
  const RowReuse reuse(p.select, row);
  const int first_stage = reuse.FirstStage(header);
  if (first_stage > 0) return RecallKept(p, row, reuse, 0, first_stage);
  const int64_t n = p.pages.chunks.Count(header, row.numbers);
  const int64_t kept = p.pages.chunks.Kept(row.numbers);
  const InfiniteHipLaunch::Rows together = p.Together(row.index);
  uint32_t* scores = ChosenBy(p) + row.index * p.max_chunks;
  const int64_t first_page = header.sink_end / kPageTokens;
  const bool is_scored = p.select.rope.on() || n <= kept;
  for (int64_t i = threadIdx.x; i < n && !is_scored; i += kSelectThreads) {
    const int64_t begin = header.sink_end + i * p.pages.chunks.chunk_tokens;
    const int64_t end_page = CeilPages(begin + p.pages.chunks.chunk_tokens);
    uint32_t best = 0;
    for (int64_t head = together.begin; head < together.end; ++head) {
      const uint32_t* pages = p.pages.scores + head * p.select.kv.max_blocks_per_slot;
      for (int64_t page = begin / kPageTokens; page < end_page; ++page) {
        best = max(best, pages[page - first_page]);
      }
    }
    scores[i] = best;
  }
  if (is_scored && n > kept) JoinScores(p, row, n);
  __syncthreads();
  int32_t* begins = p.kept[0].begins + row.index * p.max_chunks;
  const int64_t left =
      KeepBest(scores, n, kept, memory, [&](int64_t place, int64_t chunk, uint32_t) {
        begins[place] = static_cast<int32_t>(header.sink_end + chunk * p.pages.chunks.chunk_tokens);
      });
  if (threadIdx.x == 0) p.kept[0].counts[row.index] = static_cast<int32_t>(left);
  RememberKept(p, row, reuse, 0);
}

}  // namespace

cudaError_t LaunchInfiniteHipFirst(const InfiniteHipLaunch& p, cudaStream_t stream) {
  if (const cudaError_t error = p.select.rope.on() ? LaunchChunkIndexedScores(p, stream)
                                                   : LaunchPageScores(p.pages, stream);
      error != cudaSuccess) {
    return error;
  }
  const auto rows = static_cast<unsigned>(p.select.out.num_rows);
  return LaunchOverlapped(KeepFirstKernel, rows, kSelectThreads, kCopyBytes, stream, p);
}

}  // namespace kvasir::kernels
