#include "kernels/dense/silu_mul.h"

#include "kernels/base/cpu_isa.h"
#include "kernels/base/device_check.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/dense/elementwise.h"
#include "kernels/dense/op_checks.h"
#include "kernels/dense/parallel_rows.h"

namespace kvasir::kernels {
namespace {

constexpr IsaForms<void(const SiluMulRows&, int64_t, int64_t)> kForms = {
    .portable = RunSiluMulRows,
    .neon = KVASIR_ON_ARM(RunSiluMulRowsNeon),
    .avx2 = KVASIR_ON_X86(RunSiluMulRowsAvx2),
    .avx512 = KVASIR_ON_X86(RunSiluMulRowsAvx512)};

}  // namespace

absl::Status CheckSiluMul(const SiluMulParams& params) {
  const DType dtype = params.gate_up.dtype();
  ShapeCheck check("silu_mul");
  check.Match("y", params.y, {"tokens", "dim"}, dtype)
      .Match("gate_up", params.gate_up, {"tokens", 2 * params.y.dim(1)})
      .Require(dtype == DType::kFloat32 || dtype == DType::kBFloat16,
               "gate_up must be float32 or bfloat16");
  return check.status();
}

SiluMulRows RowsOf(const SiluMulParams& params) {
  return {.gate_up = params.gate_up.data(),
          .y = params.y.data(),
          .dtype = params.y.dtype(),
          .dim = params.y.dim(1)};
}

absl::Status SiluMul(const SiluMulParams& params, Executor& executor) {
  KVASIR_RETURN_IF_ERROR(CheckSiluMul(params));
  KVASIR_RETURN_IF_ERROR(RequireHostMemory("silu_mul", {params.gate_up, params.y}));

  const SiluMulRows rows = RowsOf(params);
  const auto run = ChooseForm(kForms);
  ForRowChunks(executor, params.y.dim(0), 2 * rows.dim,
               [&](int64_t begin, int64_t end) { run(rows, begin, end); });
  return absl::OkStatus();
}

}  // namespace kvasir::kernels
