// A request over a stored document whose KV lies on disk, with memory for a tenth of it: time to
// the first token, bytes read until then, tokens a second, and what was read and guessed, beside
// the same request with everything in memory. Two threads. The document's KV is made by a prefill
// that reads sink and window alone, which is quick, and stored. The question has 40 tokens, which a
// policy that is sparse in decoding alone reads one by one. A line for each case:
//
//   CASE  first token s  of the KV read until then %  tokens/s  a step: pages read, waited for;
//   guesses used, late, wasted  same bits
//
//   on_demand_bench MODEL FOLDER TOKENS DEVICE [CASE]   an empty folder on the disk to measure
//   on_demand_bench MODEL FOLDER TOKENS DEVICE dense    the first token after a dense prefill alone
//
// With a CASE, those whose names begin with it. DEVICE is cpu or cuda. On a GPU the device tier has
// room for one layer more. A MODEL without weights is a shape with random ones:
// tests/model/shapes/one-kv-head has the KV of one head of Llama 3.1 8B, in all layers, and one
// query head.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"

#include "kernels/base/status_macros.h"
#include "tests/worker/test_coordinator.h"
#include "tests/worker/test_worker.h"
#include "worker/disk.h"

namespace kvasir::worker {
namespace {

using Clock = std::chrono::steady_clock;
using kernels::kPageTokens;

constexpr int64_t kQuestionTokens = 40;
constexpr int64_t kAnswerTokens = 64;
constexpr int64_t kChunk = 2048;
constexpr uint64_t kRestoredIds = 10'000'000;

struct Arguments {
  std::string model, folder, device;
  int64_t tokens = 0;  // of the document: whole blocks
  std::string only;    // the case; empty: all

  bool dense() const { return only == "dense"; }
};

struct Outcome {
  double first_token_s = 0;
  double tokens_per_s = 0;
  int64_t read_until_then = 0;
  kvstore::KvStoreStats at_first, at_end;
  std::map<std::pair<int64_t, int64_t>, TestWorker::Logits> logits;
};

double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

class Bench {
 public:
  explicit Bench(const Arguments& arguments)
      : arguments_(arguments),
        model_({.folder = arguments.model,
                .dummy_weights = !std::filesystem::exists(arguments.model + "/model.safetensors"),
                .dtype = kernels::DType::kBFloat16,
                .max_model_len = arguments.tokens + 1024,
                .num_threads = 2,
                .device = arguments.device,
                .edit_weights = {}}),
        layout_(model_.transformer().kv_layout(kernels::DType::kBFloat16)) {
    std::mt19937 random(1);
    for (int64_t i = 0; i < arguments.tokens + kQuestionTokens; ++i) {
      prompt_.push_back(static_cast<uint32_t>(3 + random() % 1000));
    }
  }

  int64_t kv_bytes() const { return num_blocks() * layout_.block_bytes(); }

  void Store() {
    const std::unique_ptr<TestWorker> worker =
        Start(MakePolicy("streaming", "streaming"), InMemory());
    TestCoordinator coordinator({.chunk = kChunk, .keep_blocks = true});
    TestRequest request = Request();
    request.max_tokens = 1;
    const size_t r = coordinator.Add(request);
    worker->Run(coordinator);
    v1::StepPlan plan = coordinator.NextPlan();
    for (int64_t i = 0; i < num_blocks(); ++i) {
      v1::BlockPersist& persist = *plan.add_persists();
      persist.set_block_id(coordinator.result(r).blocks[static_cast<size_t>(i)]);
      hashes_.push_back(TestCoordinator::HashOfBlock(persist.block_id()));
      for (int64_t t = 0; t < kPageTokens; ++t) {
        persist.add_tokens(prompt_[static_cast<size_t>(kPageTokens * i + t)]);
      }
    }
    KVASIR_CHECK(worker->engine().Step(plan).ok());
    worker->engine().FlushTier();
    KVASIR_CHECK(worker->engine().store().stats().tier.blocks == num_blocks());
  }

  double DensePrefill() {
    const std::unique_ptr<TestWorker> worker = Start(MakePolicy("all", "quest"), InMemory());
    return Ask(*worker, Request()).first_token_s;
  }

