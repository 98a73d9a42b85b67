// Executable shape comments. An op opens with
//
//   ShapeCheck check("rms_norm");
//   check.Match("x", p.x, {"tokens", "hidden"}, DType::kFloat32)
//        .Match("weight", p.weight, {"hidden"}, DType::kFloat32);
//   KVASIR_RETURN_IF_ERROR(check.status());
//
// The first use of a dimension name binds its size, and later uses must agree. A number must be
// equal. The first mismatch becomes INVALID_ARGUMENT: "rms_norm: weight is float32[5], expected
// [hidden=4]".
#pragma once

#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <variant>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "kernels/base/tensor.h"

namespace kvasir::kernels {

class ShapeCheck {
 public:
  using Dim = std::variant<absl::string_view, int64_t>;

  explicit ShapeCheck(absl::string_view op) : op_(op) {}

  // Any dtype is accepted when `dtype` is absent.
  ShapeCheck& Match(absl::string_view name, const TensorView& tensor,
                    std::initializer_list<Dim> shape, std::optional<DType> dtype = std::nullopt);
  // Records INVALID_ARGUMENT "<op>: <message>" when the condition does not hold.
  ShapeCheck& Require(bool condition, absl::string_view message);

  const absl::Status& status() const { return status_; }
  // REQUIRES: `name` was bound by a Match.
  int64_t dim(absl::string_view name) const;

 private:
  std::string op_;
  std::map<std::string, int64_t> bound_;
  absl::Status status_;
};

}  // namespace kvasir::kernels
