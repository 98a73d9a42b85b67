// Speed of the dense ops at the shapes of the reference model (6 layers, hidden 256, MLP 768, 512
// query and 256 key/value columns, vocabulary 2048) and of one 8B matrix. Arguments: rows, threads.
//
//   build/release/tests/bench/dense_bench --benchmark_repetitions=3
#include <benchmark/benchmark.h>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/buffer.h"
#include "kernels/base/status_macros.h"
#include "kernels/dense/gemm.h"
#include "kernels/dense/rms_norm.h"
#include "kernels/dense/rope.h"
#include "kernels/dense/sampling.h"
#include "kernels/dense/silu_mul.h"
#include "tests/support/test_tensor.h"
#include "tests/support/thread_executor.h"

namespace kvasir::kernels {
namespace {

using tests::TestTensor;
using tests::ThreadExecutor;

template <typename T>
T OrDie(absl::StatusOr<T> value) {
  KVASIR_CHECK(value.ok());
  return *std::move(value);
}

struct LinearShape {
  int64_t k, n;
};

// The matrices of a decode step in order, each with its own weights, as the model has them.
std::vector<LinearShape> ReferenceModel() {
  std::vector<LinearShape> shapes;
  for (int layer = 0; layer < 6; ++layer) {
    for (const LinearShape& shape :
         {LinearShape{256, 512}, LinearShape{256, 256}, LinearShape{256, 256},
          LinearShape{512, 256}, LinearShape{256, 1536}, LinearShape{768, 256}}) {
      shapes.push_back(shape);
    }
  }
  shapes.push_back({256, 2048});
  return shapes;
}

class Linears {
 public:
  Linears(DType dtype, const std::vector<LinearShape>& shapes, int64_t rows, int num_threads)
      : executor_(num_threads) {
    int64_t scratch_bytes = 0;
    uint32_t seed = 1;
    for (const LinearShape& shape : shapes) {
      TestTensor weight(dtype, {shape.n, shape.k});
      weight.Fill(seed++);
      const std::vector<PackedLinear::Part> parts = {{.weight = weight.view()}};
      linears_.push_back(OrDie(PackedLinear::Create(parts, {.input = dtype, .output = dtype})));
      scratch_bytes = std::max(scratch_bytes, linears_.back().ScratchBytes(num_threads));
      x_.emplace_back(dtype, std::vector<int64_t>{rows, shape.k}).Fill(seed);
      y_.emplace_back(dtype, std::vector<int64_t>{rows, shape.n});
      flops_ += 2 * rows * shape.k * shape.n;
    }
    scratch_ = OrDie(HostBuffer::Allocate(scratch_bytes));
  }

  void Run() {
    for (size_t i = 0; i < linears_.size(); ++i) {
      const absl::Status status =
          linears_[i].Run(x_[i].view(), y_[i].view(),
                          {scratch_.data(), static_cast<size_t>(scratch_.size_bytes())}, executor_);
      KVASIR_CHECK(status.ok());
    }
  }
  int64_t flops() const { return flops_; }
  std::string engine() const { return linears_[0].engine_name(); }

