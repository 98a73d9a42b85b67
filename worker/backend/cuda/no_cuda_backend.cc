// MakeCudaBackend in builds without CUDA.
#include "worker/backend/cuda/make_cuda_backend.h"

namespace kvasir::worker {

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(kernels::Executor&) {
  return absl::UnimplementedError(
      "--device=cuda: this worker was built without CUDA; build it where nvcc is found, with "
      "-DKVASIR_CUDA=ON, or use --device=cpu");
}

}  // namespace kvasir::worker
