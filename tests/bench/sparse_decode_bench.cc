// Speed of decoding with sparse policies beside dense attention, in the same run: one layer of
// Llama-3.1-8B's shape (32 query and 8 KV heads of 128, bfloat16), one sequence. Prints a table of
// means over whole refresh cycles of 64 steps, including selection.
//
//   build/release/tests/bench/sparse_decode_bench [context [threads [cycles]]]      (131072 2 2)
//
// Keys are locally alike on four scales, like keys of text. Among them are needles of all
// strengths, for which the queries look. Queries turn slowly. All caches are swept between two ops,
// as other layers and sequences would do.
#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/append/digests.h"
#include "kernels/append/key_codes.h"
#include "kernels/attention/attend.h"
#include "kernels/sparse/common/select_common.h"
#include "kernels/sparse/policy.h"
#include "kernels/sparse/quality/quality_contract.h"
#include "kernels/sparse/reuse/reusing_select.h"
#include "tests/support/fake_paged_kv.h"
#include "tests/support/thread_executor.h"

namespace kvasir::kernels {
namespace {

using tests::ThreadExecutor;
using Clock = std::chrono::steady_clock;

constexpr int64_t kHeads = 32, kKvHeads = 8, kGroup = kHeads / kKvHeads, kDim = 128;
constexpr int64_t kCycleSteps = 64;

// Queries have a constant part and a part that turns a little in every step.
constexpr float kConstantShare = 0.9f, kTurn = 0.95f;

constexpr std::array<int64_t, 4> kKeyScales = {1, 16, 256, 4096};
constexpr int64_t kNeedles = 64, kNeedleTokens = 8;

using Vector = std::array<float, kDim>;

// Roughly normal values, quick to make.
class FastNormal {
 public:
  explicit FastNormal(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  float operator()() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    int sum = 0;
    for (int i = 0; i < 4; ++i) sum += static_cast<int8_t>(state_ >> (8 * i));
    return static_cast<float>(sum) * (1.0f / 148.0f);
  }
  void Fill(Vector& v) {
    for (float& x : v) x = (*this)();
  }
  int64_t Below(int64_t n) {
    (*this)();
    return static_cast<int64_t>(state_ >> 16) % n;
  }

 private:
  uint64_t state_;
};

// Returns the direction that the queries of a KV head look for.
Vector Wanted(int64_t kv_head) {
  Vector v;
  FastNormal(1000 + static_cast<uint64_t>(kv_head)).Fill(v);
  return v;
}

class Sequence {
 public:
  explicit Sequence(int64_t context)
      : kv_({.num_layers = 1,
             .num_kv_heads = kKvHeads,
             .head_dim = kDim,
             .dtype = DType::kBFloat16},
            1, context / kPageTokens),
        context_(context) {
    kv_.Grow(0, context);
    for (int64_t head = 0; head < kKvHeads; ++head) FillHead(head);
    const PagedKv view = kv_.View();
    for (int64_t block = 0; block * kPageTokens < context; ++block) {
      KVASIR_CHECK(RebuildBounds(view, 0, block, kPageTokens).ok());
      KVASIR_CHECK(RebuildKeyCodes(view, 0, block, kPageTokens).ok());
    }
  }
  PagedKv View() { return kv_.View(); }
  int64_t context() const { return context_; }

 private:
  void FillHead(int64_t head) {
    FastNormal random(static_cast<uint64_t>(head) + 1);
    const Vector wanted = Wanted(head);
    std::vector<float> strengths(static_cast<size_t>(context_ / kNeedleTokens));
    for (int64_t i = 0; i < kNeedles; ++i) {
      strengths[static_cast<size_t>(random.Below(std::ssize(strengths)))] =
          static_cast<float>(i + 1) / static_cast<float>(kNeedles);
    }
    std::array<Vector, kKeyScales.size()> parts;
    for (int64_t t = 0; t < context_; ++t) {
      const float strength = strengths[static_cast<size_t>(t / kNeedleTokens)];
      std::byte* key = kv_.Token(FakePagedKv::Side::kKey, 0, t, 0, head);
      std::byte* value = kv_.Token(FakePagedKv::Side::kValue, 0, t, 0, head);
      for (size_t s = 0; s < parts.size(); ++s) {
        if (t % kKeyScales[s] == 0) random.Fill(parts[s]);
      }
      for (size_t i = 0; i < kDim; ++i) {
        float x = 0;
        for (const Vector& part : parts) x += 0.5f * part[i];
        kv_.Set(key, static_cast<int64_t>(i), strength * wanted[i] + (1 - strength) * x);
        kv_.Set(value, static_cast<int64_t>(i), random());
      }
    }
  }

