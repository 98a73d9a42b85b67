// Speed of reading a prompt with the worker's engine: one process, no coordinator, a model that is
// only a shape (random weights). Chunks follow one another as the service sends them: full blocks
// are sealed after the reply to their step, and where the engine allows a plan begins before the
// reply to the plan before it. Prints a row for each length and chunk size:
//
//   prefill_step_bench [--model=FOLDER] [--tokens=8192,32768] [--rounds=3]
//                      [--chunks=512,2048,8192] [--policy=all] [--kernels]
//                      [--kv-cache-dtype=bfloat16] [--position-extension=none]
//
//   first    time of the first round: kernels are loaded, buffers grow
//   wall     time from the first plan to the last reply: median of the other rounds
//   begin    its part in Engine::Begin: the host's own work and waits
//   finish   its part in Engine::Finish: waiting for the device, and the reply
//   busy     time in which a kernel ran, in one more round that is recorded (device_trace.h)
//   waits    time between the first kernel and the last in which none ran, in that round
//
// --kernels adds the longest kernels and waits of the recorded round.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "proto/selector_field.h"
#include "tests/bench/device_trace.h"
#include "tests/bench/kv_dtype.h"
#include "worker/engine/engine.h"
#include "worker/loaded_model.h"
#include "worker/make_backend.h"
#include "worker/parallel/single_collective.h"
#include "worker/thread_pool.h"

namespace kvasir::worker {
namespace {

using kernels::DType;
using kernels::kPageTokens;
using Clock = std::chrono::steady_clock;

constexpr uint64_t kEpoch = 1;
// Pause between rounds, so that a trace shows where one ends.
constexpr auto kPause = std::chrono::milliseconds(60);

void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "prefill_step_bench: %s\n", status.ToString().c_str());
  std::exit(1);
}
template <typename T>
T Value(absl::StatusOr<T> value) {
  Check(value.status());
  return std::move(value).value();
}

struct Flags {
  std::string model = "tests/model/shapes/llama-3.1-8b";
  std::vector<int64_t> tokens = {8192, 32768};
  std::vector<int64_t> chunks = {512, 2048, 8192};
  int64_t rounds = 3;
  std::string policy = "all";
  DType kv_cache_dtype = DType::kBFloat16;
  std::string position_extension = "none";
  bool kernels = false;
};

std::vector<int64_t> Numbers(const std::string& text) {
  std::vector<int64_t> numbers;
  for (const absl::string_view part : absl::StrSplit(text, ',')) {
    int64_t number = 0;
    if (!absl::SimpleAtoi(part, &number) || number < 1) {
      Check(absl::InvalidArgumentError(absl::StrCat("'", part, "' is not a positive number")));
    }
    numbers.push_back(number);
  }
  return numbers;
}

Flags ParseFlags(int argc, char** argv) {
  Flags flags;
  for (int i = 1; i < argc; ++i) {
    const std::pair<std::string, std::string> flag =
        absl::StrSplit(argv[i], absl::MaxSplits('=', 1));
    const auto& [name, value] = flag;
    if (name == "--model")
      flags.model = value;
    else if (name == "--tokens")
      flags.tokens = Numbers(value);
    else if (name == "--chunks")
      flags.chunks = Numbers(value);
    else if (name == "--rounds")
      flags.rounds = Numbers(value).front() + 1;
    else if (name == "--policy")
      flags.policy = value;
    else if (name == "--kv-cache-dtype")
      flags.kv_cache_dtype = Value(kernels::ParseKvDType(value));
    else if (name == "--position-extension")
      flags.position_extension = value;
    else if (name == "--kernels")
      flags.kernels = true;
    else
      Check(absl::InvalidArgumentError(absl::StrCat("what is ", argv[i], "?")));
  }
  return flags;
}

// Returns the server's policy; the same message has the numbers of a sequence.
v1::SparsityPolicy MakePolicy(const std::string& selector) {
  v1::SparsityPolicy policy;
  for (v1::AttentionPolicy* phase : {policy.mutable_prefill(), policy.mutable_decode()}) {
    v1::SetSelector(selector, *phase);
    phase->set_sink_tokens(128);
    phase->set_window_tokens(1024);
    phase->set_token_budget(2048);
  }
  return policy;
}

double Milliseconds(Clock::duration time) {
  return std::chrono::duration<double, std::milli>(time).count();
}

