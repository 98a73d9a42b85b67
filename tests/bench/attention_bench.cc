// Speed of attention and selection over paged KV in bfloat16, beside the read bandwidth of the same
// threads in the same run. Shapes: `needle` is the reference model's (8 query heads, 4 KV heads x
// 64), `8b` is Llama-3.1-8B's (32 query heads, 8 KV heads x 128); one layer. Sequences take turns,
// so that reads miss the last-level cache.
//
//   build/release/tests/bench/attention_bench --benchmark_repetitions=5
//
// Counters: GB/s of K and V (and bounds) read; of_read is its share of the read bandwidth.
#include <algorithm>
#include <benchmark/benchmark.h>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels/append/digests.h"
#include "kernels/attention/attend.h"
#include "kernels/sparse/common/selection_accounting.h"
#include "kernels/sparse/policy.h"
#include "tests/support/fake_paged_kv.h"
#include "tests/support/thread_executor.h"

namespace kvasir::kernels {
namespace {

using tests::ThreadExecutor;

constexpr int64_t kRotatedBytes = int64_t{256} << 20;

struct Shape {
  const char* name;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t TokenBytes() const { return kv_heads * head_dim * 2 * 2; }
};
constexpr Shape kNeedle = {"needle", 8, 4, 64};
constexpr Shape k8b = {"8b", 32, 8, 128};

// Roughly normal values from a counter: quick to make, and never all equal.
class FastRandom {
 public:
  BFloat16 Next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    int sum = 0;
    for (int i = 0; i < 4; ++i) sum += static_cast<int8_t>(state_ >> (8 * i));
    return BFloat16(static_cast<float>(sum) * (1.0f / 148.0f));
  }

 private:
  uint64_t state_ = 0x9e3779b97f4a7c15u;
};

// Returns the bytes per second that the threads read from memory: the best of some passes over 1
// GiB.
double ReadBandwidth(int threads) {
  static std::map<int, double> measured;
  if (const auto it = measured.find(threads); it != measured.end()) return it->second;
  constexpr int64_t kWords = int64_t{1} << 27;
  constexpr int64_t kChunk = int64_t{1} << 17;
  std::vector<uint64_t> memory(static_cast<size_t>(kWords), 1);
  ThreadExecutor executor(threads);
  double best = 0;
  for (int pass = 0; pass < 5; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    executor.ParallelFor(kWords / kChunk, [&](int64_t i, int) {
      uint64_t sums[8] = {};
      const uint64_t* chunk = memory.data() + i * kChunk;
      for (int64_t j = 0; j < kChunk; j += 8) {
        for (int k = 0; k < 8; ++k) sums[k] += chunk[j + k];
      }
      benchmark::DoNotOptimize(sums);
    });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, 8.0 * kWords / seconds.count());
  }
  measured[threads] = best;
  return best;
}

// Sequences of one length, and a batch over one of them.
class Sequences {
 public:
  Sequences(const Shape& shape, int64_t context)
      : shape_(shape),
        context_(context),
        count_(std::max<int64_t>(1, kRotatedBytes / (context * shape.TokenBytes()))),
        kv_({.num_layers = 1,
             .num_kv_heads = shape.kv_heads,
             .head_dim = shape.head_dim,
             .dtype = DType::kBFloat16},
            count_, (context + kPageTokens - 1) / kPageTokens),
        faults_(static_cast<size_t>(count_)) {
    FastRandom random;
    const PagedKv view = kv_.View();
    for (int64_t slot = 0; slot < count_; ++slot) {
      kv_.Grow(slot, context);
      for (int64_t block = 0; block * kPageTokens < context; ++block) {
        for (int64_t head = 0; head < shape.kv_heads; ++head) {
          auto* page = reinterpret_cast<BFloat16*>(view.Peek(slot, block, 0, head).page());
          std::generate_n(page, view.layout.page_bytes() / 2, [&] { return random.Next(); });
        }
        KVASIR_CHECK(RebuildBounds(view, slot, block, kPageTokens).ok());
      }
    }
  }

  // Sets queries at the last `rows` positions of the context.
  void SetQueries(int64_t rows) {
    const size_t size = static_cast<size_t>(rows * shape_.heads * shape_.head_dim);
    FastRandom random;
    q_.resize(size);
    std::generate(q_.begin(), q_.end(), [&] { return random.Next(); });
    out_.resize(size);
    tiles_.clear();
    for (int64_t first = 0; first < rows; first += kPageTokens) {
      tiles_.push_back({.slot = 0,
                        .first_row = first,
                        .num_rows = std::min(kPageTokens, rows - first),
                        .first_position = context_ - rows + first});
    }
    headers_.assign(tiles_.size() * static_cast<size_t>(shape_.kv_heads), {});
  }

