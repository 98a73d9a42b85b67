// Which pages the kernels of page_scores_launch.h score in a row.
#pragma once

#include "kernels/sparse/quest/page_scores_launch.h"
#include "kernels/sparse/reuse/reuse_row.cuh"

namespace kvasir::kernels {

// None where a list of an earlier step serves.
__device__ inline PageRange PagesOf(const PageScoreLaunch& p, const DeviceRow& row) {
  const SelectionHeader header = MakeHeader(row.block, row.numbers);
  if (RowReuse(p.select, row).Serves(header)) return {};
  return p.Pages(header, row.numbers);
}

}  // namespace kvasir::kernels
