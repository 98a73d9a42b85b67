#include "kernels/gemm/gemm_cuda.h"

#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/buffer.h"
#include "kernels/base/cuda_status.h"
#include "kernels/base/device_check.h"
#include "kernels/base/multiprocessors.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/tensor_map.h"
#include "kernels/dense/convert.h"
#include "kernels/dense/dense_cuda.h"
#include "kernels/gemm/gemm_batch_rows.h"
#include "kernels/gemm/gemm_engine.h"
#include "kernels/gemm/gemm_few_rows.h"
#include "kernels/plans/plan_log.h"

namespace kvasir::kernels {

using After = LinearParams::After;

namespace {

// Weights go to the device in pieces of about this size.
constexpr int64_t kStagingBytes = int64_t{64} << 20;
constexpr uint64_t kMaxAlignment = 256;  // beyond it cuBLASLt sees no difference

int64_t Size(DType dtype) { return static_cast<int64_t>(DTypeSize(dtype)); }

// The largest power of two that divides the address, up to kMaxAlignment.
uint32_t AlignmentOf(const TensorView& tensor) {
  const auto address = reinterpret_cast<uint64_t>(tensor.data());
  return static_cast<uint32_t>(uint64_t{1} << std::countr_zero(address | kMaxAlignment));
}

absl::StatusOr<DeviceBuffer> CopyToDevice(const void* from, int64_t bytes) {
  KVASIR_ASSIGN_OR_RETURN(DeviceBuffer buffer, DeviceBuffer::Allocate(bytes));
  KVASIR_RETURN_IF_ERROR(CudaStatus(
      cudaMemcpy(buffer.data(), from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice),
      "copying a layer's weights to the device"));
  return buffer;
}

absl::StatusOr<DeviceBuffer> CopyWeights(const WeightSource& source, DType dtype) {
  const int64_t row_bytes = source.k() * Size(dtype);
  const int64_t piece = std::clamp<int64_t>(kStagingBytes / row_bytes, 1, source.n());
  KVASIR_ASSIGN_OR_RETURN(const HostBuffer staging, HostBuffer::Allocate(piece * row_bytes));
  KVASIR_ASSIGN_OR_RETURN(DeviceBuffer weights, DeviceBuffer::Allocate(source.n() * row_bytes));
  for (int64_t row = 0; row < source.n(); row += piece) {
    const int64_t rows = std::min(piece, source.n() - row);
    source.ReadRows(row, rows, dtype, staging.data());
    KVASIR_RETURN_IF_ERROR(
        CudaStatus(cudaMemcpy(weights.data() + row * row_bytes, staging.data(),
                              static_cast<size_t>(rows * row_bytes), cudaMemcpyHostToDevice),
                   "copying a layer's weights to the device"));
  }
  return weights;
}

absl::StatusOr<DeviceBuffer> CopyBias(const WeightSource& source, DType dtype) {
  if (!source.has_bias()) return DeviceBuffer();
  std::vector<float> wide(static_cast<size_t>(source.n()));
  source.ReadBias(wide.data());
  std::vector<std::byte> bias(wide.size() * DTypeSize(dtype));
  ConvertElements(wide.data(), DType::kFloat32, bias.data(), dtype, source.n());
  return CopyToDevice(bias.data(), std::ssize(bias));
}

// Tensors of the same dtype in device memory, one after the other.
absl::StatusOr<DeviceBuffer> Stack(std::span<const TensorView> tensors, DType dtype) {
  int64_t bytes = 0;
  for (const TensorView& tensor : tensors) {
    ShapeCheck check("gemm");
    check.Require(tensor.dtype() == dtype, "a part in device memory has another dtype");
    KVASIR_RETURN_IF_ERROR(check.status());
    KVASIR_RETURN_IF_ERROR(RequireDeviceMemory("gemm", {tensor}));
    bytes += tensor.size_bytes();
  }
  KVASIR_ASSIGN_OR_RETURN(DeviceBuffer stacked, DeviceBuffer::Allocate(bytes));
  std::byte* to = stacked.data();
  for (const TensorView& tensor : tensors) {
    KVASIR_RETURN_IF_ERROR(
        CudaStatus(cudaMemcpy(to, tensor.data(), static_cast<size_t>(tensor.size_bytes()),
                              cudaMemcpyDeviceToDevice),
                   "copying a layer's weights on the device"));
    to += tensor.size_bytes();
  }
  return stacked;
}

// The biases of parts in device memory, in another dtype maybe: by way of the host, as they are
// small.
absl::StatusOr<DeviceBuffer> ConvertBiases(std::span<const PackedLinear::Part> parts, DType dtype) {
  std::vector<PackedLinear::Part> on_host(parts.begin(), parts.end());
  std::vector<std::vector<std::byte>> memory(parts.size());
  int64_t n = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    n += parts[i].weight.dim(0);
    const TensorView& bias = parts[i].bias;
    if (bias.empty()) continue;
    KVASIR_RETURN_IF_ERROR(RequireDeviceMemory("gemm", {bias}));
    memory[i].resize(static_cast<size_t>(bias.size_bytes()));
    KVASIR_RETURN_IF_ERROR(CudaStatus(
        cudaMemcpy(memory[i].data(), bias.data(), memory[i].size(), cudaMemcpyDeviceToHost),
        "fetching a layer's bias"));
    on_host[i].bias = TensorView(memory[i].data(), bias.dtype(), {bias.dim(0)});
  }
  return CopyBias(WeightSource(on_host, n, parts[0].weight.dim(1)), dtype);
}

}  // namespace