 private:
  ThreadExecutor executor_;
  std::vector<PackedLinear> linears_;
  std::vector<TestTensor> x_;
  std::vector<TestTensor> y_;
  HostBuffer scratch_;
  int64_t flops_ = 0;
};

void RunLinears(benchmark::State& state, DType dtype, const std::vector<LinearShape>& shapes) {
  Linears linears(dtype, shapes, state.range(0), static_cast<int>(state.range(1)));
  for (auto _ : state) linears.Run();
  state.SetLabel(linears.engine());
  state.counters["flop/s"] = benchmark::Counter(static_cast<double>(linears.flops()),
                                                benchmark::Counter::kIsIterationInvariantRate);
}

void BM_ReferenceModelLinears(benchmark::State& state, DType dtype) {
  RunLinears(state, dtype, ReferenceModel());
}
void BM_Linear4096x14336(benchmark::State& state, DType dtype) {
  RunLinears(state, dtype, {{4096, 14336}});
}

#define KVASIR_ROWS_AND_THREADS \
  ArgsProduct({{1, 4, 16, 64, 512}, {1, 2}})->UseRealTime()->Unit(benchmark::kMicrosecond)
BENCHMARK_CAPTURE(BM_ReferenceModelLinears, bf16, DType::kBFloat16)->KVASIR_ROWS_AND_THREADS;
BENCHMARK_CAPTURE(BM_ReferenceModelLinears, f32, DType::kFloat32)->KVASIR_ROWS_AND_THREADS;
BENCHMARK_CAPTURE(BM_Linear4096x14336, bf16, DType::kBFloat16)->KVASIR_ROWS_AND_THREADS;

// One layer's worth of each element-wise op.
void BM_RmsNorm(benchmark::State& state, DType dtype) {
  ThreadExecutor executor(static_cast<int>(state.range(1)));
  TestTensor x(dtype, {state.range(0), 256}), weight(dtype, {256}), y(dtype, {state.range(0), 256});
  x.Fill(1);
  weight.Fill(2);
  for (auto _ : state) {
    KVASIR_CHECK(
        RmsNorm({.x = x.view(), .weight = weight.view(), .y = y.view(), .epsilon = 1e-5f}, executor)
            .ok());
  }
}
BENCHMARK_CAPTURE(BM_RmsNorm, bf16, DType::kBFloat16)->KVASIR_ROWS_AND_THREADS;

void BM_SiluMul(benchmark::State& state, DType dtype) {
  ThreadExecutor executor(static_cast<int>(state.range(1)));
  TestTensor gate_up(dtype, {state.range(0), 1536}), y(dtype, {state.range(0), 768});
  gate_up.Fill(1);
  for (auto _ : state) {
    KVASIR_CHECK(SiluMul({.gate_up = gate_up.view(), .y = y.view()}, executor).ok());
  }
}
BENCHMARK_CAPTURE(BM_SiluMul, bf16, DType::kBFloat16)->KVASIR_ROWS_AND_THREADS;

struct RopeFixture {
  explicit RopeFixture(const benchmark::State& state)
      : executor(static_cast<int>(state.range(1))), table(std::vector<double>(32, 0.01), 1.0) {
    for (int64_t t = 0; t < state.range(0); ++t) positions.push_back(7000 + t);
    table.SetPositions(positions, executor);
  }
  ThreadExecutor executor;
  RopeTable table;
  std::vector<int64_t> positions;
};

void BM_RopeTable(benchmark::State& state) {
  RopeFixture rope(state);
  for (auto _ : state) rope.table.SetPositions(rope.positions, rope.executor);
}
BENCHMARK(BM_RopeTable)->KVASIR_ROWS_AND_THREADS;

void BM_Rope(benchmark::State& state, DType dtype) {
  RopeFixture rope(state);
  TestTensor q(dtype, {state.range(0), 12, 64});
  q.Fill(1);
  for (auto _ : state) KVASIR_CHECK(ApplyRope(rope.table, q.view(), rope.executor).ok());
}
BENCHMARK_CAPTURE(BM_Rope, bf16, DType::kBFloat16)->KVASIR_ROWS_AND_THREADS;

// Arguments: rows, vocabulary.
void BM_Sample(benchmark::State& state, SamplingOptions options) {
  SerialExecutor executor;
  const int64_t rows = state.range(0), vocab = state.range(1);
  TestTensor logits(DType::kFloat32, {rows, vocab});
  logits.Fill(1);
  const HostBuffer scratch = OrDie(HostBuffer::Allocate(SamplingScratchBytes(vocab, 1)));
  const std::vector<SamplingOptions> all(static_cast<size_t>(rows), options);
  std::vector<SampledToken> tokens(static_cast<size_t>(rows));
  for (auto _ : state) {
    KVASIR_CHECK(Sample({.logits = logits.view(),
                         .options = all,
                         .tokens = tokens,
                         .scratch = {scratch.data(), static_cast<size_t>(scratch.size_bytes())}},
                        executor)
                     .ok());
  }
}
#define KVASIR_VOCABULARIES \
  ArgsProduct({{1}, {2048, 128000}})->UseRealTime()->Unit(benchmark::kMicrosecond)
BENCHMARK_CAPTURE(BM_Sample, greedy, SamplingOptions{})->KVASIR_VOCABULARIES;
BENCHMARK_CAPTURE(BM_Sample, top_k_and_top_p,
                  SamplingOptions{.temperature = 1, .top_k = 50, .top_p = 0.9f})
    ->KVASIR_VOCABULARIES;
BENCHMARK_CAPTURE(BM_Sample, top_p, SamplingOptions{.temperature = 1, .top_p = 0.9f})
    ->KVASIR_VOCABULARIES;

}  // namespace
}  // namespace kvasir::kernels