  FakePagedKv kv_;
  const int64_t context_;
};

// The queries of consecutive steps.
class QueryStream {
 public:
  QueryStream() {
    for (Vector& v : turning_) random_.Fill(v);
  }
  void Next(std::vector<BFloat16>& q) {
    q.resize(kHeads * kDim);
    for (int64_t head = 0; head < kHeads; ++head) {
      Vector& turning = turning_[static_cast<size_t>(head)];
      const Vector wanted = Wanted(head / kGroup);
      for (size_t i = 0; i < kDim; ++i) {
        turning[i] = kTurn * turning[i] + std::sqrt(1 - kTurn * kTurn) * random_();
        q[static_cast<size_t>(head * kDim) + i] = BFloat16(
            std::sqrt(kConstantShare) * wanted[i] + std::sqrt(1 - kConstantShare) * turning[i]);
      }
    }
  }

 private:
  FastNormal random_{77};
  std::array<Vector, kHeads> turning_;
};

struct Policy {
  const char* name;
  const char* selector;
  MethodOptions options;
  const char* reuse;  // may be null
  PolicyNumbers numbers;
};

double Milliseconds(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double, std::milli>(end - begin).count();
}

// Times of a step, in milliseconds.
struct StepTimes {
  double select = 0, prune = 0, contract = 0, attend = 0;
  double all() const { return select + prune + contract + attend; }
};

class Bench {
 public:
  Bench(int64_t context, int threads) : sequence_(context), executor_(threads) {
    swept_.resize(size_t{96} << 20, 1);
  }

  void Run(const Policy& policy, int64_t cycles, double dense_ms);
  // Returns the median time of a step.
  double Dense(int64_t steps);

 private:
  void PlaceStep(int64_t step) {
    queries_.Next(q_);
    out_.resize(q_.size());
    tile_ = {.slot = 0,
             .num_rows = 1,
             .first_position = sequence_.context() - kCycleSteps + step % kCycleSteps};
    for (size_t i = 0; i < swept_.size(); i += 64) ++swept_[i];
  }
  PageSelection MakeSelection(int64_t capacity) {
    headers_.assign(kKvHeads, {});
    entries_.resize(static_cast<size_t>(kKvHeads * capacity));
    return {.headers = headers_.data(),
            .entries = entries_.data(),
            .num_rows = kKvHeads,
            .capacity = capacity};
  }
  TensorView Tensor(std::vector<BFloat16>& x) const {
    return TensorView(x.data(), DType::kBFloat16, {1, kHeads, kDim});
  }
  void AttendTo(const PageSelection& selection) {
    AttendParams params = {{.q = Tensor(q_),
                            .out = Tensor(out_),
                            .lse = {},
                            .kv = sequence_.View(),
                            .layer = 0,
                            .scale = kScale,
                            .tiles = {&tile_, 1},
                            .selection = selection,
                            .faults = faults_}};
    params.scratch = &scratch_;
    KVASIR_CHECK(Attend(params, executor_).ok());
  }

  static constexpr float kScale = 0.08838834764f;  // 1 / sqrt(128)