  // Moves the batch to the next sequence.
  void Rotate() {
    slot_ = (slot_ + 1) % count_;
    for (QueryTile& tile : tiles_) tile.slot = slot_;
  }

  PageSelection MakeSelection(int64_t capacity) {
    entries_.resize(headers_.size() * static_cast<size_t>(capacity));
    return {.headers = headers_.data(),
            .entries = entries_.data(),
            .num_rows = static_cast<int64_t>(headers_.size()),
            .capacity = capacity};
  }
  SelectParams ForSelect(const std::vector<PolicyNumbers>& numbers) {
    SelectParams params = {{.q = Tensor(q_.data()),
                            .kv = kv_.View(),
                            .layer = 0,
                            .tiles = tiles_,
                            .numbers = numbers,
                            .faults = faults_}};
    params.scratch = &scratch_;
    return params;
  }
  AttendParams ForAttend(const PageSelection& selection) {
    AttendParams params = {{.q = Tensor(q_.data()),
                            .out = Tensor(out_.data()),
                            .lse = {},
                            .kv = kv_.View(),
                            .layer = 0,
                            .scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim)),
                            .tiles = tiles_,
                            .selection = selection,
                            .faults = faults_}};
    params.scratch = &scratch_;
    return params;
  }
  int64_t num_blocks() const { return static_cast<int64_t>(tiles_.size()); }
  int64_t last_position() const { return context_ - 1; }

 private:
  TensorView Tensor(BFloat16* data) const {
    const int64_t tokens = static_cast<int64_t>(q_.size()) / (shape_.heads * shape_.head_dim);
    return TensorView(data, DType::kBFloat16, {tokens, shape_.heads, shape_.head_dim});
  }

  const Shape shape_;
  const int64_t context_;
  const int64_t count_;
  FakePagedKv kv_;
  int64_t slot_ = 0;
  std::vector<QueryTile> tiles_;
  std::vector<SelectionHeader> headers_;
  std::vector<SelectionEntry> entries_;
  std::vector<BFloat16> q_;
  std::vector<BFloat16> out_;
  std::vector<uint8_t> faults_;
  Scratch scratch_;
};

// Returns the sequences that benchmarks of one shape and context share; keeps the last ones made.
Sequences& SequencesOf(const Shape& shape, int64_t context) {
  static std::string made;
  static std::unique_ptr<Sequences> sequences;
  const std::string wanted = std::string(shape.name) + " " + std::to_string(context);
  if (made != wanted) {
    sequences.reset();
    sequences = std::make_unique<Sequences>(shape, context);
    made = wanted;
  }
  return *sequences;
}

