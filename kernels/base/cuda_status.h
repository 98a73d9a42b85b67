// CUDA's error codes as absl::Status, for host code that calls the CUDA runtime. Only in builds
// with CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace kvasir::kernels {

// `doing` describes the call: "allocating 12 bytes of device memory". RESOURCE_EXHAUSTED when
// memory ran out, UNAVAILABLE without a usable device, INTERNAL otherwise.
inline absl::Status CudaStatus(cudaError_t error, absl::string_view doing) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string message =
      absl::StrCat(doing, ": ", cudaGetErrorName(error), ", ", cudaGetErrorString(error));
  switch (error) {
    case cudaErrorMemoryAllocation:
      return absl::ResourceExhaustedError(message);
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
      return absl::UnavailableError(message);
    default:
      return absl::InternalError(message);
  }
}

}  // namespace kvasir::kernels
