// Quest's scores of pages on the GPU (quest_selector.h), for the selectors that begin with them.
// Included by quest_cuda.cc and infinitehip_cuda.cc, behind their checks.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/sparse/chunk_grid.h"
#include "kernels/sparse/select_cuda.h"
#include "kernels/sparse/selection_header.h"

namespace kvasir::kernels {

// All pointers are device memory.
struct PageScoreLaunch {
  SelectLaunch select;
  int64_t query_stride = 1;    // so many queries of a block are averaged
  ChunkGrid chunks = {};       // the pages to score are theirs; without chunks, the candidates
  uint32_t* scores = nullptr;  // [rows, max_blocks_per_slot] of OrderedScore (ranking.h)
  // A block of the call may have many queries; they and the KV are bfloat16, none are averaged.
  bool has_products = false;

  // Whether a matrix product (page_products.cu) scores the block's rows.
  KVASIR_HOST_DEVICE bool ByProducts(const QueryBlock& block) const {
    constexpr int64_t kFewQueries = 16;
    return has_products && block.num_rows * select.group > kFewQueries;
  }

  // The pages to score in a row; scores are from the first on. None where all are kept.
  KVASIR_HOST_DEVICE PageRange Pages(const SelectionHeader& header,
                                     const SelectionNumbers& numbers) const {
    if (numbers.budget_tokens <= 0) return {};
    if (chunks.chunk_tokens == 0) return CandidatePages(header, numbers);
    const int64_t count = chunks.Count(header, numbers);
    if (count <= chunks.Kept(numbers)) return {};
    return {.begin = header.sink_end / kPageTokens,
            .end = CeilPages(header.sink_end + count * chunks.chunk_tokens)};
  }
};

// A page that the slot does not have, and one whose scores are all NaN, get the score of -inf.
cudaError_t LaunchPageScores(const PageScoreLaunch& params, cudaStream_t stream);

// The part of LaunchPageScores for the rows of ByProducts.
cudaError_t LaunchPageProducts(const PageScoreLaunch& params, cudaStream_t stream);

}  // namespace kvasir::kernels
