#include "kernels/gemm/gemm_algorithms.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime_api.h>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/cuda_status.h"
#include "kernels/base/device_buffer.h"
#include "kernels/base/multiprocessors.h"
#include "kernels/base/status_macros.h"
#include "kernels/gemm/gemm_few_rows.h"

namespace kvasir::kernels {
namespace {

constexpr int kMostCandidates = 24;  // of a class
// Size of the layer that candidates are tried on: at most this many rows, and this many outputs and
// a few more, so that the same powers of two divide their number.
constexpr int64_t kTriedOutputs = 256;
constexpr int64_t kTriedRows = 128;

cudaDataType_t TypeOf(DType dtype) { return dtype == DType::kFloat32 ? CUDA_R_32F : CUDA_R_16BF; }

template <typename T>
absl::Status Set(cublasLtMatmulDesc_t description, cublasLtMatmulDescAttributes_t attribute,
                 const T& value) {
  return CublasStatus(cublasLtMatmulDescSetAttribute(description, attribute, &value, sizeof(value)),
                      "describing a linear layer");
}
template <typename T>
absl::Status Set(cublasLtMatmulPreference_t preference,
                 cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
  return CublasStatus(
      cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)),
      "describing a linear layer's memory");
}

// Between -1 and 1, one after the other.
class Values {
 public:
  explicit Values(uint64_t seed) : state_(seed) {}
  float Next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<float>(static_cast<int32_t>(state_ >> 32)) * 0x1p-31f;
  }

 private:
  uint64_t state_;
};

// [rows, k]. The second half of each row is `sign` times its first.
std::vector<BFloat16> Halves(int64_t rows, int64_t k, float sign, uint64_t seed) {
  std::vector<BFloat16> values(static_cast<size_t>(rows * k));
  Values random(seed);
  for (int64_t row = 0; row < rows; ++row) {
    BFloat16* const first = values.data() + row * k;
    for (int64_t i = 0; i < k / 2; ++i) {
      first[i] = BFloat16(random.Next());
      first[k / 2 + i] = BFloat16(sign * static_cast<float>(first[i]));
    }
  }
  return values;
}

template <typename T>
absl::StatusOr<DeviceBuffer> Upload(const std::vector<T>& values) {
  const size_t bytes = values.size() * sizeof(T);
  KVASIR_ASSIGN_OR_RETURN(DeviceBuffer buffer, DeviceBuffer::Allocate(static_cast<int64_t>(bytes)));
  KVASIR_RETURN_IF_ERROR(
      CudaStatus(cudaMemcpy(buffer.data(), values.data(), bytes, cudaMemcpyHostToDevice),
                 "copying values to try algorithms on"));
  return buffer;
}

// A small layer of a shape's K whose sums are nothing but errors of rounding, with biases as small
// as these, and what our kernel makes of it.
class Trial {
 public:
  static absl::StatusOr<Trial> Make(const ProductShape& shape) {
    Trial trial;
    trial.k_ = shape.k;
    trial.n_ = shape.n <= kTriedOutputs ? shape.n : kTriedOutputs + shape.n % 8;
    trial.output_ = shape.output;
    KVASIR_ASSIGN_OR_RETURN(trial.weights_, Upload(Halves(trial.n_, trial.k_, -1, 1)));
    KVASIR_ASSIGN_OR_RETURN(trial.x_, Upload(Halves(kTriedRows, trial.k_, 1, 2)));
    if (shape.has_bias) KVASIR_RETURN_IF_ERROR(trial.AddBias());
    const int64_t bytes = kTriedRows * trial.n_ * static_cast<int64_t>(DTypeSize(shape.output));
    KVASIR_ASSIGN_OR_RETURN(trial.y_, DeviceBuffer::Allocate(bytes));
    KVASIR_ASSIGN_OR_RETURN(
        trial.description_,
        DescribeProduct(shape.has_bias ? trial.bias_.data() : nullptr, shape.output));
    KVASIR_ASSIGN_OR_RETURN(trial.weights_layout_,
                            DescribeMatrix(DType::kBFloat16, trial.k_, trial.n_));
    KVASIR_RETURN_IF_ERROR(trial.MultiplyByOurs());
    KVASIR_ASSIGN_OR_RETURN(trial.expected_, trial.Fetch());
    return trial;
  }