absl::StatusOr<CudaLinear> CudaLinear::Create(const CublasLt& lt,
                                              std::span<const PackedLinear::Part> parts,
                                              const PackedLinear::Options& options) {
  KVASIR_ASSIGN_OR_RETURN(const LinearShape shape, CheckLinearParts(parts, options));
  CudaLinear linear;
  linear.lt_ = &lt;
  linear.options_ = options;
  linear.in_features_ = shape.k;
  linear.out_features_ = shape.n;
  KVASIR_RETURN_IF_ERROR(parts[0].weight.device() == Device::kCuda ? linear.TakeDeviceParts(parts)
                                                                   : linear.TakeHostParts(parts));
  KVASIR_RETURN_IF_ERROR(linear.Describe());
  KVASIR_RETURN_IF_ERROR(CudaStatus(CountMultiprocessors(linear.num_processors_),
                                    "counting the device's multiprocessors"));
  KVASIR_RETURN_IF_ERROR(linear.FindAlgorithms());
  return linear;
}

absl::Status CudaLinear::TakeHostParts(std::span<const PackedLinear::Part> parts) {
  for (const PackedLinear::Part& part : parts) {
    KVASIR_RETURN_IF_ERROR(RequireHostMemory("gemm", {part.weight, part.bias}));
  }
  const WeightSource source(parts, out_features_, in_features_);
  KVASIR_ASSIGN_OR_RETURN(weights_, CopyWeights(source, options_.input));
  KVASIR_ASSIGN_OR_RETURN(bias_, CopyBias(source, options_.output));
  return absl::OkStatus();
}

// The parts were made on streams that do not wait for each other.
absl::Status CudaLinear::TakeDeviceParts(std::span<const PackedLinear::Part> parts) {
  std::vector<TensorView> weights;
  for (const PackedLinear::Part& part : parts) weights.push_back(part.weight);
  KVASIR_RETURN_IF_ERROR(CudaStatus(cudaDeviceSynchronize(), "waiting for a layer's weights"));
  KVASIR_ASSIGN_OR_RETURN(weights_, Stack(weights, options_.input));
  KVASIR_ASSIGN_OR_RETURN(bias_, ConvertBiases(parts, options_.output));
  return CudaStatus(cudaDeviceSynchronize(), "copying a layer's weights on the device");
}

