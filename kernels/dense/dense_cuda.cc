#include "kernels/dense/dense_cuda.h"

#include "kernels/base/cuda_status.h"
#include "kernels/base/device_check.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/dense/elementwise_launch.h"
#include "kernels/dense/op_checks.h"

namespace kvasir::kernels {

absl::StatusOr<bool> HasKernelsForDevice() {
  const cudaError_t error = FindKernels();
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    return false;
  }
  KVASIR_RETURN_IF_ERROR(CudaStatus(error, "looking for kernels"));
  return true;
}

absl::Status RmsNorm(const RmsNormParams& params, cudaStream_t stream) {
  KVASIR_RETURN_IF_ERROR(CheckRmsNorm(params));
  KVASIR_RETURN_IF_ERROR(RequireDeviceMemory("rms_norm", {params.x, params.weight, params.y}));
  if (params.x.num_elements() == 0) return absl::OkStatus();
  const SumNormLaunch launch = {.added = nullptr,
                                .sum = params.x.data(),
                                .weight = params.weight.data(),
                                .normed = params.y.data(),
                                .dtype = params.x.dtype(),
                                .dim = params.x.dim(1),
                                .epsilon = params.epsilon};
  return CudaStatus(LaunchSumNorm(launch, params.x.dim(0), stream), "launching rms_norm");
}

absl::Status AddNorm(const AddNormParams& p, cudaStream_t stream) {
  const DType dtype = p.x.dtype();
  ShapeCheck check("add_norm");
  check.Match("x", p.x, {"rows", "dim"})
      .Require(IsFloat32OrBFloat16(dtype), "x must be float32 or bfloat16")
      .Match("y", p.y, {"rows", "dim"}, dtype)
      .Require(p.epsilon >= 0, "epsilon must not be negative");
  if (!p.weight.empty()) {
    check.Match("weight", p.weight, {"dim"}, dtype)
        .Match("normed", p.normed, {"rows", "dim"}, dtype);
  }
  KVASIR_RETURN_IF_ERROR(check.status());
  KVASIR_RETURN_IF_ERROR(RequireDeviceMemory("add_norm", {p.x, p.y, p.weight, p.normed}));
  if (p.x.num_elements() == 0) return absl::OkStatus();
  const SumNormLaunch launch = {.added = p.x.data(),
                                .sum = p.y.data(),
                                .weight = p.weight.data(),
                                .normed = p.normed.data(),
                                .dtype = dtype,
                                .dim = p.x.dim(1),
                                .epsilon = p.epsilon};
  return CudaStatus(LaunchSumNorm(launch, p.x.dim(0), stream), "launching add_norm");
}

absl::Status SiluMul(const SiluMulParams& params, cudaStream_t stream) {
  KVASIR_RETURN_IF_ERROR(CheckSiluMul(params));
  KVASIR_RETURN_IF_ERROR(RequireDeviceMemory("silu_mul", {params.gate_up, params.y}));
  if (params.y.num_elements() == 0) return absl::OkStatus();
  return CudaStatus(LaunchSiluMul(RowsOf(params), params.y.dim(0), stream), "launching silu_mul");
}

absl::Status Embedding(const EmbeddingParams& params, cudaStream_t stream) {
  KVASIR_RETURN_IF_ERROR(CheckEmbedding(params));
  KVASIR_RETURN_IF_ERROR(RequireDeviceMemory("embedding", {params.table, params.ids, params.y}));
  if (params.y.num_elements() == 0) return absl::OkStatus();
  const GatherLaunch launch = {
      .table = params.table.data(),
      .num_rows = params.table.dim(0),
      .ids = params.ids.As<int32_t>(),
      .y = params.y.data(),
      .row_bytes = params.y.dim(1) * static_cast<int64_t>(DTypeSize(params.y.dtype()))};
  return CudaStatus(LaunchGather(launch, params.ids.dim(0), stream), "launching embedding");
}

absl::Status FillRandom(const RandomFillParams& params, cudaStream_t stream) {
  KVASIR_RETURN_IF_ERROR(CheckRandomFill(params));
  KVASIR_RETURN_IF_ERROR(RequireDeviceMemory("random_fill", {params.y}));
  if (params.y.num_elements() == 0) return absl::OkStatus();
  return CudaStatus(LaunchRandomFill(RowsOf(params), params.y.num_elements(), stream),
                    "launching random_fill");
}

absl::Status ComputeRopeAngles(const RopeAnglesParams& params, cudaStream_t stream) {
  const auto tokens = static_cast<int64_t>(params.positions.size());
  const auto half_dim = static_cast<int64_t>(params.inv_freq.size());
  ShapeCheck check("rope_angles");
  check.Match("cos", params.angles.cos, {tokens, half_dim}, DType::kFloat32)
      .Match("sin", params.angles.sin, {tokens, half_dim}, DType::kFloat32);
  KVASIR_RETURN_IF_ERROR(check.status());
  KVASIR_RETURN_IF_ERROR(
      RequireDeviceMemory("rope_angles", {params.angles.cos, params.angles.sin}));
  if (tokens * half_dim == 0) return absl::OkStatus();
  const AnglesLaunch launch = {.positions = params.positions.data(),
                               .inv_freq = params.inv_freq.data(),
                               .attention_scaling = params.attention_scaling,
                               .half_dim = half_dim,
                               .cos = params.angles.cos.As<float>(),
                               .sin = params.angles.sin.As<float>()};
  return CudaStatus(LaunchRopeAngles(launch, tokens, stream), "launching rope_angles");
}

absl::Status FindFiniteTokens(const FiniteTokensParams& params, cudaStream_t stream) {
  ShapeCheck check("finite_tokens");
  check.Match("x", params.x, {"tokens", "dim"})
      .Require(params.x.dtype() == DType::kFloat32 || params.x.dtype() == DType::kBFloat16,
               "x must be float32 or bfloat16")
      .Require(std::ssize(params.finite) == params.x.dim(0), "finite must be [tokens]");
  KVASIR_RETURN_IF_ERROR(check.status());
  KVASIR_RETURN_IF_ERROR(RequireDeviceMemory("finite_tokens", {params.x}));
  if (params.x.num_elements() == 0) return absl::OkStatus();
  const FiniteLaunch launch = {.x = params.x.data(),
                               .dtype = params.x.dtype(),
                               .dim = params.x.dim(1),
                               .finite = params.finite.data()};
  return CudaStatus(LaunchFinite(launch, params.x.dim(0), stream), "launching finite_tokens");
}

}  // namespace kvasir::kernels
