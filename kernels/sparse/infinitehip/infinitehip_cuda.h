// The selector `infinitehip` (infinitehip_selector.h) on the GPU, with probe "digest": the same
// stages, chunks and lists, in device memory where the attention kernels read them. All pointers of
// the params, including spans, are device memory; the faults are not used.
// Called through cuda_selector.h. Thread-safe. Only in builds with CUDA.
//
// Scores are float32 sums in another order than on the CPU. Where the scores of the last chunk kept
// and the first one dropped are practically equal, either may be chosen. A row whose list has no
// room in `out` gets its first pages. A row depends on nothing but itself; at layer scope, on its
// query tile, whose lists are the same on however many ranks its heads are.
//
// Where keys are cached un-rotated, q is un-rotated, too, in chunk-indexed layers
// (InfiniteHipSelector::IsChunkIndexed), and params.device_rope places it. In the other layers q is
// the output of RotateToDistance for `distance`, and device_rope is empty.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/sparse/common/cuda_selector.h"
#include "kernels/sparse/common/distant_queries_cuda.h"
#include "kernels/sparse/common/method_options.h"
#include "kernels/sparse/common/stages.h"
#include "kernels/sparse/infinitehip/infinitehip_selector.h"

namespace kvasir::kernels {

struct InfiniteHipCuda {
  const InfiniteHipSelector::Preset* preset = nullptr;  // InfiniteHipSelector::FindPreset
  int64_t max_budget_tokens = 0;                        // largest of any row
  Scope scope = Scope::kKvGroup;

  // The distance of queries in layers that are not chunk-indexed: just after the candidates, the
  // same for all queries.
  QueryDistance distance() const {
    return {.within_window = preset->overlap(), .of_own_window = false};
  }
  // Most chunks of a row: the positions that chunk-indexed layers need beyond the window.
  int64_t MaxChunks(const PagedKv& kv) const;
  // Most chunks of a row in the stages after the first.
  int64_t MaxLaterChunks() const;
};

// Bytes of device memory that SelectInfiniteHip needs for `blocks` query tiles.
int64_t InfiniteHipWorkspaceBytes(const InfiniteHipCuda& method, const PagedKv& kv, int64_t blocks);

// Launches one kernel where all query tiles of the step are one token, in bfloat16, with rotated
// keys, and heads choose for themselves. Else two for the first stage, and one for the others or
// four at layer scope; where ranks choose together (params.part), each stage has one more, and they
// take maxima. REQUIRES: windows are at least MinWindowTokens, budgets at most
// method.max_budget_tokens. Allocates nothing and waits for nothing; may be captured.
// INVALID_ARGUMENT on shapes: head_dim 64 or 128, q float32 or bfloat16, KV of IsKvDType.
// FAILED_PRECONDITION when the KV has no bounds or no key codes. INTERNAL with CUDA's error when a
// launch fails.
absl::Status SelectInfiniteHip(const InfiniteHipCuda& method, const CudaSelectParams& params,
                               const PageSelection& out, std::byte* workspace, cudaStream_t stream);

// INVALID_ARGUMENT as for InfiniteHipSelector::Create. REQUIRES: the probe is "digest", which
// InfiniteHipSelector::SupportsGpu checks.
absl::StatusOr<std::unique_ptr<CudaSelector>> MakeCudaInfiniteHip(const MethodOptions& options);

}  // namespace kvasir::kernels
