// Makes the backend of a device, by name (--device). Called once by main.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/base/executor.h"
#include "worker/backend/backend.h"

namespace kvasir::worker {

// "cpu" or "cuda"; `executor` outlives it. INVALID_ARGUMENT for another name, UNIMPLEMENTED for
// cuda in a build without it, UNAVAILABLE where there is no usable GPU.
absl::StatusOr<std::unique_ptr<Backend>> MakeBackend(absl::string_view device,
                                                     kernels::Executor& executor);

}  // namespace kvasir::worker
