#include "kernels/dense/add.h"

#include "kernels/base/cpu_isa.h"
#include "kernels/base/device_check.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/dense/elementwise.h"
#include "kernels/dense/parallel_rows.h"

namespace kvasir::kernels {
namespace {

constexpr IsaForms<void(const AddRows&, int64_t, int64_t)> kForms = {
    .portable = RunAddRows,
    .neon = KVASIR_ON_ARM(RunAddRowsNeon),
    .avx2 = KVASIR_ON_X86(RunAddRowsAvx2),
    .avx512 = KVASIR_ON_X86(RunAddRowsAvx512)};

}  // namespace

absl::Status AddTo(const TensorView& x, const TensorView& y, Executor& executor) {
  ShapeCheck check("add");
  check.Match("y", y, {"rows", "width"})
      .Match("x", x, {"rows", "width"})
      .Require(IsFloat32OrBFloat16(x.dtype()) && IsFloat32OrBFloat16(y.dtype()),
               "x and y must be float32 or bfloat16");
  KVASIR_RETURN_IF_ERROR(check.status());
  KVASIR_RETURN_IF_ERROR(RequireHostMemory("add", {x, y}));

  const AddRows rows = {
      .x = x.data(), .y = y.data(), .x_dtype = x.dtype(), .y_dtype = y.dtype(), .dim = y.dim(1)};
  const auto run = ChooseForm(kForms);
  ForRowChunks(executor, y.dim(0), 2 * rows.dim,
               [&](int64_t begin, int64_t end) { run(rows, begin, end); });
  return absl::OkStatus();
}

}  // namespace kvasir::kernels
