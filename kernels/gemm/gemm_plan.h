// Which kernel multiplies in a call of CudaLinear (gemm_cuda.h). Needs no GPU.
#pragma once

#include <cstdint>
#include <ostream>

#include "kernels/base/dtype.h"
#include "kernels/gemm/gemm_batch_plan.h"

namespace kvasir::kernels {

// The facts of a call that the choice depends on.
struct LinearCall {
  int64_t rows = 0;
  int64_t k = 0;
  int64_t n = 0;
  DType input = DType::kFloat32;
  bool has_norm = false;
  bool is_aligned = false;          // x and the norm, to 16 bytes
  bool few_rows_fit = false;        // FewRowsFit (gemm_few_rows.h)
  bool few_rows_normalize = false;  // FewRowsNormalize
};

struct LinearPlan {
  enum class Kernel {
    kFewRows,          // ours, with what comes before and after the product
    kNormThenFewRows,  // the same, after a kernel for the norm
    kBatch,            // ours, with the gate, and kernels for a norm and an addition
    kCublasLt,         // cuBLASLt's, with kernels for what comes before and after
  };

  LinearCall call;
  Kernel kernel = Kernel::kCublasLt;
};

// Our kernel for a few rows multiplies single rows only: from two on the one for a batch is faster
// (decision 0016).
inline LinearPlan PlanLinear(const LinearCall& call) {
  constexpr int64_t kCopiedElements = 8;  // rows are copied by 16 bytes
  using Kernel = LinearPlan::Kernel;
  if (call.input != DType::kBFloat16 || !call.is_aligned) return {.call = call};
  if (call.rows == 1 && call.few_rows_fit) {
    const bool norm_is_apart = call.has_norm && !call.few_rows_normalize;
    return {.call = call, .kernel = norm_is_apart ? Kernel::kNormThenFewRows : Kernel::kFewRows};
  }
  if (call.rows > kBatchRows || call.k % kCopiedElements != 0) return {.call = call};
  return {.call = call, .kernel = Kernel::kBatch};
}

inline std::ostream& operator<<(std::ostream& out, const LinearPlan& plan) {
  const LinearCall& call = plan.call;
  out << call.rows << " x " << call.k << " x " << call.n << ", " << DTypeName(call.input)
      << (call.has_norm ? ", normalized" : "") << ": ";
  switch (plan.kernel) {
    case LinearPlan::Kernel::kFewRows:
      return out << "kernel for few rows";
    case LinearPlan::Kernel::kNormThenFewRows:
      return out << "norm, then kernel for few rows";
    case LinearPlan::Kernel::kBatch:
      return out << "kernel for a batch of rows";
    case LinearPlan::Kernel::kCublasLt:
      break;
  }
  return out << "cuBLASLt";
}

}  // namespace kvasir::kernels
