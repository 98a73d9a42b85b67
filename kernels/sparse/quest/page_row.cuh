// Which pages the kernels of page_scores_launch.h score in a row.
#pragma once

#include "kernels/sparse/quest/page_scores_launch.h"
#include "kernels/sparse/reuse/reuse_row.cuh"

namespace kvasir::kernels {

// None where what an earlier step left of them serves.
__device__ inline PageRange PagesOf(const PageScoreLaunch& p, const DeviceRow& row) {
  if (!Runs(p.select, row, 0)) return {};
  return p.Pages(MakeHeader(row.block, row.numbers), row.numbers);
}

}  // namespace kvasir::kernels
