// The kernels behind quest_cuda.h. Only quest_cuda.cc includes it, after it has checked the shapes.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/sparse/stages.h"

namespace kvasir::kernels {

// All pointers are device memory.
struct QuestLaunch {
  const void* q = nullptr;  // [tokens, KV heads x group, head_dim]
  DType q_dtype = DType::kFloat32;
  int64_t group = 0;
  PagedKv kv;
  int64_t layer = 0;
  const QueryBlock* blocks = nullptr;
  const SelectionNumbers* numbers = nullptr;  // one per block
  PageSelection out;
  uint32_t* scores = nullptr;  // [rows, max_blocks_per_slot] of OrderedScore (ranking.h)
};

cudaError_t LaunchQuest(const QuestLaunch& params, cudaStream_t stream);

}  // namespace kvasir::kernels
