// The second check of every op of this folder, after its shape check: its tensors lie in the memory
// that the called form (with an executor, or with a stream) reads. Stateless.
#pragma once

#include <initializer_list>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "kernels/base/tensor.h"

namespace kvasir::kernels {

// UNIMPLEMENTED when any of the tensors is not in host memory.
absl::Status RequireHostMemory(absl::string_view op, std::initializer_list<TensorView> tensors);

// INVALID_ARGUMENT when any of the tensors is in host memory. Empty views are skipped.
absl::Status RequireDeviceMemory(absl::string_view op, std::initializer_list<TensorView> tensors);

}  // namespace kvasir::kernels
