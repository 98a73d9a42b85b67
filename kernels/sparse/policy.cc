#include "kernels/sparse/policy.h"

#include <span>
#include <string>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/sparse/methods.h"

namespace kvasir::kernels {

namespace {

template <typename Method>
absl::StatusOr<const Method*> Find(absl::string_view kind, std::span<const Method> methods,
                                   absl::string_view name) {
  std::string known;
  for (const Method& method : methods) {
    if (method.name == name) return &method;
    absl::StrAppend(&known, known.empty() ? "" : ", ", method.name);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown ", kind, " '", name, "'; the ", kind, "s are ", known));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Selector>> MakeSelector(absl::string_view name,
                                                       const MethodOptions& options) {
  KVASIR_ASSIGN_OR_RETURN(const auto* method, Find("selector", SelectorMethods(), name));
  return method->make(options);
}

absl::StatusOr<std::unique_ptr<Pruner>> MakePruner(absl::string_view name) {
  KVASIR_ASSIGN_OR_RETURN(const auto* method, Find("pruner", PrunerMethods(), name));
  return method->make();
}

absl::StatusOr<std::unique_ptr<ReuseRule>> MakeReuseRule(absl::string_view name) {
  KVASIR_ASSIGN_OR_RETURN(const auto* method, Find("reuse rule", ReuseMethods(), name));
  return method->make();
}

absl::StatusOr<std::unique_ptr<Terminator>> MakeTerminator(absl::string_view name,
                                                           const MethodOptions& options) {
  KVASIR_ASSIGN_OR_RETURN(const auto* method, Find("terminator", TerminatorMethods(), name));
  return method->make(options);
}

}  // namespace kvasir::kernels
