// Quest's scores of pages on the GPU (quest_selector.h), for the selectors that begin with them.
// Included by quest_cuda.cc and infinitehip_cuda.cc, which check the shapes first.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/sparse/common/chunk_grid.h"
#include "kernels/sparse/common/select_cuda.h"
#include "kernels/sparse/common/selection_header.h"

namespace kvasir::kernels {

// Most pages of a slot whose scores fit in shared memory: 2.6 million tokens.
inline constexpr int64_t kMaxChosenPages = 40 * 1024;

// All pointers are device memory.
struct PageScoreLaunch {
  SelectLaunch select;
  int64_t query_stride = 1;       // queries of a tile that are averaged into one
  ChunkGrid chunks = {};          // whose pages are scored; without chunks, the candidates
  uint32_t* scores = nullptr;     // [rows, max_blocks_per_slot] of OrderedScore (ranking.h)
  float low_weight = 0;           // quest_rule.h
  bool by_products = false;       // page_products.cu serves the call
  bool has_many_queries = false;  // a query tile of it may have several queries
  // Every query tile of the call is one token. Kernels that choose by scores may then make the
  // scores themselves (page_stream.cuh).
  bool of_one_token = false;

  // Returns the pages to score in a row; scores start at the first of them. None where all are
  // kept.
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

// Scores pages. A page that the slot does not have, and one whose scores are all NaN, get -inf.
cudaError_t LaunchPageScores(const PageScoreLaunch& params, cudaStream_t stream);

// The same by matrix products. REQUIRES: q and KV are bfloat16, no queries are averaged.
cudaError_t LaunchPageProducts(const PageScoreLaunch& params, cudaStream_t stream);

// Returns the launch that serves a call of these params best.
inline PageScoreLaunch MakePageScoreLaunch(const SelectLaunch& select,
                                           const CudaSelectParams& params,
                                           int64_t query_stride = 1) {
  const bool is_bf16 =
      select.q_dtype == DType::kBFloat16 && select.kv.layout.dtype == DType::kBFloat16;
  const bool has_many_queries = params.may_have_several_rows();
  return {.select = select,
          .query_stride = query_stride,
          .by_products = is_bf16 && (query_stride == 1 || !has_many_queries),
          .has_many_queries = has_many_queries,
          .of_one_token = is_bf16 && !has_many_queries && select.group <= kMaxCudaGroup &&
                          select.kv.max_blocks_per_slot <= kMaxChosenPages};
}

}  // namespace kvasir::kernels
