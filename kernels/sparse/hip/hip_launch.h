// The kernels of hip_cuda.h. Only hip_cuda.cc includes it, after it has checked the shapes.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/sparse/common/select_cuda.h"

namespace kvasir::kernels {

// A run of blocks of 2 tokens, counted from the first candidate.
struct HipNode {
  int32_t begin = 0;
  int32_t length = 0;
};

// All pointers are device memory.
struct HipLaunch {
  SelectLaunch select;
  uint8_t* faults = nullptr;
  int64_t max_nodes = 0;  // of a row
  // Workspace.
  int32_t* num_halves = nullptr;    // [rows]
  HipNode* nodes = nullptr;         // [rows, max_nodes]
  HipNode* halves = nullptr;        // [rows, 2 max_nodes]
  uint32_t* scores = nullptr;       // [rows, 2 max_nodes] of OrderedScore, of the halves
  int32_t* begins = nullptr;        // [rows, max_nodes]: first tokens of the nodes that are left
  uint32_t* kept_scores = nullptr;  // [rows, max_nodes], of the nodes
};

cudaError_t LaunchHip(const HipLaunch& params, cudaStream_t stream);

}  // namespace kvasir::kernels
