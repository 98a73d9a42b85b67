// Speed of dense ops on the GPU at the 8B shape (hidden 4,096, intermediate 14,336, vocabulary
// 128,256), for one token and for a prefill chunk. Four sets of tensors in turn; times of a call
// from medians of replays of a CUDA graph.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "kernels/base/dtype.h"
#include "kernels/dense/dense_cuda.h"
#include "kernels/gemm/gemm_cuda.h"
#include "kernels/sampling/sampling_cuda.h"
#include "tests/bench/cuda_timing.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kHidden = 4096;
constexpr int64_t kIntermediate = 14336;
constexpr int64_t kVocab = 128256;
constexpr int kSets = 4;

// Returns normal values in bfloat16, which repeat after a few million.
std::vector<BFloat16> RandomValues(int64_t count, uint64_t seed) {
  constexpr size_t kPeriod = 4'000'037;
  std::mt19937_64 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<BFloat16> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = i < kPeriod ? BFloat16(normal(rng)) : values[i - kPeriod];
  }
  return values;
}

// Memory of one tensor in each set.
class Tensors {
 public:
  Tensors(int64_t rows, int64_t columns, DType dtype = DType::kBFloat16)
      : rows_(rows), columns_(columns), dtype_(dtype) {
    for (uint64_t set = 0; set < kSets; ++set) {
      const int64_t halves = rows * columns * static_cast<int64_t>(DTypeSize(dtype)) / 2;
      buffers_.push_back(Upload(RandomValues(halves, set)));
    }
  }
  TensorView of(int set) const {
    void* data = buffers_[static_cast<size_t>(set)].data();
    return TensorView(data, dtype_, {rows_, columns_}, Device::kCuda);
  }
  // Returns the tensor of a set as a vector. REQUIRES: it has one row.
  TensorView vector(int set) const {
    return TensorView(of(set).data(), dtype_, {columns_}, Device::kCuda);
  }

 private:
  int64_t rows_, columns_;
  DType dtype_;
  std::vector<DeviceBuffer> buffers_;
};

// `bytes` and `flops` of one call.
void Report(const char* op, int64_t rows, double bytes, double flops,
            const std::function<absl::Status(int set, cudaStream_t stream)>& run) {
  for (int set = 0; set < kSets; ++set) Check(run(set, nullptr));  // makes plans, loads modules
  const double us = MedianMicroseconds([&](cudaStream_t stream) {
                      for (int set = 0; set < kSets; ++set) Check(run(set, stream));
                    }) /
                    kSets;
  std::printf("| %s | %lld | %.1f | %.2f | %.0f |\n", op, static_cast<long long>(rows), us,
              bytes / us / 1e6, flops / us / 1e6);
  std::fflush(stdout);
}

// Measures a linear layer as the model calls it, and by other kernels: gated layers with their
// gate, layers of kAdd with the addition.
void BenchLinear(const CublasLt& lt, const char* name, int64_t n, int64_t k,
                 LinearParams::After after) {
  using After = LinearParams::After;
  std::vector<CudaLinear> layers;
  for (uint64_t set = 0; set < kSets; ++set) {
    std::vector<BFloat16> weights = RandomValues(n * k, set);
    const PackedLinear::Part part = {.weight =
                                         TensorView(weights.data(), DType::kBFloat16, {n, k})};
    layers.push_back(Value(CudaLinear::Create(
        lt, {&part, 1}, {.input = DType::kBFloat16, .output = DType::kBFloat16})));
  }
  const DeviceBuffer workspace = Value(DeviceBuffer::Allocate(CudaLinear::kWorkspaceBytes));
  const Tensors norm(1, k);
  for (const int64_t rows : {1, 2, 4, 8, 16, 32, 64, 512}) {
    const Tensors x(rows, k), y(rows, after == After::kSiluMul ? n / 2 : n);
    const Tensors normed(rows, k), product(rows, n);
    const auto params = [&](int set) {
      const bool has_norm = after != After::kAdd;
      return LinearParams{.x = x.of(set),
                          .norm = has_norm ? norm.vector(set) : TensorView(),
                          .epsilon = 1e-5f,
                          .after = after,
                          .y = y.of(set),
                          .normed = normed.of(set),
                          .product = product.of(set)};
    };
    const double bytes = 2.0 * static_cast<double>(n * k + rows * (n + k));
    const double flops = 2.0 * static_cast<double>(n * k * rows);
    Report(name, rows, bytes, flops, [&](int set, cudaStream_t stream) {
      return layers[static_cast<size_t>(set)].Run(params(set), workspace.data(), stream);
    });
    if (rows > kBatchRows) continue;
    using Kernel = LinearPlan::Kernel;
    for (const auto& [by, kernel] : {std::pair("the same, for a batch", Kernel::kBatch),
                                     std::pair("the same, cuBLASLt", Kernel::kCublasLt)}) {
      Report(by, rows, bytes, flops, [&](int set, cudaStream_t stream) {
        return layers[static_cast<size_t>(set)].RunBy(kernel, params(set), workspace.data(),
                                                      stream);
      });
    }
  }
}

