// The device dispatch that every op of this folder opens with, after its shape check. Until an op
// has a CUDA kernel, tensors in device memory are refused here, in one place with one message.
// Stateless.
#pragma once

#include <initializer_list>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "kernels/base/tensor.h"

namespace kvasir::kernels {

// UNIMPLEMENTED when any of the tensors is not in host memory.
absl::Status RequireHostMemory(absl::string_view op, std::initializer_list<TensorView> tensors);

}  // namespace kvasir::kernels