  cublasLtMatmulDesc_t description() const { return description_.get(); }

  // Whether the algorithm gives the same bits for `rows` rows; false for one that refuses the
  // layer.
  absl::StatusOr<bool> Agrees(cublasLtHandle_t handle, const cublasLtMatmulAlgo_t& algorithm,
                              int64_t rows) const {
    rows = std::min(rows, kTriedRows);
    KVASIR_ASSIGN_OR_RETURN(const LtLayout x, DescribeMatrix(DType::kBFloat16, k_, rows));
    KVASIR_ASSIGN_OR_RETURN(const LtLayout y, DescribeMatrix(output_, n_, rows));
    KVASIR_RETURN_IF_ERROR(Clear());
    const float one = 1, zero = 0;
    const cublasStatus_t status = cublasLtMatmul(
        handle, description_.get(), &one, weights_.data(), weights_layout_.get(), x_.data(),
        x.get(), &zero, y_.data(), y.get(), y_.data(), y.get(), &algorithm, nullptr, 0, nullptr);
    if (status != CUBLAS_STATUS_SUCCESS) {
      cudaGetLastError();  // which the next launch would be blamed for
      return false;
    }
    KVASIR_ASSIGN_OR_RETURN(const std::vector<std::byte> found, Fetch());
    const int64_t bytes = rows * n_ * static_cast<int64_t>(DTypeSize(output_));
    return std::memcmp(found.data(), expected_.data(), static_cast<size_t>(bytes)) == 0;
  }

 private:
  absl::Status AddBias() {
    constexpr float kAboutAnError = 1e-5f;
    Values random(3);
    std::vector<float> wide(static_cast<size_t>(n_));
    for (float& value : wide) value = kAboutAnError * random.Next();
    std::vector<BFloat16> narrow(wide.begin(), wide.end());
    if (output_ == DType::kFloat32) {
      KVASIR_ASSIGN_OR_RETURN(bias_, Upload(wide));
    } else {
      KVASIR_ASSIGN_OR_RETURN(bias_, Upload(narrow));
    }
    return absl::OkStatus();
  }

  absl::Status MultiplyByOurs() const {
    int processors = 0;
    KVASIR_RETURN_IF_ERROR(
        CudaStatus(CountMultiprocessors(processors), "counting the device's multiprocessors"));
    int64_t at_once = kFewRows;
    while (!FewRowsFit(at_once, k_)) --at_once;
    for (int64_t row = 0; row < kTriedRows; row += at_once) {
      const FewRowsLaunch launch = {
          .x = x_.As<BFloat16>() + row * k_,
          .num_rows = std::min(at_once, kTriedRows - row),
          .k = k_,
          .weights = weights_.As<BFloat16>(),
          .bias = bias_.data(),
          .y = y_.data() + row * n_ * static_cast<int64_t>(DTypeSize(output_)),
          .n = n_,
          .dtype = output_};
      KVASIR_RETURN_IF_ERROR(
          CudaStatus(LaunchFewRows(launch, processors, nullptr), "launching a linear layer"));
    }
    return absl::OkStatus();
  }
  absl::Status Clear() const {
    return CudaStatus(
        cudaMemsetAsync(y_.data(), 0xff, static_cast<size_t>(y_.size_bytes()), nullptr),
        "clearing what an algorithm is to write");
  }
  absl::StatusOr<std::vector<std::byte>> Fetch() const {
    std::vector<std::byte> bytes(static_cast<size_t>(y_.size_bytes()));
    KVASIR_RETURN_IF_ERROR(
        CudaStatus(cudaMemcpy(bytes.data(), y_.data(), bytes.size(), cudaMemcpyDeviceToHost),
                   "fetching what an algorithm has written"));
    return bytes;
  }

  int64_t k_ = 0, n_ = 0;
  DType output_ = DType::kBFloat16;
  DeviceBuffer weights_, x_, bias_, y_;
  LtDescription description_;
  LtLayout weights_layout_;
  std::vector<std::byte> expected_;
};

