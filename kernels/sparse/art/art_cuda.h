// Decode attention that `art` (art_terminator.h) ends early, on the GPU: the op of attend.h as
// attend_cuda.h serves it, and what the terminator guarantees. Called by the attention layer.
// Thread-safe. Only in builds with CUDA.
//
// Differs from the CPU in this: tests are made in float32; the page of a row that holds tokens of
// the list beside some of sink or window is read in two, of which the first that may stay unread is
// the first listed one that holds none of either; of the pages that a row leaves unread up to three
// may have been asked for, and these are not counted. A row depends on nothing but itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <span>

#include "absl/status/status.h"

#include "kernels/attention/attend.h"
#include "kernels/paged/kv_tensor_maps.h"
#include "kernels/sparse/art/art_rule.h"
#include "kernels/sparse/stages.h"

namespace kvasir::kernels {

struct ArtCuda {
  ArtOptions options;
  std::span<const SelectionNumbers> numbers;  // one per block
};

// Device memory for the guards and orders of `blocks` query blocks.
int64_t AttendArtWorkspaceBytes(const PagedKv& kv, int64_t blocks, int64_t group);

// Attention of blocks of one query each, whose params have device_counts; which rows may end early
// follows from their numbers. Nothing is allocated or waited for; may be captured. Errors as of
// AttendDecode. Cost: a row is read by one block of threads; order importance sorts its list first,
// by a kernel of its own.
absl::Status AttendArt(const AttendParams& params, const ArtCuda& art, const KvTensorMaps& maps,
                       std::byte* workspace, cudaStream_t stream);

}  // namespace kvasir::kernels
