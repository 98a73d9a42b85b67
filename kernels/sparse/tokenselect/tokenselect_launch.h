// The kernels of tokenselect_cuda.h. Only tokenselect_cuda.cc includes it, after it has checked the
// shapes.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/sparse/common/select_cuda.h"
#include "kernels/sparse/tokenselect/tokenselect_plan.h"

namespace kvasir::kernels {

// CTAs, a cluster, that choose for a row, and most pages that one of them has room for.
inline constexpr int kVoteBlocks = 8;
inline constexpr int64_t kVotePages = 12288;

// Most query heads that vote together.
inline constexpr int64_t kMostVoters = 1024;

// The maximum and sum of a softmax. Logits here are times log2(e), so powers are of two: the
// logarithm of the denominator is max + log2(sum).
struct SoftmaxSum {
  float max;
  float sum;
};

// All pointers are device memory. A token's place is its number from the start of the context.
struct TokenSelectLaunch {
  SelectLaunch select = {};
  Scope scope = Scope::kKvGroup;
  uint8_t* faults = nullptr;    // [num_slots]
  int64_t max_tokens = 0;       // most that a slot can hold
  int64_t blocks_of_row = 0;    // CTAs that compute its logits
  int64_t logits_of_row = 0;    // floats of logits per row
  float* logits = nullptr;      // [rows][group, max_tokens] of logits_of_row: neither NaN nor inf
  SoftmaxSum* parts = nullptr;  // [rows, blocks_of_row, group]
  // [rows, max_tokens]: bits of a float that is not negative. At group scope.
  uint32_t* votes = nullptr;
  // [query tiles, max_tokens]: votes of layers in units of 1 / kVoteUnits, from the first page with
  // candidates on, and the number of their tokens [query tiles]. At layer scope.
  int64_t* layer_votes = nullptr;
  int32_t* layer_tokens = nullptr;

  // The tokens that may still be chosen. They overwrite the row's logits.
  KVASIR_HOST_DEVICE uint64_t* Rivals(int64_t row) const {
    return reinterpret_cast<uint64_t*>(logits + row * logits_of_row);
  }
};

cudaError_t LaunchTokenLogits(const TokenSelectLaunch& params, const TokenSelectPlan& plan,
                              cudaStream_t stream);
// Casts the votes of layers.
cudaError_t LaunchLayerVotes(const TokenSelectLaunch& params, cudaStream_t stream);
// Casts the votes of KV groups, or takes those of layers, already cast; chooses, and writes lists.
cudaError_t LaunchTokenVotes(const TokenSelectLaunch& params, const TokenSelectPlan& plan,
                             cudaStream_t stream);

}  // namespace kvasir::kernels
