// The pages of a row that the kernels of page_scores_launch.h score.
#pragma once

#include "kernels/sparse/page_scores/page_scores_launch.h"
#include "kernels/sparse/reuse/reuse_row.cuh"

namespace kvasir::kernels {

// Returns none where the first stage's earlier output serves.
__device__ inline PageRange PagesOf(const PageScoreLaunch& p, const DeviceRow& row) {
  if (!Runs(p.select, row, 0)) return {};
  return p.Pages(MakeHeader(row.tile, row.numbers), row.numbers);
}

}  // namespace kvasir::kernels
