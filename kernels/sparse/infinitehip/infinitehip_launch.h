// The kernels behind infinitehip_cuda.h. Only infinitehip_cuda.cc includes it, after it has checked
// the shapes.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/sparse/infinitehip/infinitehip_selector.h"
#include "kernels/sparse/quest/page_scores_launch.h"
#include "kernels/sparse/select_cuda.h"

namespace kvasir::kernels {

// All pointers are device memory.
struct InfiniteHipLaunch {
  using Stage = InfiniteHipSelector::Stage;
  // What a stage left of the rows, ascending: where its chunks begin.
  struct Kept {
    int32_t* begins = nullptr;  // [rows, max_chunks]
    int32_t* counts = nullptr;  // [rows]
  };

  SelectLaunch select = {};
  Stage stages[InfiniteHipSelector::kStages] = {};
  int64_t max_chunks = 0;    // of a row, in any stage, after it was split
  int64_t later_chunks = 0;  // the same of the stages behind the first
  int64_t max_rows = 0;      // of a query block
  Kept kept[InfiniteHipSelector::kStages] = {};
  PageScoreLaunch pages = {};        // stage 1, which scores its chunks by their pages
  uint32_t* chunk_scores = nullptr;  // [rows, max_chunks]; of OrderedScore
  uint32_t* kept_scores = nullptr;   // [rows, max_chunks]; in the end of what the last stage left
  // [rows, max_chunks]: the largest of all heads' scores, where those of a layer choose together;
  // null: they do not.
  uint32_t* layer_scores = nullptr;

  // Rows that choose together with this one.
  struct Rows {
    int64_t begin;
    int64_t end;
  };
  KVASIR_HOST_DEVICE Rows Together(int64_t row) const {
    const int64_t heads = select.kv.layout.num_kv_heads;
    if (layer_scores == nullptr) return {row, row + 1};
    return {row / heads * heads, row / heads * heads + heads};
  }

  // Of n chunks that stand side by side (chunk-indexed), how far the query is from the last one.
  KVASIR_HOST_DEVICE int64_t LeastDistance(const SelectionNumbers& numbers) const {
    return numbers.window_tokens - pages.chunks.overlap;
  }
};

// Whether LaunchInfiniteHipDecode serves the call: all stages, and the lists. REQUIRES, for the
// launch: it does.
bool InfiniteHipDecodes(const InfiniteHipLaunch& params);
cudaError_t LaunchInfiniteHipDecode(const InfiniteHipLaunch& params, cudaStream_t stream);

// Else those below do. The scores of stage 1 where chunks stand side by side (select.rope is on),
// to chunk_scores.
cudaError_t LaunchChunkIndexedScores(const InfiniteHipLaunch& params, cudaStream_t stream);

// Runs stage 0: what it keeps is in kept[0].
cudaError_t LaunchInfiniteHipFirst(const InfiniteHipLaunch& params, cudaStream_t stream);

// Runs the stages behind it, and writes the lists.
cudaError_t LaunchInfiniteHipLater(const InfiniteHipLaunch& params, cudaStream_t stream);

}  // namespace kvasir::kernels
