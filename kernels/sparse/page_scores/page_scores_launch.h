// Quest's scores of pages on the GPU (quest_selector.h), for the selectors that begin with them.
// Included by quest_cuda.cc and infinitehip_cuda.cc, which check the shapes first.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/sparse/common/chunk_grid.h"
#include "kernels/sparse/common/select_cuda.h"
#include "kernels/sparse/common/selection_header.h"
#include "kernels/sparse/page_scores/page_score_plan.h"

namespace kvasir::kernels {

// All pointers are device memory.
struct PageScoreLaunch {
  SelectLaunch select;
  int64_t query_stride = 1;    // queries of a tile that are averaged into one
  ChunkGrid chunks = {};       // whose pages are scored; without chunks, the candidates
  uint32_t* scores = nullptr;  // [rows, max_blocks_per_slot] of OrderedScore (ranking.h)
  float low_weight = 0;        // quest_rule.h
  PageScorePlan plan = {};

  // Returns the pages to score in a row; scores start at the first of them. None where all are
  // kept.
  KVASIR_HOST_DEVICE PageRange Pages(const SelectionHeader& header,
                                     const PolicyNumbers& numbers) const {
    if (numbers.budget_tokens <= 0) return {};
    if (chunks.chunk_tokens == 0) return CandidatePages(header, numbers);
    const int64_t count = chunks.Count(header, numbers);
    if (count <= chunks.Kept(numbers)) return {};
    return {.begin = header.sink_end / kPageTokens,
            .end = CeilPages(header.sink_end + count * chunks.chunk_tokens)};
  }
};

// Scores pages. A page that the slot does not have, and one whose scores are all NaN, get -inf.
cudaError_t LaunchPageScores(const PageScoreLaunch& params, cudaStream_t stream);

// The same by matrix products. REQUIRES: q and KV are bfloat16, no queries are averaged.
cudaError_t LaunchPageProducts(const PageScoreLaunch& params, cudaStream_t stream);

}  // namespace kvasir::kernels