// cuBLASLt counts by columns. In its terms weights are [K, N], x is [K, M] and y is [N, M]:
// y = weights^T x.
absl::Status CudaLinear::Describe() {
  KVASIR_ASSIGN_OR_RETURN(
      description_,
      DescribeProduct(bias_.size_bytes() > 0 ? bias_.data() : nullptr, options_.output));
  KVASIR_ASSIGN_OR_RETURN(weights_layout_,
                          DescribeMatrix(options_.input, in_features_, out_features_));
  return absl::OkStatus();
}

absl::Status CudaLinear::FindAlgorithms() {
  if (options_.input != DType::kBFloat16 || !FewRowsFit(1, in_features_)) return absl::OkStatus();
  const absl::StatusOr<const LinearAlgorithms*> found =
      lt_->AlgorithmsOf({.n = out_features_,
                         .k = in_features_,
                         .output = options_.output,
                         .has_bias = bias_.size_bytes() > 0});
  if (absl::IsUnimplemented(found.status())) return absl::OkStatus();  // maybe for other rows
  KVASIR_RETURN_IF_ERROR(found.status());
  algorithms_ = *found;
  return absl::OkStatus();
}

absl::StatusOr<CudaLinear::Plan> CudaLinear::MakePlan(const PlanKey& key) const {
  const auto [m, x_alignment, y_alignment] = key;
  Plan plan;
  KVASIR_ASSIGN_OR_RETURN(plan.x, DescribeMatrix(options_.input, in_features_, m));
  KVASIR_ASSIGN_OR_RETURN(plan.y, DescribeMatrix(options_.output, out_features_, m));
  if (algorithms_ != nullptr && x_alignment >= kRowAlignment && y_alignment >= kRowAlignment) {
    plan.algorithm = algorithms_->For(m);
    // Found for another number of rows, it may refuse this one where outputs are odd.
    cublasLtMatmulHeuristicResult_t checked;
    if (cublasLtMatmulAlgoCheck(lt_->handle(), description_.get(), weights_layout_.get(),
                                plan.x.get(), plan.y.get(), plan.y.get(), &plan.algorithm,
                                &checked) == CUBLAS_STATUS_SUCCESS) {
      return plan;
    }
  }
  KVASIR_ASSIGN_OR_RETURN(const std::vector<cublasLtMatmulAlgo_t> found,
                          CandidatesFor(lt_->handle(), {.description = description_.get(),
                                                        .weights = weights_layout_.get(),
                                                        .x = plan.x.get(),
                                                        .y = plan.y.get(),
                                                        .x_alignment = x_alignment,
                                                        .y_alignment = y_alignment,
                                                        .workspace_bytes = kWorkspaceBytes,
                                                        .sums = LtCandidates::Sums::kMaySplit,
                                                        .most = 1}));
  if (found.empty()) {
    return absl::UnimplementedError(absl::StrCat("cuBLASLt has no kernel for a linear layer of ",
                                                 in_features_, " x ", out_features_, " and ", m,
                                                 " rows"));
  }
  plan.algorithm = found.front();
  return plan;
}

absl::Status CudaLinear::Check(const LinearParams& p) const {
  const bool is_gated = p.after == After::kSiluMul;
  ShapeCheck check("gemm");
  check.Match("x", p.x, {"rows", in_features_}, options_.input)
      .Match("y", p.y, {"rows", is_gated ? out_features_ / 2 : out_features_}, options_.output)
      .Require(!is_gated || out_features_ % 2 == 0, "a gated layer has two halves")
      .Require(p.after == After::kStore || options_.input == options_.output,
               "what comes after a product has the dtype of x");
  if (!p.norm.empty()) {
    check.Match("norm", p.norm, {in_features_}, options_.input)
        .Match("normed", p.normed, {"rows", in_features_}, options_.input);
  }
  if (is_gated) check.Match("product", p.product, {"rows", out_features_}, options_.output);
  if (!p.next_norm.empty()) {
    check.Require(p.after == After::kAdd, "only a sum is normalized for the next layer")
        .Match("next_norm", p.next_norm, {out_features_}, options_.output)
        .Match("next_normed", p.next_normed, {"rows", out_features_}, options_.output);
  }
  KVASIR_RETURN_IF_ERROR(check.status());
  return RequireDeviceMemory("gemm",
                             {p.x, p.norm, p.y, p.normed, p.product, p.next_norm, p.next_normed});
}

