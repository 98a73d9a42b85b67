// A row of tokenselect in its kernels, and the range of its candidates.
#pragma once

#include "kernels/sparse/reuse/reuse_row.cuh"
#include "kernels/sparse/tokenselect/tokenselect_launch.h"

namespace kvasir::kernels {

struct VotingRow {
  __device__ VotingRow(const TokenSelectLaunch& p, uint32_t row)
      : at(p.select, row),
        header(MakeHeader(at.tile, at.numbers)),
        begin(header.sink_end),
        end(begin + NumCandidates(header, at.numbers)),
        serves(RowReuse(p.select, at).Serves(header)),
        wanted(serves ? 0 : min(end - begin, at.numbers.budget_tokens)) {}

  __device__ int64_t first_page() const { return begin / kPageTokens; }
  __device__ int64_t end_page() const { return CeilPages(end); }
  // Returns the candidates of a page.
  __device__ uint64_t CandidatesOf(int64_t page) const {
    const int64_t start = page * kPageTokens;
    return TokenMask(begin - start, end - start);
  }

  DeviceRow at;
  SelectionHeader header;
  int64_t begin;  // candidates are the tokens [begin, end)
  int64_t end;
  bool serves;     // a list of an earlier step serves
  int64_t wanted;  // tokens to choose; 0: there is nothing to do
};

}  // namespace kvasir::kernels