struct Round {
  double wall_ms = 0;
  double begin_ms = 0;
  double finish_ms = 0;
};

class Bench {
 public:
  explicit Bench(const Flags& flags);
  void Run();

 private:
  // Reads a prompt and lets it leave. Records what the device does if `work` is not null.
  Round Read(int64_t tokens, int64_t chunk, tests::DeviceWork* work = nullptr);
  v1::StepPlan MakeChunk(int64_t tokens, int64_t begin, int64_t end);
  void AddSeals(v1::StepPlan& plan);
  // Gives back the sequence's slot and blocks.
  void Leave();
  v1::StepPlan NewPlan() {
    v1::StepPlan plan;
    plan.set_group_epoch(kEpoch);
    plan.set_step(++step_);
    return plan;
  }
  void Begin(const v1::StepPlan& plan, Round& round);
  void Finish(Round& round);

  const Flags flags_;
  ThreadPool executor_;
  std::unique_ptr<Backend> backend_;
  LoadedModel model_;
  SingleCollective collective_;
  std::unique_ptr<Engine> engine_;
  uint64_t step_ = 0;
  uint64_t next_sequence_ = 1;
  uint64_t next_block_ = 1;
  uint64_t unsealed_ = 1;  // the first block that is not sealed
  uint64_t held_ = 1;      // the first block that is not dropped
  // For each step in flight, the first block after its own.
  std::deque<uint64_t> under_way_;
  uint64_t answered_ = 1;  // the same for the last step that has a reply
};

LoadedModel Load(const Flags& flags, Backend& backend) {
  LoadModelOptions options;
  options.num_ranks = 1;
  options.model.set_model(flags.model);
  options.model.set_load_format("dummy");
  options.model.set_dtype("bfloat16");
  options.model.set_position_extension(flags.position_extension);
  const int64_t longest = *std::max_element(flags.tokens.begin(), flags.tokens.end());
  options.model.set_max_model_len(static_cast<uint32_t>(longest + 4096));
  options.model.set_allow_long_max_model_len(true);
  options.progress = [](absl::string_view, double) {};
  return Value(LoadModel(options, backend));
}

Bench::Bench(const Flags& flags)
    : flags_(flags),
      executor_(8),
      backend_(Value(MakeBackend("cuda", executor_))),
      model_(Load(flags, *backend_)) {
  EngineOptions options = {
      .group_epoch = kEpoch,
      .max_num_seqs = 4,
      .max_num_batched_tokens = *std::max_element(flags.chunks.begin(), flags.chunks.end()),
      .kv_dtype = flags.kv_cache_dtype,
      .policies = {MakePolicy(flags.policy)}};
  const kernels::KvLayout layout = model_.transformer->kv_layout(options.kv_dtype);
  const int64_t blocks =
      *std::max_element(flags.tokens.begin(), flags.tokens.end()) / kPageTokens + 64;
  options.kv.device = blocks * layout.block_bytes();
  // Extents of the host tier have bounds, codes and checksums besides the pages.
  options.kv.host =
      blocks * (layout.block_bytes() + layout.block_bounds_bytes() +
                layout.block_key_codes_bytes() + 16 * layout.pages_per_block() + 8192);
  engine_ = Value(Engine::Create(options, *model_.transformer, collective_));
}

void Bench::Begin(const v1::StepPlan& plan, Round& round) {
  const auto began = Clock::now();
  Check(engine_->Begin(plan));
  round.begin_ms += Milliseconds(Clock::now() - began);
  under_way_.push_back(next_block_);
}

void Bench::Finish(Round& round) {
  const auto began = Clock::now();
  const v1::StepReply reply = Value(engine_->Finish());
  round.finish_ms += Milliseconds(Clock::now() - began);
  answered_ = under_way_.front();
  under_way_.pop_front();
  for (const v1::RowResult& row : reply.results()) {
    if (row.error_code() != 0) Check(absl::InternalError(row.error_message()));
  }
}

// A block is sealed after the reply to its step.
void Bench::AddSeals(v1::StepPlan& plan) {
  for (; unsealed_ < answered_; ++unsealed_) {
    v1::BlockSeal& seal = *plan.add_seals();
    seal.set_block_id(unsealed_);
    std::string hash(32, '\0');
    std::memcpy(hash.data(), &unsealed_, sizeof(unsealed_));
    seal.set_prefix_hash(hash);
  }
}

