#include "kernels/dense/device_check.h"

#include "absl/strings/str_cat.h"

namespace kvasir::kernels {

absl::Status RequireHostMemory(absl::string_view op, std::initializer_list<TensorView> tensors) {
  for (const TensorView& tensor : tensors) {
    if (tensor.device() != Device::kCpu) {
      return absl::UnimplementedError(absl::StrCat(op, ": ", tensor.DebugString(),
                                                   " is in CUDA memory, but this op runs on the "
                                                   "CPU only; use host memory"));
    }
  }
  return absl::OkStatus();
}

}  // namespace kvasir::kernels
