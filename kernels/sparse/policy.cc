#include "kernels/sparse/policy.h"

#include <string>

#include "absl/strings/str_cat.h"

#include "kernels/sparse/methods.h"

namespace kvasir::kernels {

absl::StatusOr<std::unique_ptr<Selector>> MakeSelector(absl::string_view name) {
  std::string known;
  for (const SelectorMethod& method : SelectorMethods()) {
    if (method.name == name) return method.make();
    absl::StrAppend(&known, known.empty() ? "" : ", ", method.name);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown selector '", name, "'; the selectors are ", known));
}

}  // namespace kvasir::kernels
