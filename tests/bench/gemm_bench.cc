// Speed of linear layers on the CPU, beside the machine's limits in the same run: few rows against
// a plain read of memory by the same threads, many rows against fused multiply-adds of registers.
// Shapes of SmolLM2-135M and of an 8B model. Each layer has enough copies that few rows read their
// weights from memory. KVASIR_CPU_ISA chooses the kernels. For x86.
//
//   gemm_bench [threads] [bf16|f32|int8 ...]
//
// Layer and yardstick take turns. Both figures are the best of kTurns.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <immintrin.h>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/buffer.h"
#include "kernels/base/cpu_isa.h"
#include "kernels/base/status_macros.h"
#include "kernels/gemm/gemm.h"
#include "tests/support/test_tensor.h"
#include "worker/thread_pool.h"

#define KVASIR_FOR(isa) __attribute__((target(isa)))

namespace kvasir::kernels {
namespace {

using tests::TestTensor;

constexpr int kTurns = 7;
constexpr int64_t kReadBytes = int64_t{128} << 20;
constexpr int64_t kFlopsPerTurn = int64_t{4} << 30;

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <typename T>
T OrDie(absl::StatusOr<T> value) {
  KVASIR_CHECK(value.ok());
  return *std::move(value);
}

// --- yardsticks ---

using Words __attribute__((vector_size(32))) = uint64_t;

KVASIR_FOR("avx2") uint64_t ReadAll(const std::byte* data, int64_t bytes) {
  constexpr int64_t kVectors = 8;
  Words sums[kVectors] = {};
  const auto* words = reinterpret_cast<const Words*>(data);
  for (int64_t i = 0; i < bytes / 32; i += kVectors) {
#pragma GCC unroll 8
    for (int64_t v = 0; v < kVectors; ++v) sums[v] ^= words[i + v];
  }
  uint64_t all = 0;
  for (const Words& sum : sums) all ^= sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
  return all;
}

// Chains of a = a * b + b that fill registers.
constexpr size_t kChains = 12;

KVASIR_FOR("avx2,fma") float Multiply8(int64_t rounds) {
  const __m256 factor = _mm256_set1_ps(0.999f);
  __m256 chains[kChains];
  for (__m256& chain : chains) chain = factor;
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 16
    for (__m256& chain : chains) chain = _mm256_fmadd_ps(chain, factor, factor);
  }
  for (__m256& chain : chains) chains[0] += chain;
  return chains[0][0];
}

KVASIR_FOR("avx512f") float Multiply16(int64_t rounds) {
  const __m512 factor = _mm512_set1_ps(0.999f);
  __m512 chains[kChains];
  for (__m512& chain : chains) chain = factor;
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 16
    for (__m512& chain : chains) chain = _mm512_fmadd_ps(chain, factor, factor);
  }
  for (__m512& chain : chains) chains[0] += chain;
  return chains[0][0];
}

class Machine {
 public:
  explicit Machine(int threads) : pool_(threads) {
    data_ = OrDie(HostBuffer::Allocate(kReadBytes));
    std::memset(data_.data(), 1, static_cast<size_t>(kReadBytes));
  }

  // Returns bytes per second.
  double ReadSpeed() {
    constexpr int64_t kPart = int64_t{1} << 20;
    const double begin = Seconds();
    pool_.ParallelFor(kReadBytes / kPart, [&](int64_t i, int) {
      sink_ = static_cast<float>(ReadAll(data_.data() + i * kPart, kPart));
    });
    return static_cast<double>(kReadBytes) / (Seconds() - begin);
  }

  // Returns operations per second; a fused multiply-add counts as two.
  double FmaSpeed() {
    constexpr int64_t kRounds = 1'000'000;
    const bool wide = ChosenCpuIsa() >= CpuIsa::kAvx512;
    const double begin = Seconds();
    pool_.ParallelFor(pool_.num_threads(), [&](int64_t, int) {
      sink_ = wide ? Multiply16(kRounds) : Multiply8(kRounds);
    });
    return 2.0 * (wide ? 16 : 8) * static_cast<double>(kChains) * static_cast<double>(kRounds) *
           pool_.num_threads() / (Seconds() - begin);
  }

  Executor& executor() { return pool_; }

 private:
  worker::ThreadPool pool_;
  HostBuffer data_;
  volatile float sink_ = 0;
};

// --- layers ---

struct Shape {
  const char* name;
  int64_t k;
  int64_t n;
};

constexpr Shape kShapes[] = {
    {"SmolLM2 q, k, v", 576, 960}, {"SmolLM2 output", 576, 576}, {"SmolLM2 gate, up", 576, 3072},
    {"SmolLM2 down", 1536, 576},   {"SmolLM2 head", 576, 49152}, {"8B q, k, v", 4096, 6144},
    {"8B down", 14336, 4096},
};

