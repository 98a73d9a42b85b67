// The CUDA backend, for make_backend.cc. Defined by cuda_backend.cc, or by no_cuda_backend.cc in
// builds without CUDA.
#pragma once

#include <memory>

#include "absl/status/statusor.h"

#include "kernels/base/executor.h"
#include "worker/backend/backend.h"

namespace kvasir::worker {

// UNIMPLEMENTED in a build without CUDA, UNAVAILABLE where there is no usable GPU. `executor`
// outlives the backend.
absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(kernels::Executor& executor);

}  // namespace kvasir::worker
