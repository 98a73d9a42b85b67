#include "kernels/dense/random_fill.h"

#include "kernels/base/device_check.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/dense/op_checks.h"
#include "kernels/dense/parallel_rows.h"

// The CPU code is a loop over random_rows.h, so it has no file of its own.
namespace kvasir::kernels {

absl::Status CheckRandomFill(const RandomFillParams& params) {
  const TensorView& y = params.y;
  ShapeCheck check("random_fill");
  check.Require(y.rank() == 1 || y.rank() == 2, "y must be [rows] or [rows, cols]")
      .Require(IsFloat32OrBFloat16(y.dtype()), "y must be float32 or bfloat16");
  KVASIR_RETURN_IF_ERROR(check.status());
  check.Require(params.first_row >= 0 && params.first_col >= 0, "y begins before the whole")
      .Require(params.width >= params.first_col + RowsOf(params).cols, "y is wider than the whole");
  return check.status();
}

RandomRows RowsOf(const RandomFillParams& params) {
  const TensorView& y = params.y;
  return {.y = y.data(),
          .dtype = y.dtype(),
          .cols = y.rank() == 1 ? 1 : y.dim(1),
          .first = params.first_row * params.width + params.first_col,
          .width = params.width,
          .seed = params.seed,
          .mean = params.mean,
          .spread = params.spread};
}

absl::Status FillRandom(const RandomFillParams& params, Executor& executor) {
  KVASIR_RETURN_IF_ERROR(CheckRandomFill(params));
  KVASIR_RETURN_IF_ERROR(RequireHostMemory("random_fill", {params.y}));
  const RandomRows rows = RowsOf(params);
  ForRowChunks(executor, params.y.dim(0), rows.cols, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * rows.cols; i < end * rows.cols; ++i) rows.Fill(i);
  });
  return absl::OkStatus();
}

}  // namespace kvasir::kernels
