// The first stage of infinitehip on the GPU, which chooses among all chunks. A chunk's score is the
// best of its pages', as quest's are. In decode a cluster of blocks of threads a row makes them and
// leaves them to its first block, which chooses; else page_scores.cu has scored the pages, or
// infinitehip_chunks.cu chunks that have positions of their own, and a row has one block.
#include <algorithm>

#include "kernels/base/overlapped_launch.h"
#include "kernels/sparse/cluster_launch.h"
#include "kernels/sparse/cluster_select.cuh"
#include "kernels/sparse/infinitehip/infinitehip_launch.h"
#include "kernels/sparse/quest/page_stream.cuh"
#include "kernels/sparse/reuse/reuse_row.cuh"

namespace kvasir::kernels {
namespace {

constexpr int kDecodeThreads = 512;

// A row's chunks.
struct ChunkRow {
  __device__ ChunkRow(const InfiniteHipLaunch& p, uint32_t row)
      : at(p.select, row),
        header(MakeHeader(at.block, at.numbers)),
        tokens(p.pages.chunks.chunk_tokens),
        count(static_cast<uint32_t>(p.pages.chunks.Count(header, at.numbers))),
        kept(static_cast<uint32_t>(p.pages.chunks.Kept(at.numbers))) {}

  // Else all are kept, unscored.
  __device__ bool chooses() const { return count > kept; }
  __device__ int64_t BeginOf(uint32_t chunk) const { return header.sink_end + chunk * tokens; }
  __device__ PageRange PagesOf(uint32_t begin, uint32_t end) const {
    if (begin == end) return {};
    return {.begin = BeginOf(begin) / kPageTokens, .end = CeilPages(BeginOf(end))};
  }