// The fastest one that agrees, or else the fastest.
struct Choice {
  std::optional<cublasLtMatmulAlgo_t> fastest, agreeing;
  int place = -1;  // of the agreeing one among the candidates
};

absl::StatusOr<Choice> ChooseFor(cublasLtHandle_t handle, const ProductShape& shape, int64_t rows,
                                 const Trial& trial) {
  KVASIR_ASSIGN_OR_RETURN(const LtLayout weights,
                          DescribeMatrix(DType::kBFloat16, shape.k, shape.n));
  KVASIR_ASSIGN_OR_RETURN(const LtLayout x, DescribeMatrix(DType::kBFloat16, shape.k, rows));
  KVASIR_ASSIGN_OR_RETURN(const LtLayout y, DescribeMatrix(shape.output, shape.n, rows));
  KVASIR_ASSIGN_OR_RETURN(const std::vector<cublasLtMatmulAlgo_t> candidates,
                          CandidatesFor(handle, {.description = trial.description(),
                                                 .weights = weights.get(),
                                                 .x = x.get(),
                                                 .y = y.get(),
                                                 .x_alignment = kRowAlignment,
                                                 .y_alignment = kRowAlignment,
                                                 .sums = LtCandidates::Sums::kWhole,
                                                 .most = kMostCandidates}));
  Choice choice;
  for (int i = 0; i < static_cast<int>(candidates.size()); ++i) {
    const cublasLtMatmulAlgo_t& candidate = candidates[static_cast<size_t>(i)];
    if (!choice.fastest.has_value()) choice.fastest = candidate;
    KVASIR_ASSIGN_OR_RETURN(const bool agrees, trial.Agrees(handle, candidate, rows));
    if (!agrees) continue;
    choice.agreeing = candidate;
    choice.place = i;
    break;
  }
  return choice;
}

absl::StatusOr<LinearAlgorithms> FindAlgorithms(cublasLtHandle_t handle,
                                                const ProductShape& shape) {
  KVASIR_ASSIGN_OR_RETURN(const Trial trial, Trial::Make(shape));
  std::vector<Choice> choices;
  for (int c = 0; c < LinearAlgorithms::kClasses; ++c) {
    KVASIR_ASSIGN_OR_RETURN(Choice choice,
                            ChooseFor(handle, shape, LinearAlgorithms::kLeastRows << c, trial));
    choices.push_back(std::move(choice));
  }
  // The nearest class's where a class has none.
  const auto nearest = [&](int own, auto which) {
    const cublasLtMatmulAlgo_t* found = nullptr;
    int distance = LinearAlgorithms::kClasses;
    for (int c = 0; c < LinearAlgorithms::kClasses; ++c) {
      const auto& candidate = choices[static_cast<size_t>(c)].*which;
      if (!candidate.has_value() || std::abs(c - own) >= distance) continue;
      found = &*candidate;
      distance = std::abs(c - own);
    }
    return found;
  };
  LinearAlgorithms algorithms;
  for (int c = 0; c < LinearAlgorithms::kClasses; ++c) {
    const cublasLtMatmulAlgo_t* chosen = nearest(c, &Choice::agreeing);
    algorithms.keep_bits = chosen != nullptr;  // of one class as of all
    if (chosen == nullptr) chosen = nearest(c, &Choice::fastest);
    if (chosen == nullptr) {
      return absl::UnimplementedError(
          absl::StrCat("cuBLASLt has no kernel for a linear layer of ", shape.k, " x ", shape.n));
    }
    algorithms.of_class[static_cast<size_t>(c)] = *chosen;
    algorithms.places[static_cast<size_t>(c)] = choices[static_cast<size_t>(c)].place;
  }
  return algorithms;
}

}  // namespace

absl::Status CublasStatus(cublasStatus_t status, absl::string_view doing) {
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  const std::string message =
      absl::StrCat(doing, ": cuBLASLt says ", cublasLtGetStatusString(status));
  switch (status) {
    case CUBLAS_STATUS_NOT_INITIALIZED:
      return absl::UnavailableError(message);
    case CUBLAS_STATUS_ALLOC_FAILED:
      return absl::ResourceExhaustedError(message);
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return absl::UnimplementedError(message);
    default:
      return absl::InternalError(message);
  }
}

