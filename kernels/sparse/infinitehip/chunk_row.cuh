// A row of infinitehip's first stage and the chunks that it chooses from. For its kernels.
#pragma once

#include "kernels/sparse/common/select_row.cuh"
#include "kernels/sparse/infinitehip/infinitehip_launch.h"

namespace kvasir::kernels {

struct ChunkRow {
  __device__ ChunkRow(const InfiniteHipLaunch& p, uint32_t row)
      : at(p.select, row),
        header(MakeHeader(at.tile, at.numbers)),
        tokens(p.pages.chunks.chunk_tokens),
        count(static_cast<uint32_t>(p.pages.chunks.Count(header, at.numbers))),
        kept(static_cast<uint32_t>(p.pages.chunks.Kept(at.numbers))) {}

  // If false, all chunks are kept, unscored.
  __device__ bool chooses() const { return count > kept; }
  __device__ int64_t BeginOf(uint32_t chunk) const { return header.sink_end + chunk * tokens; }
  __device__ PageRange PagesOf(uint32_t begin, uint32_t end) const {
    if (begin == end) return {};
    return {.begin = BeginOf(begin) / kPageTokens, .end = CeilPages(BeginOf(end))};
  }
  // Returns the best score of a chunk over the rows that choose together, as the kernels of the
  // first stage left it in memory.
  __device__ uint32_t ScoreInMemory(const InfiniteHipLaunch& p, uint32_t chunk) const {
    const InfiniteHipLaunch::Rows together = p.Together(at.index);
    const PageRange pages = PagesOf(chunk, chunk + 1);
    const int64_t first_page = header.sink_end / kPageTokens;
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

  DeviceRow at;
  SelectionHeader header;  // of a list without entries
  int64_t tokens;          // of a chunk
  uint32_t count;
  uint32_t kept;
};

}  // namespace kvasir::kernels
