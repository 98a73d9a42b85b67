// The kernels behind tokenselect_cuda.h. Only tokenselect_cuda.cc includes it, after it has checked
// the shapes.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/sparse/select_cuda.h"

namespace kvasir::kernels {

// Blocks of threads that take a row's logits, at most.
inline constexpr int kLogitBlocks = 256;
// Blocks of threads, a cluster, that choose for a row, and pages for which one of them has room.
inline constexpr int kVoteBlocks = 8;
inline constexpr int64_t kVotePages = 12288;

// Query heads that vote together, at most.
inline constexpr int64_t kMostVoters = 1024;

// Logits count in powers of two: they are times log2(e). The logarithm of a softmax's denominator
// is max + log2(sum).
struct SoftmaxSum {
  float max;
  float sum;
};

// All pointers are device memory. A token stands at its number, from the start of the context.
struct TokenSelectLaunch {
  SelectLaunch select = {};
  Scope scope = Scope::kKvGroup;
  uint8_t* faults = nullptr;    // [num_slots]
  int64_t max_tokens = 0;       // that a slot can hold
  int64_t blocks_of_row = 0;    // that take logits
  int64_t logits_of_row = 0;    // floats
  float* logits = nullptr;      // [rows][group, max_tokens] of logits_of_row: neither NaN nor inf
  SoftmaxSum* parts = nullptr;  // [rows, blocks_of_row, group]
  // [rows, max_tokens]: bits of a float that is not negative. Those of a layer stand in the place
  // of its first row.
  uint32_t* votes = nullptr;

  // Of tokens that may be chosen yet; takes the place of the row's logits.
  KVASIR_HOST_DEVICE uint64_t* Rivals(int64_t row) const {
    return reinterpret_cast<uint64_t*>(logits + row * logits_of_row);
  }
};

cudaError_t LaunchTokenLogits(const TokenSelectLaunch& params, cudaStream_t stream);
// Casts the votes of layers.
cudaError_t LaunchLayerVotes(const TokenSelectLaunch& params, cudaStream_t stream);
// Of KV groups, or of layers, whose votes have been cast; chooses, and writes lists.
cudaError_t LaunchTokenVotes(const TokenSelectLaunch& params, cudaStream_t stream);

}  // namespace kvasir::kernels
