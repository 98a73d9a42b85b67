// The selector `infinitehip` (infinitehip_selector.h) on the GPU, with probe "digest": the same
// stages, chunks and lists, in device memory, where the attention kernels read them. All pointers
// of the params, spans included, are device memory; params.scratch and the faults are not used.
// Called by the attention layer. Thread-safe. Only in builds with CUDA.
//
// Scores are float32 sums in another order than on the CPU: where scores of the last chunk in and
// the first one out are as good as equal, either may be chosen. A row whose list has no room in
// `out` gets its first pages. A row depends on nothing but itself; at layer scope, on its block.
//
// Where keys are cached un-rotated, q is un-rotated, too, in chunk-indexed layers
// (InfiniteHipSelector::IsChunkIndexed), and params.device_rope places it; in the others q is what
// RotateToDistance made for `distance`, and device_rope is empty.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>

#include "absl/status/status.h"

#include "kernels/sparse/distant_queries_cuda.h"
#include "kernels/sparse/infinitehip/infinitehip_selector.h"
#include "kernels/sparse/stages.h"

namespace kvasir::kernels {

struct InfiniteHipCuda {
  const InfiniteHipSelector::Preset* preset = nullptr;  // InfiniteHipSelector::FindPreset
  int64_t max_budget_tokens = 0;                        // of any row
  Scope scope = Scope::kKvGroup;                        // kLayer: params.kv has all KV heads of it

  // Of queries in layers that are not chunk-indexed: right behind the candidates, for all alike.
  QueryDistance distance() const {
    return {.within_window = preset->overlap(), .of_own_window = false};
  }
  // The positions that chunk-indexed layers need, beyond the window.
  int64_t MaxChunks(const PagedKv& kv) const;
  // Those of the stages behind the first.
  int64_t MaxLaterChunks() const;
};

// Device memory that SelectInfiniteHip needs for so many query blocks.
int64_t InfiniteHipWorkspaceBytes(const InfiniteHipCuda& method, const PagedKv& kv, int64_t blocks);

// One kernel where all blocks of the step are one token, in bfloat16, with rotated keys, and heads
// choose for themselves. Else two of the first stage and one of the others, at layer scope four.
// REQUIRES: windows are at least MinWindowTokens, budgets at most method.max_budget_tokens. Nothing
// is allocated or waited for; may be captured. INVALID_ARGUMENT on shapes: head_dim 64 or 128, q
// and KV float32 or bfloat16. FAILED_PRECONDITION when the KV has no bounds or no key codes.
// INTERNAL with CUDA's error when a launch fails.
absl::Status SelectInfiniteHip(const InfiniteHipCuda& method, const SelectParams& params,
                               const PageSelection& out, std::byte* workspace, cudaStream_t stream);

}  // namespace kvasir::kernels
