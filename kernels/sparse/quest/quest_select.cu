// Chooses pages and lists them in order, without a sort. In decode a cluster of CTAs scores the
// pages of a row and passes the scores to its first CTA, which chooses. Otherwise scores are in
// device memory and one CTA takes a row.
#include <algorithm>

#include "kernels/base/head_dim.h"
#include "kernels/base/overlapped_launch.h"
#include "kernels/sparse/common/cluster_launch.h"
#include "kernels/sparse/common/cluster_select.cuh"
#include "kernels/sparse/page_scores/page_stream.cuh"
#include "kernels/sparse/quest/quest_launch.h"
#include "kernels/sparse/reuse/reuse_row.cuh"

namespace kvasir::kernels {
namespace {

constexpr int kDecodeThreads = 512;

// The pages that a row chooses from, and how many it chooses.
struct ChoosingRow {
  __device__ ChoosingRow(const SelectLaunch& p, uint32_t row)
      : at(p, row),
        header(MakeHeader(at.tile, at.numbers)),
        candidates(CandidatePages(header, at.numbers)),
        count(min(min(CeilPages(at.numbers.budget_tokens), candidates.size()), p.out.capacity)) {}

  DeviceRow at;
  SelectionHeader header;  // of a list without entries
  PageRange candidates;
  int64_t count;
};

// Writes header and list of a row that chooses by scores in shared memory. The list is empty if
// count is 0.
template <int kThreads>
__device__ void WriteList(const SelectLaunch& p, const ChoosingRow& row, const uint32_t* scores,
                          ChooseMemory& memory) {
  if (threadIdx.x == 0) {
    SelectionHeader header = row.header;
    header.count = static_cast<int32_t>(row.count);
    p.out.headers[row.at.index] = header;
  }
  if (row.count == 0) return;
  SelectionEntry* const list = p.out.entries + row.at.index * p.out.capacity;
  ChooseBest<kThreads>(scores, static_cast<uint32_t>(row.candidates.size()),
                       static_cast<uint32_t>(row.count), memory,
                       [&](uint32_t place, uint32_t item, uint32_t score) {
                         list[place] = {.page = row.candidates.begin + item,
                                        .chosen = ~uint64_t{0},
                                        .live = ~uint64_t{0},
                                        .score = ScoreOfOrdered(score)};
                       });
}

template <int kHeadDim>
struct DecodeMemory {
  GroupQueries<kHeadDim> queries;
  ChooseMemory choose;
  // In the first CTA, the row's scores follow.
};

template <int kHeadDim>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    DecodeKernel(const __grid_constant__ SelectLaunch p, const float low_weight) {
  extern __shared__ uint4 raw[];
  auto& memory = *reinterpret_cast<DecodeMemory<kHeadDim>*>(raw);
  auto* const scores = reinterpret_cast<uint32_t*>(&memory + 1);
  const ChoosingRow row(p, blockIdx.x / hopper::ClusterBlocks());
  const ClusterShare own(row.count == 0 ? 0 : static_cast<uint32_t>(row.candidates.size()));
  const int64_t first = row.candidates.begin;
  PageStream<kHeadDim> stream(p, row.at, {.begin = first + own.begin, .end = first + own.end});
  const RowReuse reuse(p, row.at);
  // A row that remembers may have nothing to read.
  if (!reuse.remembers()) stream.BeginEarly();
  hopper::ClusterArrive();
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const bool serves = reuse.Serves(row.header);
  hopper::ClusterWait();  // the first CTA has started
  if (!serves) {
    memory.queries.Load(p, row.at, low_weight);
    __syncthreads();
    stream.Score(memory.queries, hopper::OfBlock(scores, 0) + own.begin);
  }
  hopper::ClusterSync();  // scores are there, and all CTAs know whether a list serves
  if (hopper::ClusterRank() != 0) return;
  if (serves) return reuse.Recall(row.header);
  WriteList<kDecodeThreads>(p, row, scores, memory.choose);
  reuse.Remember();
}

// Most scores of a row that are copied to shared memory before the choice: two million tokens. More
// stay in place.
constexpr uint32_t kCopiedScores = 32 * 1024;

__global__ void __launch_bounds__(kSelectThreads)
    BestKernel(const __grid_constant__ SelectLaunch p, const uint32_t* all_scores) {
  __shared__ ChooseMemory memory;
  extern __shared__ uint32_t copied[];  // [kCopiedScores]
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  const ChoosingRow row(p, blockIdx.x);
  const RowReuse reuse(p, row.at);
  if (reuse.Serves(row.header)) return reuse.Recall(row.header);
  const auto n = static_cast<uint32_t>(row.count == 0 ? 0 : row.candidates.size());
  const uint32_t* const scores = all_scores + row.at.index * p.kv.max_blocks_per_slot;
  const bool fits = n <= kCopiedScores;
  for (uint32_t i = threadIdx.x; i < n && fits; i += kSelectThreads) copied[i] = scores[i];
  __syncthreads();
  WriteList<kSelectThreads>(p, row, fits ? copied : scores, memory);
  reuse.Remember();
}

}  // namespace

cudaError_t LaunchQuestBest(const SelectLaunch& p, const uint32_t* scores, cudaStream_t stream) {
  const int copy_bytes =
      static_cast<int>(std::min<int64_t>(kCopiedScores, p.kv.max_blocks_per_slot) *
                       static_cast<int64_t>(sizeof(uint32_t)));
  if (const cudaError_t error = AllowSharedBytes(BestKernel, copy_bytes); error != cudaSuccess) {
    return error;
  }
  return LaunchOverlapped(BestKernel, static_cast<unsigned>(p.out.num_rows), kSelectThreads,
                          copy_bytes, stream, p, scores);
}

cudaError_t LaunchQuestDecode(const SelectLaunch& p, float low_weight, cudaStream_t stream) {
  const size_t scores_bytes = static_cast<size_t>(p.kv.max_blocks_per_slot) * sizeof(uint32_t);
  return ForHeadDim(p.kv.layout.head_dim, [&]<int kHeadDim>() {
    const RowKernel kernel = {.kernel = DecodeKernel<kHeadDim>,
                              .threads = kDecodeThreads,
                              .shared_bytes = sizeof(DecodeMemory<kHeadDim>) + scores_bytes};
    return LaunchRowClusters(kernel, p.out.num_rows, stream, p, low_weight);
  });
}

}  // namespace kvasir::kernels