  Sequence sequence_;
  ThreadExecutor executor_;
  QueryStream queries_;
  QueryTile tile_;
  std::vector<BFloat16> q_, out_;
  std::vector<SelectionHeader> headers_;
  std::vector<SelectionEntry> entries_;
  std::array<uint8_t, 1> faults_ = {};
  std::vector<uint8_t> swept_;  // larger than all caches
  Scratch scratch_;
};

double Bench::Dense(int64_t steps) {
  std::vector<double> times;
  for (int64_t step = 0; step < steps; ++step) {
    PlaceStep(step);
    const PageSelection all = MakeSelection(0);
    for (SelectionHeader& header : headers_) header = MakeAllHeader(tile_);
    const auto begin = Clock::now();
    AttendTo(all);
    times.push_back(Milliseconds(begin, Clock::now()));
  }
  std::nth_element(times.begin(), times.begin() + steps / 2, times.end());
  return times[static_cast<size_t>(steps / 2)];
}

// Returns the number of tokens that a head row attends to.
int64_t CountTokens(const PageSelection& selection, int64_t row, int64_t position) {
  int64_t tokens = 0;
  SelectedPages walk(selection.header(row), selection.list(row), position);
  for (; walk.valid(); walk.Next()) tokens += std::popcount(walk.mask());
  return tokens;
}

// Sums over the steps of a policy, and its longest step in milliseconds.
struct Totals {
  StepTimes times;
  double worst = 0;
  double tokens = 0;     // attended to, over KV heads
  double refreshed = 0;  // head rows whose first stage ran
  double mended = 0;     // head rows made dense or widened
};

void Print(const Policy& policy, const Totals& sum, int64_t steps, double dense_ms) {
  const auto n = static_cast<double>(steps);
  std::printf(
      "| %s | %.0f | %.1f %% | %.1f %% | %.3f | %.3f | %.3f | %.3f | %.3f | %.2f | **%.1f** |\n",
      policy.name, sum.tokens / n / kKvHeads, 100 * sum.refreshed / n / kKvHeads,
      100 * sum.mended / n / kKvHeads, sum.times.select / n, sum.times.prune / n,
      sum.times.contract / n, sum.times.attend / n, sum.times.all() / n, sum.worst,
      dense_ms / (sum.times.all() / n));
  std::fflush(stdout);
}

void Bench::Run(const Policy& policy, int64_t cycles, double dense_ms) {
  const std::unique_ptr<Selector> selector = MakeSelector(policy.selector, policy.options).value();
  const std::unique_ptr<Pruner> pruner = MakePruner("top_p").value();
  std::unique_ptr<ReuseRule> rule;
  std::unique_ptr<SelectionMemory> memory;
  std::vector<RowMemory*> memories;
  PolicyNumbers numbers = policy.numbers;
  if (policy.reuse != nullptr) {
    rule = MakeReuseRule(policy.reuse).value();
    numbers.reach_tokens = ReachTokens(*selector, *rule, numbers.reuse);
    memory = MakeSelectionMemory(
                 {*selector, *rule, sequence_.View().layout, kGroup, numbers, sequence_.context()})
                 .value();
    for (int64_t head = 0; head < kKvHeads; ++head) memories.push_back(&memory->row(0, head));
  }
  PolicyNumbers largest = numbers;
  largest.budget_tokens = LargestBudget(numbers, sequence_.context());
  const PageSelection selection = MakeSelection(selector->MaxEntries(largest, sequence_.context()));
  PageSelection rows = selection;
  const ContractKeeper::Stages stages = {.selector = *selector,
                                         .pruner = numbers.top_p < 1 ? pruner.get() : nullptr};
  ContractKeeper keeper;
  Totals sum;
  const int64_t steps = cycles * kCycleSteps;
  for (int64_t step = 0; step < steps; ++step) {
    PlaceStep(step);
    SelectParams params = {{.q = Tensor(q_),
                            .kv = sequence_.View(),
                            .layer = 0,
                            .scale = kScale,
                            .tiles = {&tile_, 1},
                            .numbers = {&numbers, 1},
                            .faults = faults_}};
    params.scratch = &scratch_;
    params.memories = memories;
    const auto begin = Clock::now();
    KVASIR_CHECK((rule == nullptr ? selector->Select(params, rows, executor_)
                                  : SelectReusing(*selector, *rule, params, rows, executor_))
                     .ok());
    const auto selected = Clock::now();
    if (numbers.top_p < 1) KVASIR_CHECK(pruner->Prune(params, rows, executor_).ok());
    const auto pruned = Clock::now();
    for (const SelectionHeader& header : headers_)
      sum.refreshed += header.reused_stages == 0 ? 1 : 0;
    const auto begin_keep = Clock::now();
    KVASIR_CHECK(keeper.Keep(stages, params, rows, executor_).ok());
    const auto kept = Clock::now();
    AttendTo(selection);
    const auto end = Clock::now();
    sum.times.select += Milliseconds(begin, selected);
    sum.times.prune += Milliseconds(selected, pruned);
    sum.times.contract += Milliseconds(begin_keep, kept);
    sum.times.attend += Milliseconds(kept, end);
    sum.worst = std::max(sum.worst, Milliseconds(begin, end));
    for (int64_t row = 0; row < kKvHeads; ++row) {
      sum.tokens += static_cast<double>(CountTokens(selection, row, tile_.first_position));
      const ContractOutcome outcome = keeper.outcomes()[static_cast<size_t>(row)];
      sum.mended += outcome == ContractOutcome::kDense || outcome == ContractOutcome::kWidened;
    }
  }
  Print(policy, sum, steps, dense_ms);
}

// The policies measured, in the order of the table.
std::vector<Policy> Policies() {
  constexpr PolicyNumbers kQuest = {
      .sink_tokens = 128, .window_tokens = 512, .budget_tokens = 2048};
  constexpr PolicyNumbers kHip = {.sink_tokens = 256, .window_tokens = 1024, .budget_tokens = 2048};
  const auto pruned = [](PolicyNumbers numbers) {
    numbers.top_p = 0.95f;
    return numbers;
  };
  const auto under = [](PolicyNumbers numbers, OnViolation on_violation) {
    numbers.quality = {.min_mass = 0.98f, .on_violation = on_violation};
    return numbers;
  };
  return {
      {"quest", "quest", {}, nullptr, kQuest},
      {"quest, top_p", "quest", {}, nullptr, pruned(kQuest)},
      {"tokenselect", "tokenselect", {}, nullptr, kQuest},
      {"tokenselect, cosine", "tokenselect", {}, "cosine", kQuest},
      {"tokenselect, cosine, top_p", "tokenselect", {}, "cosine", pruned(kQuest)},
      {"hip, interval", "hip", {}, "interval", kQuest},
      {"infinitehip 3k", "infinitehip", {{"preset", "3k"}}, nullptr, kHip},
      {"infinitehip 3k, interval", "infinitehip", {{"preset", "3k"}}, "interval", kHip},
      {"infinitehip 3k-fast, interval", "infinitehip", {{"preset", "3k-fast"}}, "interval", kHip},
      {"infinitehip 3k-flash, interval", "infinitehip", {{"preset", "3k-flash"}}, "interval", kHip},
      {"infinitehip 3k, interval, top_p",
       "infinitehip",
       {{"preset", "3k"}},
       "interval",
       pruned(kHip)},
      {"quest, mass estimated", "quest", {}, nullptr, under(kQuest, OnViolation::kReport)},
      {"tokenselect, cosine, mass estimated",
       "tokenselect",
       {},
       "cosine",
       under(kQuest, OnViolation::kReport)},
      {"infinitehip 3k, interval, mass estimated",
       "infinitehip",
       {{"preset", "3k"}},
       "interval",
       under(kHip, OnViolation::kReport)},
      {"tokenselect, cosine, 0.98 or dense",
       "tokenselect",
       {},
       "cosine",
       under(kQuest, OnViolation::kDense)},
      {"tokenselect, cosine, 0.98 by widening",
       "tokenselect",
       {},
       "cosine",
       under(kQuest, OnViolation::kWiden)},
      {"infinitehip 3k, interval, 0.98 or dense",
       "infinitehip",
       {{"preset", "3k"}},
       "interval",
       under(kHip, OnViolation::kDense)},
      {"infinitehip 3k, interval, 0.98 by widening",
       "infinitehip",
       {{"preset", "3k"}},
       "interval",
       under(kHip, OnViolation::kWiden)},
  };
}

int Main(int argc, char** argv) {
  const int64_t context = argc > 1 ? std::atoll(argv[1]) : 131072;
  const int threads = argc > 2 ? std::atoi(argv[2]) : 2;
  const int64_t cycles = argc > 3 ? std::atoll(argv[3]) : 2;
  KVASIR_CHECK(context % kPageTokens == 0 && context > 8192 && threads > 0 && cycles > 0);
  Bench bench(context, threads);
  const double dense_ms = bench.Dense(31);
  std::printf("%lld tokens, %d threads; dense %.2f ms\n\n", static_cast<long long>(context),
              threads, dense_ms);
  std::printf(
      "| policy | tokens attended to | first stage run | made dense or widened | select, ms | "
      "prune "
      "| contract | attend | all | worst step | times as fast as dense |\n"
      "|---|---|---|---|---|---|---|---|---|---|---|\n");
  for (const Policy& policy : Policies()) bench.Run(policy, cycles, dense_ms);
  std::printf("\ndense again %.2f ms\n", bench.Dense(31));
  return 0;
}

}  // namespace
}  // namespace kvasir::kernels

int main(int argc, char** argv) { return kvasir::kernels::Main(argc, argv); }
