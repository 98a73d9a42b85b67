// Linear layers on the GPU, with the norm before them and the addition or gate after them
// (LinearParams of gemm.h).
//
// A CudaLinear owns its weights in device memory, as the checkpoint has them (row by row), and
// hides what multiplies by them: kernels of ours for up to 64 rows of bfloat16, where reading the
// weights is all that counts (gemm_few_rows.h, gemm_batch_rows.h), and one of cuBLASLt's for more.
// The model holds one object per weight and one CublasLt for all of them. Only in builds with CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <map>
#include <memory>
#include <span>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/device_buffer.h"
#include "kernels/base/tensor.h"
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/gemm_algorithms.h"
#include "kernels/gemm/gemm_plan.h"

namespace kvasir::kernels {

// Thread-compatible.
class CudaLinear {
 public:
  // Bytes of Run's workspace; cuBLASLt chooses kernels that need no more.
  static constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;

  // Parts and options as of PackedLinear::Create: the weights are rounded to bfloat16 when the
  // input is bfloat16, biases to the output's dtype. Weights in device memory have the input's
  // dtype; all lie there with their biases, or none. Waits for what the device does and for the
  // copies. `lt` outlives the object. INVALID_ARGUMENT: shapes or dtypes. RESOURCE_EXHAUSTED: no
  // memory.
  static absl::StatusOr<CudaLinear> Create(const CublasLt& lt,
                                           std::span<const PackedLinear::Part> parts,
                                           const PackedLinear::Options& options);

  // All tensors of `params` in device memory: x, norm and normed options.input; the others
  // options.output, which is the input's dtype where something comes after the product. kAdd needs
  // `product` for more than one row only, kSiluMul for more than 64.
  // `workspace`: kWorkspaceBytes, 256-byte aligned, of this stream only.
  //
  // Products and sums are float32; a sum has its bias added and is rounded once. For one row (of a
  // multiple of 16 bytes) all is one launch, which may begin beside the kernel before it, except
  // for the norm of rows that are too long or odd (FewRowsNormalize), and for the next norm. For
  // more there is a launch for each part, but one for an addition with the next norm; up to 64 rows
  // the gate is in the product's.
  //
  // A row's bits depend on nothing but the row, whatever M is and whichever kernel multiplies,
  // where keeps_bits(), x and y are aligned to 16 bytes and N is a multiple of 8. Elsewhere the
  // order of sums is chosen by M and by the alignment of x and y at their first use and kept.
  // Infinities and NaNs spread within their row as in the formula and never into another row.
  // Nothing is waited for; may be captured. INVALID_ARGUMENT: shapes, dtypes, host memory.
  // UNIMPLEMENTED: cuBLASLt has no kernel for the shape. INTERNAL: it failed.
  absl::Status Run(const LinearParams& params, std::byte* workspace, cudaStream_t stream);
  // The same by a kernel that is not chosen by the rows. For tests and benchmarks.
  absl::Status RunBy(LinearPlan::Kernel kernel, const LinearParams& params, std::byte* workspace,
                     cudaStream_t stream);

  // Whether Run of kAdd with so many aligned rows applies `next_norm` in the launch that adds. Else
  // it is a launch more, and the next layer applies the norm at less cost.
  bool normalizes_sums(int64_t rows) const;
  int64_t in_features() const { return in_features_; }
  int64_t out_features() const { return out_features_; }
  // Whether sums have one order for every M: the input is bfloat16, K a multiple of 8, and cuBLASLt
  // has kernels whose sums were found to have the bits of ours (gemm_algorithms.h).
  bool keeps_bits() const { return algorithms_ != nullptr && algorithms_->keep_bits; }
  const LinearAlgorithms* algorithms() const { return algorithms_; }  // null: K or dtype is another

 private:
  using Description = LtDescription;
  using Layout = LtLayout;
  struct Plan {
    Layout x, y;
    cublasLtMatmulAlgo_t algorithm;
  };
  using PlanKey = std::tuple<int64_t, uint32_t, uint32_t>;  // M, alignment of x and of y in bytes

  CudaLinear() = default;
  absl::Status TakeHostParts(std::span<const PackedLinear::Part> parts);
  absl::Status TakeDeviceParts(std::span<const PackedLinear::Part> parts);
  absl::Status Describe();
  absl::Status FindAlgorithms();
  absl::Status Check(const LinearParams& params) const;
  LinearCall CallOf(int64_t rows) const;  // with what is aligned and not normalized
  LinearPlan PlanOf(const LinearParams& params) const;
  static absl::Status Normalize(const LinearParams& params, cudaStream_t stream);
  absl::Status RunFewRows(const LinearParams& params, cudaStream_t stream) const;
  // y = after(x w^T + bias), of kStore and kSiluMul.
  absl::Status RunBatchRows(const TensorView& x, LinearParams::After after, const TensorView& y,
                            cudaStream_t stream) const;
  // y = x w^T + bias.
  absl::Status Multiply(LinearPlan::Kernel kernel, const TensorView& x, const TensorView& y,
                        std::byte* workspace, cudaStream_t stream);
  absl::Status MultiplyByCublasLt(const TensorView& x, const TensorView& y, std::byte* workspace,
                                  cudaStream_t stream);
  absl::StatusOr<Plan> MakePlan(const PlanKey& key) const;

  const CublasLt* lt_ = nullptr;
  PackedLinear::Options options_;
  int64_t in_features_ = 0;
  int64_t out_features_ = 0;
  int num_processors_ = 0;
  DeviceBuffer weights_;  // [N, K] options.input
  DeviceBuffer bias_;     // [N] options.output; empty: none
  Description description_;
  Layout weights_layout_;
  const LinearAlgorithms* algorithms_ = nullptr;  // of lt_; null: there is no one order
  std::map<PlanKey, Plan> plans_;
};

}  // namespace kvasir::kernels