void ReportBytes(benchmark::State& state, double bytes, int threads) {
  const double read = ReadBandwidth(threads);
  state.counters["GB/s"] =
      benchmark::Counter(bytes * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
  state.counters["of_read"] =
      benchmark::Counter(bytes / read, benchmark::Counter::kIsIterationInvariantRate);
}

void BM_Read(benchmark::State& state) {
  const int threads = static_cast<int>(state.range(0));
  for (auto _ : state) benchmark::DoNotOptimize(ReadBandwidth(threads));
  state.counters["GB/s"] = ReadBandwidth(threads) * 1e-9;
}
BENCHMARK(BM_Read)->ArgName("threads")->Arg(1)->Arg(2)->Iterations(1);

void BM_DenseDecode(benchmark::State& state, const Shape& shape) {
  const int64_t context = state.range(0);
  const int threads = static_cast<int>(state.range(1));
  Sequences& sequences = SequencesOf(shape, context);
  sequences.SetQueries(1);
  ThreadExecutor executor(threads);
  const PageSelection selection = sequences.MakeSelection(0);
  for (auto _ : state) {
    sequences.Rotate();
    KVASIR_CHECK(Attend(sequences.ForAttend(selection), executor).ok());
  }
  ReportBytes(state, static_cast<double>(context * shape.TokenBytes()), threads);
}

// Cost of watching: dense attention with a terminator that finds no reason to end.
void BM_WatchedDecode(benchmark::State& state, const Shape& shape) {
  const int64_t context = state.range(0);
  const int threads = static_cast<int>(state.range(1));
  Sequences& sequences = SequencesOf(shape, context);
  sequences.SetQueries(1);
  ThreadExecutor executor(threads);
  const PageSelection selection = sequences.MakeSelection(0);
  const std::unique_ptr<Terminator> terminator = MakeTerminator("art").value();
  const Termination termination = {.terminator = terminator.get(),
                                   .patience = 5,
                                   .sink_end = 128,
                                   .window_begin = context - 512};
  std::vector<UnreadPages> unread(static_cast<size_t>(shape.kv_heads));
  for (auto _ : state) {
    sequences.Rotate();
    AttendParams params = sequences.ForAttend(selection);
    params.terminations = std::span(&termination, 1);
    params.unread = unread;
    KVASIR_CHECK(Attend(params, executor).ok());
  }
  KVASIR_CHECK(unread[0].device == 0);
  ReportBytes(state, static_cast<double>(context * shape.TokenBytes()), threads);
}

// Sink 128, window 512, quest with a budget of 2,048 tokens. The time includes the selection.
void BM_SparseDecode(benchmark::State& state, const Shape& shape, bool attend) {
  const int64_t context = state.range(0);
  const int threads = static_cast<int>(state.range(1));
  Sequences& sequences = SequencesOf(shape, context);
  sequences.SetQueries(1);
  ThreadExecutor executor(threads);
  const std::unique_ptr<Selector> selector = MakeSelector("quest").value();
  const std::vector<PolicyNumbers> numbers = {
      {.sink_tokens = 128, .window_tokens = 512, .budget_tokens = 2048}};
  PageSelection selection = sequences.MakeSelection(selector->MaxEntries(numbers[0], context));
  for (auto _ : state) {
    sequences.Rotate();
    KVASIR_CHECK(selector->Select(sequences.ForSelect(numbers), selection, executor).ok());
    if (attend) KVASIR_CHECK(Attend(sequences.ForAttend(selection), executor).ok());
  }
  const int64_t attended = CountPages(selection.header(0), selection.list(0),
                                      sequences.last_position(), selector->skip_reason())
                               .attended;
  const int64_t bounds = context / kPageTokens * shape.TokenBytes();
  const int64_t pages = attend ? attended * kPageTokens * shape.TokenBytes() : 0;
  ReportBytes(state, static_cast<double>(bounds + pages), threads);
}

// Dense attention of a prefill chunk of `rows` queries at the end of the context.
void BM_Prefill(benchmark::State& state, const Shape& shape) {
  const int64_t context = state.range(0);
  const int64_t rows = state.range(1);
  const int threads = static_cast<int>(state.range(2));
  Sequences& sequences = SequencesOf(shape, context);
  sequences.SetQueries(rows);
  ThreadExecutor executor(threads);
  const PageSelection selection = sequences.MakeSelection(0);
  for (auto _ : state) {
    sequences.Rotate();
    KVASIR_CHECK(Attend(sequences.ForAttend(selection), executor).ok());
  }
  const double pairs = static_cast<double>(rows) * static_cast<double>(context) -
                       static_cast<double>(rows) * static_cast<double>(rows) / 2;
  state.counters["GFLOP/s"] =
      benchmark::Counter(4e-9 * pairs * static_cast<double>(shape.heads * shape.head_dim),
                         benchmark::Counter::kIsIterationInvariantRate);
}

void DecodeArgs(benchmark::internal::Benchmark* benchmark, int64_t context) {
  benchmark->ArgNames({"context", "threads"})->Unit(benchmark::kMicrosecond)->UseRealTime();
  for (const int64_t threads : {1, 2}) benchmark->Args({context, threads});
}

void Register(const Shape& shape) {
  const auto name = [&](const char* what) { return std::string(what) + "/" + shape.name; };
  for (const int64_t context : {8192, 32768, 131072}) {
    DecodeArgs(benchmark::RegisterBenchmark(
                   name("DenseDecode").c_str(),
                   [&shape](benchmark::State& state) { BM_DenseDecode(state, shape); }),
               context);
    DecodeArgs(benchmark::RegisterBenchmark(
                   name("WatchedDecode").c_str(),
                   [&shape](benchmark::State& state) { BM_WatchedDecode(state, shape); }),
               context);
    DecodeArgs(benchmark::RegisterBenchmark(
                   name("QuestSelect").c_str(),
                   [&shape](benchmark::State& state) { BM_SparseDecode(state, shape, false); }),
               context);
    DecodeArgs(benchmark::RegisterBenchmark(
                   name("QuestDecode").c_str(),
                   [&shape](benchmark::State& state) { BM_SparseDecode(state, shape, true); }),
               context);
    if (context != 8192) continue;
    auto* prefill = benchmark::RegisterBenchmark(
        name("Prefill").c_str(), [&shape](benchmark::State& state) { BM_Prefill(state, shape); });
    prefill->ArgNames({"context", "rows", "threads"})->Unit(benchmark::kMillisecond)->UseRealTime();
    for (const int64_t rows : {512, 8192}) {
      for (const int64_t threads : {1, 2}) prefill->Args({context, rows, threads});
    }
  }
}

[[maybe_unused]] const bool kRegistered = [] {
  Register(kNeedle);
  Register(k8b);
  return true;
}();

}  // namespace
}  // namespace kvasir::kernels
