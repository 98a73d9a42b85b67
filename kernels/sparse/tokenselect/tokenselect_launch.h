// The kernels behind tokenselect_cuda.h. Only tokenselect_cuda.cc includes it, after it has checked
// the shapes.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/sparse/select_cuda.h"

namespace kvasir::kernels {

// Votes are counted by the upper 11 bits of their OrderedScore (ranking.h).
inline constexpr int kVoteBins = 2048;
// Blocks of threads of a row at most.
inline constexpr int kVoteBlocks = 256;

// max + log(sum) is the logarithm of a softmax's denominator.
struct SoftmaxSum {
  float max;
  float sum;
};

// A candidate is counted from the end of the sink on. All pointers are device memory.
struct TokenSelectLaunch {
  SelectLaunch select = {};
  uint8_t* faults = nullptr;        // [num_slots]
  int64_t max_tokens = 0;           // that a slot can hold
  int64_t blocks_of_row = 0;        // blocks of threads
  float* logits = nullptr;          // [rows, max_tokens, group]
  SoftmaxSum* parts = nullptr;      // [rows, blocks_of_row, group]
  uint32_t* votes = nullptr;        // [rows, max_tokens], of OrderedScore
  uint32_t* bins = nullptr;         // [rows, kVoteBins]: how many votes there are in each
  uint32_t* num_close = nullptr;    // [rows]: candidates in the bin of the last one chosen
  uint32_t* close = nullptr;        // [rows, max_tokens]: these; takes the place of the logits
  uint32_t* close_votes = nullptr;  // [rows, max_tokens]; likewise
  uint64_t* chosen = nullptr;       // [rows, pages]: masks of tokens
  uint64_t* equal = nullptr;        // [rows, pages]: of those with the very vote of the last one
};

cudaError_t LaunchTokenSelect(const TokenSelectLaunch& params, cudaStream_t stream);

}  // namespace kvasir::kernels
