// Kernels of sampling_cuda.h. Only sampling_cuda.cc includes this header.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/sampling/sampling_records.h"

namespace kvasir::kernels {

// All pointers are device addresses.
struct SamplingLaunch {
  const float* logits;  // [rows][vocab]
  int64_t vocab;        // 1 to kMaxVocab
  float* changed;       // [rows][vocab], or null
  // Pinned host memory, like the arrays that the records point to.
  const SamplingRecord* records;  // [rows]
  FoundToken* found;              // [rows], written
};

struct FeedLaunch {
  const FoundToken* found;
  const int32_t* fed_by;  // [tokens]
  int32_t* tokens;        // [tokens]
  int64_t num_tokens;     // at least 1
};

// `rows` >= 1.
cudaError_t LaunchSampling(const SamplingLaunch& params, int64_t rows, cudaStream_t stream);
cudaError_t LaunchFeed(const FeedLaunch& params, cudaStream_t stream);

}  // namespace kvasir::kernels
