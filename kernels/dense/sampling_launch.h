// The kernel behind sampling_cuda.h. Only sampling_cuda.cc includes it.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/dense/sampling_records.h"

namespace kvasir::kernels {

// All pointers are the device's.
struct SamplingLaunch {
  const float* logits;  // [rows][vocab]
  int64_t vocab;        // 1 to kMaxVocab
  float* changed;       // [rows][vocab], or null
  // Pinned host memory, like what the records say lies behind it.
  const SamplingRecord* records;  // [rows]
  FoundToken* found;              // [rows], written
};

// `rows` >= 1.
cudaError_t LaunchSampling(const SamplingLaunch& params, int64_t rows, cudaStream_t stream);

}  // namespace kvasir::kernels
