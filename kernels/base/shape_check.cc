#include "kernels/base/shape_check.h"

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace kvasir::kernels {

ShapeCheck& ShapeCheck::Match(absl::string_view name, const TensorView& tensor,
                              std::initializer_list<Dim> shape, std::optional<DType> dtype) {
  if (!status_.ok()) return *this;
  bool matches = tensor.rank() == static_cast<int>(shape.size());
  std::string expected;
  int i = 0;
  for (const Dim& dim : shape) {
    const int64_t found = i < tensor.rank() ? tensor.dim(i) : -1;
    ++i;
    absl::StrAppend(&expected, expected.empty() ? "" : ", ");
    if (const int64_t* number = std::get_if<int64_t>(&dim)) {
      absl::StrAppend(&expected, *number);
      matches = matches && *number == found;
      continue;
    }
    const absl::string_view dim_name = std::get<absl::string_view>(dim);
    const auto [it, is_new] = bound_.try_emplace(std::string(dim_name), found);
    absl::StrAppend(&expected, dim_name);
    if (!is_new) absl::StrAppend(&expected, "=", it->second);
    matches = matches && it->second == found;
  }
  if (!matches) {
    status_ = absl::InvalidArgumentError(
        absl::StrCat(op_, ": ", name, " is ", tensor.DebugString(), ", expected [", expected, "]"));
  } else if (dtype.has_value() && *dtype != tensor.dtype()) {
    status_ = absl::InvalidArgumentError(absl::StrCat(op_, ": ", name, " is ", tensor.DebugString(),
                                                      ", expected ", DTypeName(*dtype)));
  } else if (tensor.data() == nullptr && tensor.num_elements() != 0) {
    status_ = absl::InvalidArgumentError(
        absl::StrCat(op_, ": ", name, " ", tensor.DebugString(), " has no memory"));
  }
  return *this;
}

ShapeCheck& ShapeCheck::Require(bool condition, absl::string_view message) {
  if (status_.ok() && !condition) {
    status_ = absl::InvalidArgumentError(absl::StrCat(op_, ": ", message));
  }
  return *this;
}

int64_t ShapeCheck::dim(absl::string_view name) const {
  const auto it = bound_.find(std::string(name));
  KVASIR_CHECK(it != bound_.end());
  return it->second;
}

}  // namespace kvasir::kernels
