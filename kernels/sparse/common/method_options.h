// Options of a method, as a policy gives them.
#pragma once

#include <string>
#include <vector>

namespace kvasir::kernels {

// One field of a method's message in sparsity.proto that is set.
struct MethodOption {
  std::string name;
  std::string value;
};
using MethodOptions = std::vector<MethodOption>;

}  // namespace kvasir::kernels
