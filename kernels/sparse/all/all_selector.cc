#include "kernels/sparse/all/all_selector.h"

#include "kernels/base/status_macros.h"
#include "kernels/sparse/common/select_common.h"

namespace kvasir::kernels {

absl::Status AllSelector::Select(const SelectParams& p, PageSelection& out, Executor&) const {
  KVASIR_RETURN_IF_ERROR(CheckSelect("all", p, out));
  const int64_t heads = p.kv.layout.num_kv_heads;
  for (int64_t row = 0; row < out.num_rows; ++row) {
    out.header(row) = MakeAllHeader(p.tiles[static_cast<size_t>(row / heads)]);
  }
  return absl::OkStatus();
}

}  // namespace kvasir::kernels
