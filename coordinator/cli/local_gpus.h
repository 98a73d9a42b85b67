// Which GPU each of the workers gets that `kvasir serve` starts. The coordinator has no CUDA: it
// looks at what CUDA_VISIBLE_DEVICES leaves, and at the driver's list. Functions without state.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace kvasir::coordinator {

struct LocalGpus {
  // As CUDA_VISIBLE_DEVICES names them; none if it is not set.
  std::optional<std::vector<std::string>> visible;
  // That the driver has; none if that cannot be seen.
  std::optional<int64_t> count;
};

LocalGpus LookForGpus();

// One for each of `workers`, to be its CUDA_VISIBLE_DEVICES. INVALID_ARGUMENT when there are fewer.
// Where neither is known the workers will say what is missing.
absl::StatusOr<std::vector<std::string>> ChooseGpus(int64_t workers, const LocalGpus& gpus);

}  // namespace kvasir::coordinator