  DeviceRow at;
  SelectionHeader header;
  int64_t tokens;  // of a chunk
  uint32_t count;
  uint32_t kept;
};

// What an earlier step left, if the next stage runs; else nothing.
__device__ void RecallFirst(const InfiniteHipLaunch& p, const ChunkRow& row, const RowReuse& reuse,
                            int first_stage) {
  const int32_t count = first_stage == 1 ? reuse.remembered().kept[0] : 0;
  int32_t* const begins = p.kept[0].begins + row.at.index * p.max_chunks;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
    begins[i] = reuse.items(0)[i];
  }
  if (threadIdx.x == 0) p.kept[0].counts[row.at.index] = count;
}

// By scores in shared memory.
template <int kThreads>
__device__ void KeepBestChunks(const InfiniteHipLaunch& p, const ChunkRow& row,
                               const RowReuse& reuse, const uint32_t* scores,
                               ChooseMemory& memory) {
  int32_t* const begins = p.kept[0].begins + row.at.index * p.max_chunks;
  const auto keep = [&](uint32_t place, uint32_t chunk, uint32_t) {
    const auto begin = static_cast<int32_t>(row.BeginOf(chunk));
    begins[place] = begin;
    if (reuse.remembers()) reuse.items(0)[place] = begin;
  };
  const auto left =
      static_cast<int32_t>(ChooseBest<kThreads>(scores, row.count, row.kept, memory, keep));
  if (threadIdx.x != 0) return;
  p.kept[0].counts[row.at.index] = left;
  if (reuse.remembers()) reuse.remembered().kept[0] = left;
}

template <int kHeadDim>
struct DecodeMemory {
  GroupQueries<kHeadDim> queries;
  ChooseMemory choose;
  // Then the scores of the block's pages and, of the first block, those of the row's chunks.
};

template <int kHeadDim>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    DecodeFirstKernel(const __grid_constant__ InfiniteHipLaunch p, int64_t max_pages) {
  extern __shared__ uint4 raw[];
  auto& memory = *reinterpret_cast<DecodeMemory<kHeadDim>*>(raw);
  auto* const page_scores = reinterpret_cast<uint32_t*>(&memory + 1);
  uint32_t* const scores = page_scores + max_pages;
  const ChunkRow row(p, blockIdx.x / hopper::ClusterBlocks());
  const ClusterShare own(row.chooses() ? row.count : 0);
  const PageRange pages = row.PagesOf(own.begin, own.end);
  PageStream<kHeadDim> stream(p.select, row.at, pages);
  const RowReuse reuse(p.select, row.at);
  // A row that remembers may have nothing to read.
  if (!reuse.remembers()) stream.BeginEarly();
  hopper::ClusterArrive();
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const int first_stage = reuse.FirstStage(row.header);
  hopper::ClusterWait();  // the first block is there
  if (first_stage == 0) {
    memory.queries.Load(p.select, row.at);
    __syncthreads();
    stream.Score(memory.queries, page_scores);
    __syncthreads();
    uint32_t* const to = hopper::OfBlock(scores, 0);
    for (uint32_t i = own.begin + threadIdx.x; i < own.end; i += kDecodeThreads) {
      const PageRange of_chunk = row.PagesOf(i, i + 1);
      uint32_t best = 0;
      for (int64_t page = of_chunk.begin; page < of_chunk.end; ++page) {
        best = max(best, page_scores[page - pages.begin]);
      }
      to[i] = best;
    }
  }
  hopper::ClusterSync();  // scores are there
  if (hopper::ClusterRank() != 0) return;
  if (first_stage > 0) return RecallFirst(p, row, reuse, first_stage);
  KeepBestChunks<kDecodeThreads>(p, row, reuse, scores, memory.choose);
}

// Of a row, whatever it keeps.
int64_t MaxChunks(const InfiniteHipLaunch& p) {
  return p.select.kv.max_blocks_per_slot * kPageTokens / p.pages.chunks.chunk_tokens + 1;
}

template <int kHeadDim>
cudaError_t LaunchDecode(const InfiniteHipLaunch& p, cudaStream_t stream) {
  // The last chunk may end behind the last page.
  const int64_t max_pages =
      p.select.kv.max_blocks_per_slot + CeilPages(p.pages.chunks.chunk_tokens);
  const RowKernel kernel = {
      .kernel = DecodeFirstKernel<kHeadDim>,
      .threads = kDecodeThreads,
      .shared_bytes = sizeof(DecodeMemory<kHeadDim>) +
                      static_cast<size_t>(max_pages + MaxChunks(p)) * sizeof(uint32_t)};
  return LaunchRowClusters(kernel, p.select.out.num_rows, stream, p, max_pages);
}

// --- scores in device memory ---

// Of the rows that choose together.
__device__ uint32_t ScoreInMemory(const InfiniteHipLaunch& p, const ChunkRow& row, uint32_t chunk) {
  const InfiniteHipLaunch::Rows together = p.Together(row.at.index);
  const PageRange pages = row.PagesOf(chunk, chunk + 1);
  const int64_t first_page = row.header.sink_end / kPageTokens;
  uint32_t best = 0;
  for (int64_t head = together.begin; head < together.end; ++head) {
    if (p.select.rope.on()) {
      best = max(best, p.chunk_scores[head * p.max_chunks + chunk]);
      continue;
    }
    const uint32_t* const of_pages = p.pages.scores + head * p.select.kv.max_blocks_per_slot;
    for (int64_t page = pages.begin; page < pages.end; ++page) {
      best = max(best, of_pages[page - first_page]);
    }
  }
  return best;
}

__global__ void __launch_bounds__(kSelectThreads)
    KeepFirstKernel(const __grid_constant__ InfiniteHipLaunch p) {
  __shared__ ChooseMemory memory;
  extern __shared__ uint32_t scores[];  // [chunks of a row]
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const ChunkRow row(p, blockIdx.x);
  const RowReuse reuse(p.select, row.at);
  if (const int first_stage = reuse.FirstStage(row.header); first_stage > 0) {
    return RecallFirst(p, row, reuse, first_stage);
  }
  if (row.chooses()) {
    for (uint32_t i = threadIdx.x; i < row.count; i += kSelectThreads) {
      scores[i] = ScoreInMemory(p, row, i);
    }
    __syncthreads();
  }
  KeepBestChunks<kSelectThreads>(p, row, reuse, scores, memory);
}

}  // namespace

cudaError_t LaunchInfiniteHipFirst(const InfiniteHipLaunch& p, cudaStream_t stream) {
  const bool scores_first = p.select.rope.on() || p.layer_scores != nullptr;
  if (p.pages.of_one_token && !scores_first) {
    return p.select.kv.layout.head_dim == 128 ? LaunchDecode<128>(p, stream)
                                              : LaunchDecode<64>(p, stream);
  }
  if (const cudaError_t error = p.select.rope.on() ? LaunchChunkIndexedScores(p, stream)
                                                   : LaunchPageScores(p.pages, stream);
      error != cudaSuccess) {
    return error;
  }
  const auto score_bytes = static_cast<size_t>(MaxChunks(p)) * sizeof(uint32_t);
  if (const cudaError_t error =
          cudaFuncSetAttribute(KeepFirstKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(score_bytes));
      error != cudaSuccess) {
    return error;
  }
  return LaunchOverlapped(KeepFirstKernel, static_cast<unsigned>(p.select.out.num_rows),
                          kSelectThreads, score_bytes, stream, p);
}

}  // namespace kvasir::kernels
