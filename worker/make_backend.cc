#include "worker/make_backend.h"

#include "absl/strings/str_cat.h"

#include "worker/backend/cpu/cpu_backend.h"
#include "worker/backend/cuda/make_cuda_backend.h"

namespace kvasir::worker {

absl::StatusOr<std::unique_ptr<Backend>> MakeBackend(absl::string_view device,
                                                     kernels::Executor& executor) {
  if (device == "cpu") return std::make_unique<CpuBackend>(executor);
  if (device == "cuda") return MakeCudaBackend(executor);
  return absl::InvalidArgumentError(absl::StrCat("device '", device, "'; it must be cpu or cuda"));
}

}  // namespace kvasir::worker
