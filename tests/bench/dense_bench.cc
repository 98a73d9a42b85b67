// Speed of the dense ops, except linear layers (gemm_bench), at the shapes of the reference model
// (hidden 256, MLP 768, vocabulary 2048). Arguments: rows, threads.
//
//   build/release/tests/bench/dense_bench --benchmark_repetitions=3
#include <benchmark/benchmark.h>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/base/buffer.h"
#include "kernels/base/status_macros.h"
#include "kernels/dense/rms_norm.h"
#include "kernels/dense/silu_mul.h"
#include "kernels/rope/rope.h"
#include "kernels/sampling/sampling.h"
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

#define KVASIR_ROWS_AND_THREADS \
  ArgsProduct({{1, 4, 16, 64, 512}, {1, 2}})->UseRealTime()->Unit(benchmark::kMicrosecond)

// Each element-wise op as in one layer.
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
