#include "kernels/dense/add.h"

#include "kernels/base/dtype.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/dense/device_check.h"

namespace kvasir::kernels {
namespace {

template <typename X, typename Y>
void AddRow(const X* x, Y* y, int64_t width) {
  for (int64_t i = 0; i < width; ++i) {
    const Y rounded = Y(static_cast<float>(x[i]));
    y[i] = Y(static_cast<float>(y[i]) + static_cast<float>(rounded));
  }
}

template <typename X, typename Y>
void AddRows(const TensorView& x, const TensorView& y, Executor& executor) {
  const int64_t width = y.dim(1);
  executor.ParallelFor(y.dim(0), [&](int64_t row, int) {
    AddRow(x.As<const X>() + row * width, y.As<Y>() + row * width, width);
  });
}

}  // namespace

absl::Status AddTo(const TensorView& x, const TensorView& y, Executor& executor) {
  ShapeCheck check("add");
  check.Match("y", y, {"rows", "width"})
      .Match("x", x, {"rows", "width"})
      .Require(IsFloat32OrBFloat16(x.dtype()) && IsFloat32OrBFloat16(y.dtype()),
               "x and y must be float32 or bfloat16");
  KVASIR_RETURN_IF_ERROR(check.status());
  KVASIR_RETURN_IF_ERROR(RequireHostMemory("add", {x, y}));
  const bool wide_x = x.dtype() == DType::kFloat32;
  if (y.dtype() == DType::kFloat32) {
    wide_x ? AddRows<float, float>(x, y, executor) : AddRows<BFloat16, float>(x, y, executor);
  } else {
    wide_x ? AddRows<float, BFloat16>(x, y, executor) : AddRows<BFloat16, BFloat16>(x, y, executor);
  }
  return absl::OkStatus();
}

}  // namespace kvasir::kernels