LinearCall CudaLinear::CallOf(int64_t rows) const {
  return {.rows = rows,
          .k = in_features_,
          .n = out_features_,
          .input = options_.input,
          .is_aligned = true,
          .few_rows_fit = FewRowsFit(rows, in_features_),
          .few_rows_normalize = FewRowsNormalize(in_features_)};
}

LinearPlan CudaLinear::PlanOf(const LinearParams& p) const {
  const auto aligned = [](const TensorView& tensor) {
    return tensor.empty() || AlignmentOf(tensor) >= 16;
  };
  LinearCall call = CallOf(p.x.dim(0));
  call.has_norm = !p.norm.empty();
  call.is_aligned = aligned(p.x) && aligned(p.norm);
  return PlanLinear(call);
}

bool CudaLinear::normalizes_sums(int64_t rows) const {
  const LinearPlan::Kernel kernel = PlanLinear(CallOf(rows)).kernel;
  return kernel == LinearPlan::Kernel::kBatch || kernel == LinearPlan::Kernel::kCublasLt;
}

absl::Status CudaLinear::Run(const LinearParams& params, std::byte* workspace,
                             cudaStream_t stream) {
  KVASIR_RETURN_IF_ERROR(Check(params));
  if (params.x.dim(0) == 0) return absl::OkStatus();
  const LinearPlan plan = PlanOf(params);
  TellPlan("linear", plan);
  return RunBy(plan.kernel, params, workspace, stream);
}

absl::Status CudaLinear::RunBy(LinearPlan::Kernel kernel, const LinearParams& p,
                               std::byte* workspace, cudaStream_t stream) {
  using Kernel = LinearPlan::Kernel;
  KVASIR_RETURN_IF_ERROR(Check(p));
  const bool is_few = kernel == Kernel::kFewRows || kernel == Kernel::kNormThenFewRows;
  ShapeCheck check("gemm");
  check.Require(!is_few || FewRowsFit(p.x.dim(0), in_features_), "the kernel takes a few rows")
      .Require(kernel != Kernel::kBatch || p.x.dim(0) <= kBatchRows, "the kernel takes 64 rows");
  KVASIR_RETURN_IF_ERROR(check.status());
  LinearParams rest = p;
  if (!p.norm.empty() && kernel != Kernel::kFewRows) {
    KVASIR_RETURN_IF_ERROR(Normalize(p, stream));
    rest.x = p.normed;
    rest.norm = {};
  }
  if (is_few) {
    KVASIR_RETURN_IF_ERROR(RunFewRows(rest, stream));
    if (p.next_norm.empty()) return absl::OkStatus();
    return RmsNorm({.x = p.y, .weight = p.next_norm, .y = p.next_normed, .epsilon = p.epsilon},
                   stream);
  }
  if (p.after == After::kStore) return Multiply(kernel, rest.x, p.y, workspace, stream);
  if (p.after == After::kSiluMul && kernel == Kernel::kBatch) {
    return RunBatchRows(rest.x, p.after, p.y, stream);
  }
  check.Match("product", p.product, {p.x.dim(0), out_features_}, options_.output);
  KVASIR_RETURN_IF_ERROR(check.status());
  KVASIR_RETURN_IF_ERROR(Multiply(kernel, rest.x, p.product, workspace, stream));
  if (p.after == After::kSiluMul) return SiluMul({.gate_up = p.product, .y = p.y}, stream);
  // cuBLASLt would round the sum of both once.
  return AddNorm({.x = p.product,
                  .y = p.y,
                  .weight = p.next_norm,
                  .epsilon = p.epsilon,
                  .normed = p.next_normed},
                 stream);
}

