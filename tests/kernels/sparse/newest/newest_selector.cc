#include "tests/kernels/sparse/newest/newest_selector.h"

#include <algorithm>

#include "kernels/base/status_macros.h"
#include "kernels/sparse/common/select_common.h"

namespace kvasir::kernels {

int64_t NewestSelector::MaxEntries(const PolicyNumbers& numbers, int64_t tokens) const {
  return std::min(CeilPages(numbers.budget_tokens), CeilPages(tokens));
}

absl::Status NewestSelector::Select(const SelectParams& p, PageSelection& out,
                                    Executor& executor) const {
  KVASIR_RETURN_IF_ERROR(CheckSelect("newest", p, out));
  KVASIR_RETURN_IF_ERROR(CheckCapacity("newest", *this, p, out));
  ForEachRow(p, out, executor, [](const SelectRow& row, int) {
    row.header = MakeHeader(row.tile, row.numbers);
    const PageRange candidates = CandidatePages(row.header, row.numbers);
    const int64_t count = std::min(CeilPages(row.numbers.budget_tokens), candidates.size());
    for (int64_t i = 0; i < count; ++i) {
      row.list[i] = {.page = candidates.end - count + i,
                     .chosen = ~uint64_t{0},
                     .live = ~uint64_t{0},
                     .score = static_cast<float>(i)};
    }
    row.header.count = static_cast<int32_t>(count);
  });
  return absl::OkStatus();
}

}  // namespace kvasir::kernels
