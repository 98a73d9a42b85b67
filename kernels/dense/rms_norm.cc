#include "kernels/dense/rms_norm.h"

#include "kernels/base/cpu_isa.h"
#include "kernels/base/device_check.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/dense/elementwise.h"
#include "kernels/dense/op_checks.h"
#include "kernels/dense/parallel_rows.h"

namespace kvasir::kernels {
namespace {

constexpr IsaForms<void(const NormRows&, int64_t, int64_t)> kForms = {
    .portable = RunNormRows,
    .neon = KVASIR_ON_ARM(RunNormRowsNeon),
    .avx2 = KVASIR_ON_X86(RunNormRowsAvx2),
    .avx512 = KVASIR_ON_X86(RunNormRowsAvx512)};

NormRows RowsOf(const RmsNormParams& params) {
  return {.x = params.x.data(),
          .weight = params.weight.data(),
          .y = params.y.data(),
          .dtype = params.x.dtype(),
          .dim = params.x.dim(1),
          .epsilon = params.epsilon};
}

}  // namespace

absl::Status CheckRmsNorm(const RmsNormParams& params) {
  const DType dtype = params.x.dtype();
  ShapeCheck check("rms_norm");
  check.Match("x", params.x, {"rows", "dim"})
      .Require(dtype == DType::kFloat32 || dtype == DType::kBFloat16,
               "x must be float32 or bfloat16")
      .Match("weight", params.weight, {"dim"}, dtype)
      .Match("y", params.y, {"rows", "dim"}, dtype)
      .Require(params.epsilon >= 0, "epsilon must not be negative");
  return check.status();
}

absl::Status RmsNorm(const RmsNormParams& params, Executor& executor) {
  KVASIR_RETURN_IF_ERROR(CheckRmsNorm(params));
  KVASIR_RETURN_IF_ERROR(RequireHostMemory("rms_norm", {params.x, params.weight, params.y}));

  const NormRows rows = RowsOf(params);
  const auto run = ChooseForm(kForms);
  ForRowChunks(executor, params.x.dim(0), rows.dim,
               [&](int64_t begin, int64_t end) { run(rows, begin, end); });
  return absl::OkStatus();
}

}  // namespace kvasir::kernels
