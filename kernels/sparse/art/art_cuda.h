// Decode attention that `art` (art_terminator.h) ends early, on the GPU: the op of attend.h as
// attend_cuda.h serves it, with the guarantees of the terminator. The CUDA backend calls it through
// the CudaTerminator that MakeCudaArt makes (methods_cuda.cc). Thread-safe. Only in builds with
// CUDA.
//
// Differences from the CPU: tests are made in float32. A page of a row that holds tokens of the
// list and also some of sink or window is read in two parts; the first page that may stay unread is
// the first listed one without such tokens. Up to three of the pages that a row leaves unread may
// already have been requested; these do not count as unread. A row depends on nothing but itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/attention/attend_cuda.h"
#include "kernels/paged/kv_tensor_maps.h"
#include "kernels/sparse/art/art_rule.h"
#include "kernels/sparse/common/cuda_selector.h"
#include "kernels/sparse/common/method_options.h"
#include "kernels/sparse/common/stages.h"

namespace kvasir::kernels {

struct ArtCuda {
  ArtOptions options;
  std::span<const PolicyNumbers> numbers;  // one per query tile
};

// Bytes of device memory for the guards and orders of `blocks` query tiles.
int64_t AttendArtWorkspaceBytes(const PagedKv& kv, int64_t blocks, int64_t group);

// Attends with query tiles of one query each, whose params have device_counts. Their numbers decide
// which rows may end early. Allocates nothing and waits for nothing; may be captured. Errors: those
// of AttendDecode. Cost: one CTA reads a row; with order importance a kernel of its own sorts the
// row's list first.
absl::Status AttendArt(const CudaAttendParams& params, const ArtCuda& art, const KvTensorMaps& maps,
                       std::byte* workspace, cudaStream_t stream);

// INVALID_ARGUMENT as for ArtTerminator::Create.
absl::StatusOr<std::unique_ptr<CudaTerminator>> MakeCudaArt(const MethodOptions& options);

}  // namespace kvasir::kernels