struct Kind {
  const char* name;
  DType dtype;
  WeightForm weights;
  double bytes;  // per weight
};

constexpr Kind kKinds[] = {
    {"bf16", DType::kBFloat16, WeightForm::kAsInput, 2},
    {"f32", DType::kFloat32, WeightForm::kAsInput, 4},
    {"int8", DType::kBFloat16, WeightForm::kInt8, 34.0 / 32},
};

class Layers {
 public:
  Layers(const Shape& shape, const Kind& kind, int64_t rows, Machine& machine)
      : machine_(machine),
        x_(kind.dtype, {rows, shape.k}),
        y_(kind.dtype, {rows, shape.n}),
        bytes_(kind.bytes * static_cast<double>(shape.k * shape.n)),
        flops_(2.0 * static_cast<double>(rows * shape.k * shape.n)) {
    TestTensor weight(kind.dtype, {shape.n, shape.k});
    weight.Fill(1);
    x_.Fill(2);
    const PackedLinear::Part part = {.weight = weight.view()};
    HostArena memory(int64_t{32} << 20);  // as in a worker
    const auto copies =
        rows > 8 ? 1 : static_cast<int64_t>(static_cast<double>(kReadBytes) / bytes_) + 1;
    for (int64_t i = 0; i < copies; ++i) {
      layers_.push_back(OrDie(PackedLinear::Create(
          std::span(&part, 1), {.input = kind.dtype, .output = kind.dtype, .weights = kind.weights},
          memory)));
    }
    scratch_ =
        OrDie(HostBuffer::Allocate(layers_[0].ScratchBytes(machine.executor().num_threads())));
    turns_ = layers_.size() > 1
                 ? 1
                 : std::max<int64_t>(
                       1, static_cast<int64_t>(static_cast<double>(kFlopsPerTurn) / flops_));
  }

  // Returns the seconds for one layer.
  double Time() {
    const double begin = Seconds();
    for (int64_t turn = 0; turn < turns_; ++turn) {
      for (PackedLinear& layer : layers_) {
        KVASIR_CHECK(layer
                         .Run(x_.view(), y_.view(),
                              {scratch_.data(), static_cast<size_t>(scratch_.size_bytes())},
                              machine_.executor())
                         .ok());
      }
    }
    return (Seconds() - begin) / static_cast<double>(turns_ * std::ssize(layers_));
  }
  double bytes() const { return bytes_; }
  double flops() const { return flops_; }
  std::string engine() const { return layers_[0].engine_name(); }

 private:
  Machine& machine_;
  std::vector<PackedLinear> layers_;
  TestTensor x_;
  TestTensor y_;
  HostBuffer scratch_;
  double bytes_;
  double flops_;
  int64_t turns_ = 1;
};

void Measure(const Shape& shape, const Kind& kind, int64_t rows, Machine& machine) {
  Layers layers(shape, kind, rows, machine);
  double time = 1e9, read = 0, fma = 0;
  layers.Time();
  for (int turn = 0; turn < kTurns; ++turn) {
    read = std::max(read, machine.ReadSpeed());
    fma = std::max(fma, machine.FmaSpeed());
    time = std::min(time, layers.Time());
  }
  std::printf(
      "%-17s %5ld x %-5ld %4ld rows %-22s %9.1f us %6.1f GB/s %3.0f %% of %5.1f  %7.1f "
      "GFLOP/s %3.0f %% of %.0f\n",
      shape.name, shape.k, shape.n, rows, layers.engine().c_str(), time * 1e6,
      layers.bytes() / time / 1e9, 100 * layers.bytes() / time / read, read / 1e9,
      layers.flops() / time / 1e9, 100 * layers.flops() / time / fma, fma / 1e9);
  std::fflush(stdout);
}

}  // namespace
}  // namespace kvasir::kernels

int main(int argc, char** argv) {
  using namespace kvasir::kernels;
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
  std::vector<std::string> wanted(argv + std::min(argc, 2), argv + argc);
  if (wanted.empty()) wanted = {"bf16", "int8"};
  Machine machine(threads);
  std::printf("%s, %d threads\n", std::string(CpuIsaName(ChosenCpuIsa())).c_str(), threads);
  for (const Kind& kind : kKinds) {
    if (std::find(wanted.begin(), wanted.end(), kind.name) == wanted.end()) continue;
    for (const int64_t rows : {1, 4, 64, 512}) {
      for (const Shape& shape : kShapes) Measure(shape, kind, rows, machine);
    }
  }
}