absl::Status CudaLinear::Normalize(const LinearParams& p, cudaStream_t stream) {
  return RmsNorm({.x = p.x, .weight = p.norm, .y = p.normed, .epsilon = p.epsilon}, stream);
}

absl::Status CudaLinear::RunFewRows(const LinearParams& p, cudaStream_t stream) const {
  const FewRowsLaunch launch = {
      .x = p.x.As<BFloat16>(),
      .num_rows = p.x.dim(0),
      .k = in_features_,
      .norm = p.norm.empty() ? nullptr : p.norm.As<BFloat16>(),
      .epsilon = p.epsilon,
      .weights = weights_.As<BFloat16>(),
      .bias = bias_.data(),
      .after = p.after,
      .y = p.y.data(),
      .n = p.y.dim(1),
      .dtype = options_.output,
  };
  return CudaStatus(LaunchFewRows(launch, num_processors_, stream), "launching a linear layer");
}

absl::Status CudaLinear::RunBatchRows(const TensorView& x, After after, const TensorView& y,
                                      cudaStream_t stream) const {
  const int64_t rows = x.dim(0);
  BatchRowsLaunch launch = {.x = {},
                            .weights = {},
                            .num_rows = static_cast<int>(rows),
                            .k = static_cast<int>(in_features_),
                            .bias = bias_.data(),
                            .after = after,
                            .y = y.data(),
                            .n = static_cast<int>(y.dim(1)),
                            .dtype = options_.output,
                            .plan = PlanBatch(out_features_, rows, num_processors_)};
  const auto map = [&](void* base, int64_t all_rows, int64_t box_rows) {
    return MakeTensorMap(
        base, {.rank = 2,
               .sizes = {static_cast<cuuint64_t>(in_features_), static_cast<cuuint64_t>(all_rows)},
               .strides = {static_cast<cuuint64_t>(in_features_ * 2)},
               .box = {kBoxColumns, static_cast<cuuint32_t>(box_rows)}});
  };
  KVASIR_ASSIGN_OR_RETURN(launch.x, map(x.data(), rows, launch.plan.x_rows));
  KVASIR_ASSIGN_OR_RETURN(launch.weights, map(weights_.data(), out_features_,
                                              BatchBoxRows(launch.plan.tile_units, after)));
  return CudaStatus(LaunchBatchRows(launch, stream), "launching a linear layer");
}

absl::Status CudaLinear::Multiply(LinearPlan::Kernel kernel, const TensorView& x,
                                  const TensorView& y, std::byte* workspace, cudaStream_t stream) {
  return kernel == LinearPlan::Kernel::kBatch ? RunBatchRows(x, After::kStore, y, stream)
                                              : MultiplyByCublasLt(x, y, workspace, stream);
}

absl::Status CudaLinear::MultiplyByCublasLt(const TensorView& x, const TensorView& y,
                                            std::byte* workspace, cudaStream_t stream) {
  ShapeCheck check("gemm");
  check.Require(workspace != nullptr, "the workspace is missing");
  KVASIR_RETURN_IF_ERROR(check.status());
  const PlanKey key = {x.dim(0), AlignmentOf(x), AlignmentOf(y)};
  auto at = plans_.find(key);
  if (at == plans_.end()) {
    KVASIR_ASSIGN_OR_RETURN(Plan plan, MakePlan(key));
    at = plans_.emplace(key, std::move(plan)).first;
  }
  const Plan& plan = at->second;
  const float one = 1, zero = 0;
  return CublasStatus(cublasLtMatmul(lt_->handle(), description_.get(), &one, weights_.data(),
                                     weights_layout_.get(), x.data(), plan.x.get(), &zero, y.data(),
                                     plan.y.get(), y.data(), plan.y.get(), &plan.algorithm,
                                     workspace, static_cast<size_t>(kWorkspaceBytes), stream),
                      "launching a linear layer");
}

}  // namespace kvasir::kernels
