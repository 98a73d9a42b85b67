// The flag --kv-cache-dtype of benchmarks on a GPU.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

#include "kernels/base/dtype.h"

namespace kvasir::kernels {

inline absl::StatusOr<DType> ParseKvDType(absl::string_view name) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat8E4M3, DType::kInt8}) {
    if (name == DTypeName(dtype)) return dtype;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--kv-cache-dtype is bfloat16, fp8_e4m3 or int8, not '", name, "'"));
}

}  // namespace kvasir::kernels
