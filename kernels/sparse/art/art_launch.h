// The kernels of art_cuda.h. Only art_cuda.cc includes it, after it has checked the shapes.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/attention/attend_launch.h"
#include "kernels/sparse/art/art_rule.h"
#include "kernels/sparse/common/ranking.h"
#include "kernels/sparse/common/stages.h"

namespace kvasir::kernels {

// All pointers are device memory.
struct ArtLaunch : AttendLaunch {
  ArtOptions options = {};
  const PolicyNumbers* numbers = nullptr;  // one per query tile
  // The guard's sums: [num_rows][max_blocks_per_slot + 1][group].
  float* unread = nullptr;
  // [num_rows][max_blocks_per_slot] where pages are read in order of importance; else null.
  Ranked* ranked = nullptr;

  // Null if the row has no list.
  KVASIR_HOST_DEVICE Ranked* RankedOf(int64_t row) const {
    const bool lists = headers[row].kind == SelectionHeader::Kind::kList;
    return ranked != nullptr && lists ? ranked + row * kv.max_blocks_per_slot : nullptr;
  }
};

// Fills `ranked`.
cudaError_t LaunchArtOrder(const ArtLaunch& params, cudaStream_t stream);
cudaError_t LaunchAttendArt(const ArtLaunch& params, const KvTensorMaps& maps, cudaStream_t stream);

}  // namespace kvasir::kernels
