#include "kernels/base/device_check.h"

#include "absl/strings/str_cat.h"

namespace kvasir::kernels {

absl::Status RequireHostMemory(absl::string_view op, std::initializer_list<TensorView> tensors) {
  for (const TensorView& tensor : tensors) {
    if (tensor.device() != Device::kCpu) {
      return absl::UnimplementedError(absl::StrCat(op, ": ", tensor.DebugString(),
                                                   " is in CUDA memory, but the op's form for the "
                                                   "CPU was called; pass a stream, or use host "
                                                   "memory"));
    }
  }
  return absl::OkStatus();
}

absl::Status RequireDeviceMemory(absl::string_view op, std::initializer_list<TensorView> tensors) {
  for (const TensorView& tensor : tensors) {
    if (tensor.empty() || tensor.device() == Device::kCuda) continue;
    return absl::InvalidArgumentError(absl::StrCat(op, ": ", tensor.DebugString(),
                                                   " is in host memory, but the op's form for the "
                                                   "GPU was called; copy it to the device"));
  }
  return absl::OkStatus();
}

}  // namespace kvasir::kernels
