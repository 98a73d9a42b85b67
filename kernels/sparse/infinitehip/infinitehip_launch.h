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

  // The query's distance to the last of the chunks where these are chunk-indexed.
  KVASIR_HOST_DEVICE int64_t LeastDistance(const PolicyNumbers& numbers) const {
    return numbers.window_tokens - pages.chunks.overlap;
  }
};

// Bytes of shared memory that a CTA of LaunchInfiniteHipDecode has, for the larger head_dim.
int64_t InfiniteHipDecodeBytes(const InfiniteHipLaunch& params);
// Runs all stages and writes the lists. REQUIRES: InfiniteHipPlan::is_one_kernel.
cudaError_t LaunchInfiniteHipDecode(const InfiniteHipLaunch& params, cudaStream_t stream);

// Otherwise the launches below serve it. Writes the scores of stage 1 to chunk_scores, in
// chunk-indexed layers (select.rope is on).
cudaError_t LaunchChunkIndexedScores(const InfiniteHipLaunch& params, cudaStream_t stream);

// Runs stage 0, the first. The chunks that it keeps are in kept[0].
cudaError_t LaunchInfiniteHipFirst(const InfiniteHipLaunch& params, cudaStream_t stream);

// Runs the later stages and writes the lists.
cudaError_t LaunchInfiniteHipLater(const InfiniteHipLaunch& params, cudaStream_t stream);

}  // namespace kvasir::kernels
