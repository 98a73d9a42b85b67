#include "kernels/sparse/streaming/streaming_selector.h"

#include "kernels/base/status_macros.h"
#include "kernels/sparse/common/select_common.h"

namespace kvasir::kernels {

absl::Status StreamingSelector::Select(const SelectParams& p, PageSelection& out, Executor&) const {
  KVASIR_RETURN_IF_ERROR(CheckSelect("streaming", p, out));
  const int64_t heads = p.kv.layout.num_kv_heads;
  for (int64_t row = 0; row < out.num_rows; ++row) {
    const size_t block = static_cast<size_t>(row / heads);
    PolicyNumbers numbers = p.numbers[block];
    numbers.budget_tokens = 0;
    out.header(row) = MakeHeader(p.tiles[block], numbers);
  }
  return absl::OkStatus();
}

}  // namespace kvasir::kernels