v1::StepPlan Bench::MakeChunk(int64_t tokens, int64_t begin, int64_t end) {
  v1::StepPlan plan = NewPlan();
  AddSeals(plan);
  if (begin == 0) {
    v1::SequenceStart& start = *plan.add_starts();
    start.set_sequence_id(next_sequence_++);
    for (int64_t i = 0; i < tokens; ++i) start.add_tokens(static_cast<uint32_t>(i % 1000 + 1));
    start.set_num_prompt_tokens(static_cast<uint32_t>(tokens));
    start.mutable_sampling()->set_top_p(1);
    start.mutable_sampling()->set_repetition_penalty(1);
    const v1::SparsityPolicy numbers = MakePolicy(flags_.policy);
    *start.mutable_prefill() = numbers.prefill();
    *start.mutable_decode() = numbers.decode();
    start.set_tail_tokens(static_cast<uint32_t>(kPageTokens));
  }
  v1::StepRow& row = *plan.add_rows();
  row.set_begin(static_cast<uint32_t>(begin));
  row.set_num_tokens(static_cast<uint32_t>(end - begin));
  row.set_sample(end == tokens);
  for (int64_t block = begin / kPageTokens; block * kPageTokens < end; ++block) {
    row.add_new_blocks(next_block_++);
  }
  return plan;
}

Round Bench::Read(int64_t tokens, int64_t chunk, tests::DeviceWork* work) {
  Round round;
  if (work != nullptr) tests::BeginDeviceTrace();
  const auto began = Clock::now();
  for (int64_t begin = 0; begin < tokens; begin += chunk) {
    const v1::StepPlan plan = MakeChunk(tokens, begin, std::min(begin + chunk, tokens));
    while (!engine_->MayBegin(plan)) Finish(round);
    Begin(plan, round);
  }
  while (!under_way_.empty()) Finish(round);
  round.wall_ms = Milliseconds(Clock::now() - began);
  if (work != nullptr) *work = tests::EndDeviceTrace();
  Leave();
  std::this_thread::sleep_for(kPause);
  return round;
}

void Bench::Leave() {
  Round unmeasured;
  v1::StepPlan seals = NewPlan();
  AddSeals(seals);
  Begin(seals, unmeasured);
  Finish(unmeasured);
  v1::StepPlan leave = NewPlan();
  leave.add_free_slots(0);
  for (; held_ < next_block_; ++held_) leave.add_drop_blocks(held_);
  Begin(leave, unmeasured);
  Finish(unmeasured);
}

void Bench::Run() {
  std::printf("%s on %s, policy %s, KV %s, position extension %s\n\n", flags_.model.c_str(),
              backend_->name().c_str(), flags_.policy.c_str(),
              std::string(DTypeName(flags_.kv_cache_dtype)).c_str(),
              flags_.position_extension.c_str());
  std::printf(
      "| prefill | tokens | chunk | first, ms | wall, ms | begin | finish | busy | waits |\n"
      "|---|---|---|---|---|---|---|---|---|\n");
  for (const int64_t tokens : flags_.tokens) {
    for (const int64_t chunk : flags_.chunks) {
      const double first = Read(tokens, chunk).wall_ms;
      std::vector<Round> rounds;
      for (int64_t i = 1; i < flags_.rounds; ++i) rounds.push_back(Read(tokens, chunk));
      std::sort(rounds.begin(), rounds.end(),
                [](const Round& a, const Round& b) { return a.wall_ms < b.wall_ms; });
      const Round& median = rounds[rounds.size() / 2];
      tests::DeviceWork work;
      Read(tokens, chunk, &work);
      std::printf("| prefill | %lld | %lld | %.1f | %.1f | %.1f | %.1f | %.1f | %.1f |\n",
                  static_cast<long long>(tokens), static_cast<long long>(chunk), first,
                  median.wall_ms, median.begin_ms, median.finish_ms, work.busy_ms,
                  work.ms - work.busy_ms);
      if (flags_.kernels) tests::PrintDeviceWork(work);
      std::fflush(stdout);
    }
  }
}

}  // namespace
}  // namespace kvasir::worker

int main(int argc, char** argv) {
  using namespace kvasir::worker;
  Bench(ParseFlags(argc, argv)).Run();
  return 0;
}
