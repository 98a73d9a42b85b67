// The kernels of infinitehip_cuda.h. Only infinitehip_cuda.cc includes it, after it has checked the
// shapes.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/sparse/common/select_cuda.h"
#include "kernels/sparse/infinitehip/infinitehip_selector.h"
#include "kernels/sparse/page_scores/page_scores_launch.h"

namespace kvasir::kernels {

// All pointers are device memory.
struct InfiniteHipLaunch {
  using Stage = InfiniteHipSelector::Stage;
  // The chunks that a stage left of each row, ascending.
  struct Kept {
    int32_t* begins = nullptr;  // [rows, max_chunks]
    int32_t* counts = nullptr;  // [rows]
  };

  SelectLaunch select = {};
  Stage stages[InfiniteHipSelector::kStages] = {};
  int64_t max_chunks = 0;    // most of a row in any stage, after the split
  int64_t later_chunks = 0;  // the same for the stages after the first
  int64_t max_rows = 0;      // most queries of a query tile
  Kept kept[InfiniteHipSelector::kStages] = {};
  PageScoreLaunch pages = {};        // stage 1, which scores its chunks by their pages
  uint32_t* chunk_scores = nullptr;  // [rows, max_chunks]; of OrderedScore
  uint32_t* kept_scores = nullptr;   // [rows, max_chunks]; finally those that the last stage left
  // [rows, max_chunks]: the largest of all heads' scores, where the heads of a layer choose
  // together; else null.
  uint32_t* layer_scores = nullptr;
  // [query tiles, max_chunks]: the largest scores over the ranks that hold a part of the layer, and
  // the number of chunks of a tile that have any [query tiles]. Null where one rank has all heads.
  uint32_t* rank_scores = nullptr;
  int32_t* rank_chunks = nullptr;

  // The rows that choose together with a row.
  struct Rows {
    int64_t begin;
    int64_t end;
  };
  KVASIR_HOST_DEVICE Rows Together(int64_t row) const {
    const int64_t heads = select.kv.layout.num_kv_heads;
    if (layer_scores == nullptr) return {row, row + 1};
    return {row / heads * heads, row / heads * heads + heads};
  }

  // Scores of a later stage [rows, max_chunks]. Each stage has its own: a CTA may score while
  // another still keeps.
  KVASIR_HOST_DEVICE uint32_t* ScoresOf(int stage) const {
    return stage == InfiniteHipSelector::kStages - 1 ? chunk_scores : kept_scores;
  }
  // Scores of a row's layer over the ranks.
  KVASIR_HOST_DEVICE uint32_t* RankScores(int64_t row) const {
    return rank_scores + row / select.kv.layout.num_kv_heads * max_chunks;
  }

  // The query's distance to the last of the chunks where these are chunk-indexed.
  KVASIR_HOST_DEVICE int64_t LeastDistance(const PolicyNumbers& numbers) const {
    return numbers.window_tokens - pages.chunks.overlap;
  }
};

// Bytes of shared memory that a CTA of LaunchInfiniteHipDecode has, for the larger head_dim.
int64_t InfiniteHipDecodeBytes(const InfiniteHipLaunch& params);
// Runs all stages and writes the lists. REQUIRES: InfiniteHipPlan::is_one_kernel.
cudaError_t LaunchInfiniteHipDecode(const InfiniteHipLaunch& params, cudaStream_t stream);

// Otherwise the launches below serve it, in this order. Those of ranks only where ranks choose
// together: the scores of all of them must become one after each.

// Scores the chunks of stage 0, the first.
cudaError_t LaunchInfiniteHipFirstScores(const InfiniteHipLaunch& params, cudaStream_t stream);
// The same in chunk-indexed layers (select.rope is on), to chunk_scores.
cudaError_t LaunchChunkIndexedScores(const InfiniteHipLaunch& params, cudaStream_t stream);
// Writes the largest of this rank's scores of a stage to rank_scores.
cudaError_t LaunchInfiniteHipRankScores(const InfiniteHipLaunch& params, int stage,
                                        cudaStream_t stream);
// Keeps the best chunks of stage 0, in kept[0].
cudaError_t LaunchInfiniteHipKeepFirst(const InfiniteHipLaunch& params, cudaStream_t stream);

// The steps of the later stages, [begin, end) of: score stage 1, keep its best chunks, score stage
// 2, keep and list.
struct InfiniteHipSteps {
  static constexpr int kCount = 2 * (InfiniteHipSelector::kStages - 1);
  int begin = 0;
  int end = kCount;

  KVASIR_HOST_DEVICE static constexpr int StageOf(int step) { return step / 2 + 1; }
  KVASIR_HOST_DEVICE static constexpr bool Scores(int step) { return step % 2 == 0; }
};
cudaError_t LaunchInfiniteHipLater(const InfiniteHipLaunch& params, const InfiniteHipSteps& steps,
                                   cudaStream_t stream);

}  // namespace kvasir::kernels
