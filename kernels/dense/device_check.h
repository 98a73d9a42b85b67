// What every op of this folder opens with, after its shape check: its tensors lie where the form
// that was called (with an executor, or with a stream) reads them. Stateless.
#pragma once

#include <initializer_list>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "kernels/base/tensor.h"

namespace kvasir::kernels {

// UNIMPLEMENTED when any of the tensors is not in host memory.
absl::Status RequireHostMemory(absl::string_view op, std::initializer_list<TensorView> tensors);

// INVALID_ARGUMENT when any of the tensors is in host memory; empty views are left out.
absl::Status RequireDeviceMemory(absl::string_view op, std::initializer_list<TensorView> tensors);

}  // namespace kvasir::kernels