void BenchElementwise(int64_t rows) {
  const auto count = static_cast<double>(rows);
  const Tensors x(rows, kHidden), y(rows, kHidden);
  const Tensors weight(1, kHidden);
  Report("rms_norm", rows, count * kHidden * 4, 0, [&](int set, cudaStream_t stream) {
    return RmsNorm({.x = x.of(set), .weight = weight.vector(set), .y = y.of(set), .epsilon = 1e-5f},
                   stream);
  });
  const Tensors gate_up(rows, 2 * kIntermediate), gated(rows, kIntermediate);
  Report("silu_mul", rows, count * kIntermediate * 6, 0, [&](int set, cudaStream_t stream) {
    return SiluMul({.gate_up = gate_up.of(set), .y = gated.of(set)}, stream);
  });
}

void BenchSampling(int64_t rows) {
  const Tensors logits(rows, kVocab, DType::kFloat32);
  struct Case {
    const char* name;
    SamplingOptions options;
  };
  const Case cases[] = {
      {"sampling, greedy", {.wants_logprob = false}},
      {"sampling, greedy with logprob", {}},
      {"sampling, temperature", {.temperature = 1, .wants_logprob = false}},
      {"sampling, temperature and top_p",
       {.temperature = 1, .top_p = 0.95f, .wants_logprob = false}},
      {"sampling, temperature and top_k", {.temperature = 1, .top_k = 50, .wants_logprob = false}}};
  for (const Case& c : cases) {
    const std::vector<SamplingOptions> options(static_cast<size_t>(rows), c.options);
    const PinnedBuffer block = Value(PinnedBuffer::Allocate(SamplingBlockBytes(options, kVocab)));
    FillSamplingBlock(options, kVocab, block.data());
    Report(c.name, rows, static_cast<double>(rows) * kVocab * 4, 0,
           [&](int set, cudaStream_t stream) {
             return Sample({.logits = logits.of(set), .block = block.data(), .block_rows = rows},
                           stream);
           });
  }
}

void Bench() {
  BenchElementwise(1);
  BenchElementwise(512);
  for (const int64_t rows : {1, 16}) BenchSampling(rows);
  const CublasLt lt = Value(CublasLt::Create());
  using After = LinearParams::After;
  BenchLinear(lt, "norm and q, k, v: 6,144 x 4,096", 6144, kHidden, After::kStore);
  BenchLinear(lt, "output, added: 4,096 x 4,096", kHidden, kHidden, After::kAdd);
  BenchLinear(lt, "norm, gate, up and SiLU: 28,672 x 4,096", 2 * kIntermediate, kHidden,
              After::kSiluMul);
  BenchLinear(lt, "down, added: 4,096 x 14,336", kHidden, kIntermediate, After::kAdd);
  BenchLinear(lt, "norm and head: 128,256 x 4,096", kVocab, kHidden, After::kStore);
}

}  // namespace
}  // namespace kvasir::kernels

int main() {
  std::printf("| op | rows | us | TB/s | TFLOP/s |\n|---|---|---|---|---|\n");
  kvasir::kernels::Bench();
}