  // Restores the document and asks about it.
  Outcome Resume(const v1::SparsityPolicy& policy, bool on_demand) {
    const std::unique_ptr<TestWorker> worker = Start(policy, on_demand ? OnDemand() : InMemory());
    TestRequest request = Request();
    if (policy.prefill().has_quest()) request.tail_tokens = 1;
    if (policy.decode().has_infinitehip()) request.decode.set_window_tokens(1024);
    if (policy.decode().reuse().rule() == "interval") {
      request.decode.mutable_reuse()->set_interval(8);
    }
    for (int64_t i = 0; i < num_blocks(); ++i) {
      request.cached_blocks.push_back(kRestoredIds + static_cast<uint64_t>(i));
    }
    return Ask(*worker, request);
  }

 private:
  int64_t num_blocks() const { return arguments_.tokens / kPageTokens; }

  EngineOptions InMemory() const {
    EngineOptions options = TestWorker::DefaultOptions();
    options.kv_dtype = kernels::DType::kBFloat16;
    options.max_num_seqs = 1;
    options.weights_hash = std::string(32, 'w');
    options.kv_form = "rotated/bfloat16";
    // Half of the host tier may wait to be written.
    options.kv = {.device = kv_bytes() + kv_bytes() / 4, .host = 3 * kv_bytes()};
    return options;
  }
  EngineOptions OnDemand() const {
    EngineOptions options = InMemory();
    options.on_demand_bytes = kv_bytes() + kv_bytes() / 16;
    options.kv = {.device = kv_bytes() / 50, .host = kv_bytes() / 10};
    if (arguments_.device != "cpu") {
      options.kv.device += options.on_demand_bytes / layout_.num_layers;
    }
    return options;
  }
  std::unique_ptr<TestWorker> Start(const v1::SparsityPolicy& policy, EngineOptions options) {
    options.policies = {policy};
    v1::KvConfig config;
    config.set_kv_disk_path(arguments_.folder);
    config.set_kv_disk_size_gb(60);
    return std::make_unique<TestWorker>(
        model_, options,
        OpenDisk({.config = config, .shard = KvShardOf(options, model_.transformer())}).value());
  }
  TestRequest Request() const {
    return {.prompt = prompt_,
            .max_tokens = kAnswerTokens,
            .prefill = MakeNumbers(64, 1024, 1024),
            .decode = MakeNumbers(64, 256, 1024),
            .tail_tokens = kQuestionTokens,
            .sampling = Greedy(),
            .cached_blocks = {}};
  }

  static int64_t BytesRead(const kvstore::KvStoreStats& stats) {
    return stats.tier.read_bytes + stats.pages.read_bytes;
  }

