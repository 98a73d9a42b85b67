// Chooses a GPU for each worker that `kvasir serve` starts. The coordinator has no CUDA: it reads
// CUDA_VISIBLE_DEVICES and the driver's list of GPUs. Functions without state.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace kvasir::coordinator {

struct LocalGpus {
  // GPUs named by CUDA_VISIBLE_DEVICES; nullopt if it is not set.
  std::optional<std::vector<std::string>> visible;
  // Number of GPUs of the driver; nullopt if it cannot be read.
  std::optional<int64_t> count;
};

LocalGpus LookForGpus();

// Returns the CUDA_VISIBLE_DEVICES of each worker: one GPU each. INVALID_ARGUMENT when there are
// fewer than `workers`. When neither field is known, the workers report what is missing.
absl::StatusOr<std::vector<std::string>> ChooseGpus(int64_t workers, const LocalGpus& gpus);

}  // namespace kvasir::coordinator