absl::StatusOr<LtDescription> DescribeProduct(const void* bias, DType output) {
  cublasLtMatmulDesc_t made = nullptr;
  KVASIR_RETURN_IF_ERROR(
      CublasStatus(cublasLtMatmulDescCreate(&made, CUBLAS_COMPUTE_32F, CUDA_R_32F),
                   "describing a linear layer"));
  LtDescription description(made);
  KVASIR_RETURN_IF_ERROR(Set(made, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T));
  if (bias == nullptr) return description;
  KVASIR_RETURN_IF_ERROR(Set(made, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS));
  KVASIR_RETURN_IF_ERROR(Set(made, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias));
  KVASIR_RETURN_IF_ERROR(Set(made, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, TypeOf(output)));
  return description;
}

absl::StatusOr<LtLayout> DescribeMatrix(DType dtype, int64_t rows, int64_t columns) {
  cublasLtMatrixLayout_t layout = nullptr;
  KVASIR_RETURN_IF_ERROR(
      CublasStatus(cublasLtMatrixLayoutCreate(&layout, TypeOf(dtype), static_cast<uint64_t>(rows),
                                              static_cast<uint64_t>(columns), rows),
                   "describing a linear layer's matrices"));
  return LtLayout(layout);
}

absl::StatusOr<std::vector<cublasLtMatmulAlgo_t>> CandidatesFor(cublasLtHandle_t handle,
                                                                const LtCandidates& asked) {
  cublasLtMatmulPreference_t made = nullptr;
  KVASIR_RETURN_IF_ERROR(
      CublasStatus(cublasLtMatmulPreferenceCreate(&made), "describing a linear layer's memory"));
  const std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, DestroyLt> preference(made);
  KVASIR_RETURN_IF_ERROR(Set(made, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                             static_cast<uint64_t>(asked.workspace_bytes)));
  const uint32_t schemes = asked.sums == LtCandidates::Sums::kWhole
                               ? uint32_t{CUBLASLT_REDUCTION_SCHEME_NONE}
                               : uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE};
  KVASIR_RETURN_IF_ERROR(Set(made, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, schemes));
  KVASIR_RETURN_IF_ERROR(Set(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, asked.x_alignment));
  KVASIR_RETURN_IF_ERROR(Set(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, asked.y_alignment));
  KVASIR_RETURN_IF_ERROR(Set(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, asked.y_alignment));
  std::vector<cublasLtMatmulHeuristicResult_t> found(static_cast<size_t>(asked.most));
  int count = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle, asked.description, asked.weights, asked.x, asked.y,
                                     asked.y, made, asked.most, found.data(), &count);
  std::vector<cublasLtMatmulAlgo_t> candidates;
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return candidates;
  KVASIR_RETURN_IF_ERROR(CublasStatus(status, "choosing a kernel for a linear layer"));
  for (int i = 0; i < count; ++i) {
    const cublasLtMatmulHeuristicResult_t& result = found[static_cast<size_t>(i)];
    if (result.state == CUBLAS_STATUS_SUCCESS) candidates.push_back(result.algo);
  }
  return candidates;
}

int LinearAlgorithms::ClassOf(int64_t rows) {
  int c = 0;
  while (c + 1 < kClasses && rows > kLeastRows << c) ++c;
  return c;
}

absl::StatusOr<CublasLt> CublasLt::Create() {
  cublasLtHandle_t handle = nullptr;
  KVASIR_RETURN_IF_ERROR(CublasStatus(cublasLtCreate(&handle), "starting cuBLASLt"));
  CublasLt lt;
  lt.handle_.reset(handle);
  return lt;
}

absl::StatusOr<const LinearAlgorithms*> CublasLt::AlgorithmsOf(const ProductShape& shape) const {
  const MutexLock lock(found_->mu);
  auto at = found_->of_shape.find(shape);
  if (at == found_->of_shape.end()) {
    KVASIR_ASSIGN_OR_RETURN(LinearAlgorithms algorithms, FindAlgorithms(handle(), shape));
    at = found_->of_shape.emplace(shape, algorithms).first;
  }
  return &at->second;
}

}  // namespace kvasir::kernels