  void Restore(TestWorker& worker, TestCoordinator& coordinator) {
    v1::StepPlan plan = coordinator.NextPlan();
    for (size_t i = 0; i < hashes_.size(); ++i) {
      v1::BlockRestore& restore = *plan.add_restores();
      restore.set_block_id(kRestoredIds + i);
      restore.set_prefix_hash(hashes_[i]);
    }
    KVASIR_CHECK(worker.engine().Step(plan).ok());
    while (worker.engine().TierIsBusy()) {
      worker.engine().PollTier();
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    const v1::TierReport report = worker.engine().TakeTierReport();
    for (const v1::RestoredBlock& block : report.restored()) {
      KVASIR_CHECK(block.error_code() == 0);
    }
  }

  Outcome Ask(TestWorker& worker, const TestRequest& request) {
    Outcome outcome;
    TestCoordinator coordinator({.chunk = kChunk});
    const Clock::time_point begin = Clock::now();
    if (!request.cached_blocks.empty()) Restore(worker, coordinator);
    const size_t r = coordinator.Add(request);
    Clock::time_point first;
    while (!coordinator.done()) {
      const v1::StepPlan plan = coordinator.NextPlan();
      const auto reply = worker.engine().Step(plan);
      KVASIR_CHECK(reply.ok());
      coordinator.Apply(plan, *reply);
      KVASIR_CHECK(coordinator.result(r).status.ok());
      if (outcome.first_token_s > 0 || coordinator.result(r).tokens.empty()) continue;
      first = Clock::now();
      outcome.first_token_s = SecondsSince(begin);
      outcome.at_first = worker.engine().store().stats();
      outcome.read_until_then = BytesRead(outcome.at_first);
      if (arguments_.dense()) return outcome;
    }
    outcome.tokens_per_s = static_cast<double>(kAnswerTokens - 1) / SecondsSince(first);
    outcome.at_end = worker.engine().store().stats();
    outcome.logits = worker.logits();
    return outcome;
  }

  const Arguments arguments_;
  TestModel model_;
  const kernels::KvLayout layout_;
  std::vector<uint32_t> prompt_;
  std::vector<std::string> hashes_;
};

bool HaveSameBits(const Outcome& a, const Outcome& b) {
  if (a.logits.size() != b.logits.size()) return false;
  for (const auto& [place, logits] : a.logits) {
    const auto other = b.logits.find(place);
    if (other == b.logits.end() ||
        std::memcmp(logits.data(), other->second.data(), logits.size() * sizeof(float)) != 0) {
      return false;
    }
  }
  return true;
}

void Print(const std::string& name, const Outcome& outcome, int64_t kv_bytes, const char* bits) {
  const kvstore::PageCacheStats &begin = outcome.at_first.pages, &end = outcome.at_end.pages;
  const auto a_step = [](int64_t count) {
    return static_cast<double>(count) / static_cast<double>(kAnswerTokens - 1);
  };
  std::printf("%-48s %8.3f %7.2f %8.1f %8.1f %8.1f %8lld %6lld %6lld  %s\n", name.c_str(),
              outcome.first_token_s,
              100.0 * static_cast<double>(outcome.read_until_then) / static_cast<double>(kv_bytes),
              outcome.tokens_per_s, a_step(end.reads - begin.reads),
              a_step(end.waited - begin.waited), static_cast<long long>(end.used_prefetches),
              static_cast<long long>(end.late_prefetches),
              static_cast<long long>(end.wasted_prefetches), bits);
  std::fflush(stdout);
}

void Run(const Arguments& arguments) {
  Bench bench(arguments);
  if (arguments.dense()) {
    std::printf("dense prefill of %lld tokens: first token after %.3f s\n",
                static_cast<long long>(arguments.tokens), bench.DensePrefill());
    return;
  }
  bench.Store();
  std::printf("%-48s %8s %7s %8s %8s %8s %8s %6s %6s  %s\n", "", "first s", "read %", "tokens/s",
              "reads", "waits", "used", "late", "wasted", "same bits");
  const v1::SparsityPolicy every_step = MakePolicy("all", "infinitehip");
  v1::SparsityPolicy by_interval = every_step;
  by_interval.mutable_decode()->mutable_reuse()->set_rule("interval");
  v1::SparsityPolicy quest_by_interval = MakePolicy("all", "quest");
  quest_by_interval.mutable_decode()->mutable_reuse()->set_rule("interval");
  const std::pair<const char*, v1::SparsityPolicy> cases[] = {
      {"quest, the question as a prompt", MakePolicy("quest", "quest")},
      {"quest", MakePolicy("all", "quest")},
      {"quest by interval", quest_by_interval},
      {"infinitehip", every_step},
      {"infinitehip by interval", by_interval}};
  for (const auto& [name, policy] : cases) {
    if (!absl::StartsWith(name, arguments.only)) continue;
    const Outcome in_memory = bench.Resume(policy, /*on_demand=*/false);
    Print(std::string(name) + ", all read first", in_memory, bench.kv_bytes(), "");
    const Outcome on_demand = bench.Resume(policy, /*on_demand=*/true);
    Print(std::string(name) + ", on demand", on_demand, bench.kv_bytes(),
          HaveSameBits(in_memory, on_demand) ? "yes" : "NO");
  }
}

}  // namespace
}  // namespace kvasir::worker

int main(int argc, char** argv) {
  if (argc != 5 && argc != 6) {
    std::fprintf(stderr, "usage: %s MODEL FOLDER TOKENS DEVICE [CASE | dense]\n", argv[0]);
    return 2;
  }
  const int64_t tokens =
      std::atoll(argv[3]) / kvasir::kernels::kPageTokens * kvasir::kernels::kPageTokens;
  kvasir::worker::Run({.model = argv[1],
                       .folder = argv[2],
                       .device = argv[4],
                       .tokens = tokens,
                       .only = argc == 6 ? argv[5] : ""});
  return 0;
}
