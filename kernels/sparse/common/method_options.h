// Options of a method, as a policy gives them.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace kvasir::kernels {

// One field of a method's message in sparsity.proto that is set.
struct MethodOption {
  std::string name;
  std::string value;
};
using MethodOptions = std::vector<MethodOption>;

// INVALID_ARGUMENT if there is any.
inline absl::Status RequireNoOptions(const MethodOptions& options) {
  if (options.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("this selector has no option '", options[0].name, "', nor any other"));
}

}  // namespace kvasir::kernels
