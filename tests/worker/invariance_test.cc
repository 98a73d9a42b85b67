// The answer to a request must not depend on how it is served. In float32 every logit has the same
// bits along every way of kWays. In bfloat16, and over several ranks, where sums are taken in
// another order, the best token is the same wherever it exceeds the second by four times the
// largest difference. Ranks may choose differently between two pages or tokens that score the same
// up to rounding, so that difference is small only for `all`. Texts are the reference model's own,
// sampled freely after a document, so that many tokens have a small margin. KVASIR_TEST_SCALE=96
// makes them 3,072 tokens long: then threads share rows.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"

#include "tests/support/iterations.h"
#include "tests/support/scratch_directory.h"
#include "tests/worker/model/golden.h"
#include "tests/worker/rank_group.h"
#include "tests/worker/test_coordinator.h"
#include "tests/worker/test_worker.h"

namespace kvasir::worker {
namespace {

using kernels::DType;
using ::testing::Combine;
using ::testing::Values;
using ::testing::ValuesIn;

constexpr int64_t kPromptTokens = 1500;
constexpr uint32_t kTailTokens = 20;
constexpr char kModel[] = "tests/model/needle-8k";
constexpr char kGolden[] = "tests/model/golden/needle-8k.safetensors";
constexpr uint32_t kAll = 0, kStreaming = 1, kQuest = 2, kTokenSelect = 4, kHip = 5,
                   kInfiniteHip = 6, kPruned = 7, kHipByInterval = 8, kTokenSelectByCosine = 9,
                   kInfiniteHipByBoth = 10, kTokenSelectOfLayer = 11, kInfiniteHipOfLayer = 12,
                   kTerminated = 13, kTerminatedQuest = 14, kKeptDense = 15, kKeptWidened = 16;
constexpr uint32_t kPolicies[] = {kAll,
                                  kStreaming,
                                  kQuest,
                                  kTokenSelect,
                                  kHip,
                                  kInfiniteHip,
                                  kPruned,
                                  kHipByInterval,
                                  kTokenSelectByCosine,
                                  kInfiniteHipByBoth,
                                  kTokenSelectOfLayer,
                                  kInfiniteHipOfLayer,
                                  kTerminated,
                                  kTerminatedQuest,
                                  kKeptDense,
                                  kKeptWidened};

struct Way {
  const char* name;
  int64_t chunk = 128;     // tokens of the prompt in one step
  double device_part = 1;  // of the KV, that the device tier holds
  bool cached = false;     // another request left the document's blocks
  bool disk = false;       // whose blocks were written to disk, dropped and read again
  bool restart = false;    // by another process
  bool preempted = false;  // half of the answer later, and resumed
  int others = 0;          // requests that run at the same time, with policies of their own
  int num_threads = 1;
  int ranks = 1;
  PositionExtension extension = PositionExtension::kNone;
};

constexpr Way kWays[] = {
    {.name = "Chunks512", .chunk = 512},
    {.name = "WholePrompt", .chunk = 4096},
    {.name = "DeviceHolds25Percent", .device_part = 0.25},
    {.name = "DeviceHolds10Percent", .device_part = 0.1},
    {.name = "PrefixCached", .cached = true},
    {.name = "DiskRoundTrip", .cached = true, .disk = true},
    {.name = "Restart", .cached = true, .disk = true, .restart = true},
    {.name = "Preempted", .device_part = 0.25, .preempted = true},
    {.name = "Among16", .others = 15},
    {.name = "TwoThreads", .num_threads = 2},
    {.name = "AllAtOnce",
     .chunk = 512,
     .device_part = 0.25,
     .cached = true,
     .others = 15,
     .num_threads = 2},
};
// Keys are cached un-rotated and attended to at compact positions.
constexpr Way kExtendedWays[] = {
    {.name = "Chunks512", .chunk = 512, .extension = PositionExtension::kStreaming},
    {.name = "DeviceHolds10Percent",
     .device_part = 0.1,
     .extension = PositionExtension::kStreaming},
    {.name = "AllAtOnce",
     .chunk = 512,
     .device_part = 0.25,
     .cached = true,
     .others = 15,
     .num_threads = 2,
     .extension = PositionExtension::kStreaming},
};
// The same at grouped positions, which begin after a neighbourhood of a part of the prompt.
constexpr kernels::GroupedPositions kGrouped = {.group_size = 4, .window = 300};
constexpr Way kGroupedWays[] = {
    {.name = "GroupedChunks512", .chunk = 512, .extension = PositionExtension::kSelfExtend},
    {.name = "GroupedDeviceHolds10Percent",
     .device_part = 0.1,
     .extension = PositionExtension::kSelfExtend},
    {.name = "GroupedAllAtOnce",
     .chunk = 512,
     .device_part = 0.25,
     .cached = true,
     .others = 5,
     .num_threads = 2,
     .extension = PositionExtension::kSelfExtend},
};
constexpr Way kExtendedGroups[] = {
    {.name = "TwoRanks", .ranks = 2, .extension = PositionExtension::kStreaming}};
constexpr Way kGroups[] = {{.name = "TwoRanks", .ranks = 2}, {.name = "FourRanks", .ranks = 4}};

struct Served {
  std::map<int64_t, TestWorker::Logits> logits;  // by the position that they follow
  std::vector<uint32_t> tokens;
  v1::RowAccounting accounting;
  kvstore::KvStoreStats stats;
};

const std::vector<uint32_t>& Text() {
  static const auto* const text = new std::vector(GoldenFile(kGolden).Run(8000).tokens);
  return *text;
}

// Budgets are so small that most of the document is skipped.
TestRequest MakeRequest(int64_t begin, int64_t size, uint32_t policy, int64_t num_tokens) {
  TestRequest request = {.prompt = {Text().begin() + begin, Text().begin() + begin + size},
                         .max_tokens = num_tokens,
                         .policy = policy,
                         .prefill = MakeNumbers(32, 100, 256),
                         .decode = MakeNumbers(16, 70, 128),
                         .tail_tokens = kTailTokens,
                         .sampling = Greedy(),
                         .cached_blocks = {}};
  request.sampling.set_temperature(1);
  request.sampling.set_seed(1);
  SetWhatThePolicyNeeds(request);
  return request;
}

int64_t BlocksOf(const TestRequest& request) {
  return (std::ssize(request.prompt) + request.max_tokens) / kernels::kPageTokens + 1;
}

// Requests beside `request`, of all policies and many lengths, that last as long as it does.
std::vector<TestRequest> Others(const TestRequest& request, int count) {
  std::vector<TestRequest> others;
  for (int i = 0; i < count; ++i) {
    others.push_back(
        MakeRequest(2000 + 97 * i, 30 + 37 * i, static_cast<uint32_t>(i) % 17, request.max_tokens));
  }
  return others;
}

// The same document with another question. The tokens that it reads one by one lie after the
// document.
TestRequest FirstQuestion(const TestRequest& request) {
  TestRequest first = request;
  first.prompt.resize(kPromptTokens - 100);
  first.prompt.insert(first.prompt.end(), 60, 5);
  first.tail_tokens = kTailTokens;
  first.max_tokens = 1;
  return first;
}

// Memory for the KV of `blocks` on each rank, of which the device tier holds a part.
RankGroupOptions GroupOptions(const Way& way, DType dtype, int64_t blocks) {
  RankGroupOptions options = {.model = {.folder = kModel,
                                        .dtype = dtype,
                                        .max_model_len = 8192,
                                        .extension = way.extension,
                                        .grouped = way.extension == PositionExtension::kSelfExtend
                                                       ? kGrouped
                                                       : kernels::GroupedPositions{},
                                        .num_threads = way.num_threads,
                                        .edit_weights = {}},
                              .size = way.ranks};
  const ModelConfig config = LoadModelConfig(kModel).value();
  const kernels::KvLayout layout = {.num_layers = config.num_layers,
                                    .num_kv_heads = config.num_kv_heads / way.ranks,
                                    .head_dim = config.head_dim,
                                    .dtype = dtype};
  const int64_t bytes = blocks * layout.block_bytes();
  if (way.extension == PositionExtension::kSelfExtend) {  // policies that it serves;
    options.engine.policies.resize(kPruned);              // the first keep their indices
  }
  options.engine.kv_dtype = dtype;
  options.engine.kv.device = static_cast<int64_t>(way.device_part * static_cast<double>(bytes));
  options.engine.kv.host = 2 * bytes;
  options.engine.weights_hash = std::string(32, 'w');
  options.engine.kv_form = "rotated";
  return options;
}

// Serves one request through one group of ranks, and where the way says so, through another.
class Journey {
 public:
  Journey(const Way& way, DType dtype, int64_t blocks)
      : way_(way), options_(GroupOptions(way, dtype, blocks)) {
    if (way.disk) options_.disk_path = scratch_.path();
    Start();
  }

  // Serves the request and keeps its full blocks. Adds to the served tokens.
  const TestResult& Run(const TestRequest& request, const std::vector<TestRequest>& others,
                        Served& served) {
    const size_t r = coordinator_->Add(request);  // in slot 0
    for (const TestRequest& other : others) coordinator_->Add(other);
    group_->Run(*coordinator_);
    const TestResult& result = coordinator_->result(r);
    EXPECT_TRUE(result.status.ok()) << result.status;
    served.tokens.insert(served.tokens.end(), result.tokens.begin(), result.tokens.end());
    TestCoordinator::AddAccounting(result.accounting, served.accounting);
    served.stats = group_->worker(0).engine().store().stats();
    for (const auto& [place, logits] : group_->worker(0).logits()) {
      const auto [slot, position] = place;
      if (slot == 0 && position >= std::ssize(request.prompt) - 1) served.logits[position] = logits;
    }
    return result;
  }

  // Returns the blocks of the document that both questions share, once the first was asked.
  std::vector<uint64_t> ReadDocument(const TestRequest& first) {
    Served unused;
    std::vector<uint64_t> blocks = Run(first, {}, unused).blocks;
    blocks.resize((kPromptTokens - 100) / kernels::kPageTokens);
    return way_.disk ? OverDisk(first, blocks) : blocks;
  }

 private:
  void Start() {
    group_.reset();
    group_ = std::make_unique<RankGroup>(options_);
    coordinator_.emplace(TestCoordinator::Options{.chunk = way_.chunk, .keep_blocks = true});
  }

  v1::TierReport StepAndWait(const v1::StepPlan& plan) {
    for (const auto& reply : group_->Step(plan)) EXPECT_TRUE(reply.ok()) << reply.status();
    Engine& engine = group_->worker(0).engine();
    engine.FlushTier();
    while (engine.TierIsBusy()) engine.PollTier();
    return engine.TakeTierReport();
  }

  // Writes the blocks, forgets them, and reads them again under other names.
  std::vector<uint64_t> OverDisk(const TestRequest& first, const std::vector<uint64_t>& blocks) {
    v1::StepPlan persist = coordinator_->NextPlan();
    auto token = first.prompt.begin();
    for (const uint64_t block : blocks) {
      v1::BlockPersist& to = *persist.add_persists();
      to.set_block_id(block);
      to.mutable_tokens()->Add(token, token + kernels::kPageTokens);
      token += kernels::kPageTokens;
    }
    EXPECT_EQ(StepAndWait(persist).stored_size(), std::ssize(blocks));
    v1::StepPlan drop = coordinator_->NextPlan();
    drop.mutable_drop_blocks()->Add(blocks.begin(), blocks.end());
    StepAndWait(drop);
    if (way_.restart) Start();

    constexpr uint64_t kFirstName = 100'000;
    v1::StepPlan restore = coordinator_->NextPlan();
    std::vector<uint64_t> restored;
    for (const uint64_t block : blocks) {
      v1::BlockRestore& from = *restore.add_restores();
      restored.push_back(kFirstName + block);
      from.set_block_id(restored.back());
      from.set_prefix_hash(TestCoordinator::HashOfBlock(block));
    }
    const v1::TierReport report = StepAndWait(restore);
    EXPECT_EQ(report.restored_size(), std::ssize(blocks));
    for (const v1::RestoredBlock& block : report.restored()) {
      EXPECT_EQ(block.error_code(), 0) << block.error_message();
    }
    return restored;
  }

  const Way way_;
  const kvasir::testing::ScratchDirectory scratch_;
  RankGroupOptions options_;
  std::unique_ptr<RankGroup> group_;
  std::optional<TestCoordinator> coordinator_;
};

// The first half of the answer, then the rest by a request that finds the first half's blocks.
void ServeInHalves(const TestRequest& request, Journey& journey, Served& served) {
  TestRequest half = request;
  half.max_tokens = request.max_tokens / 2;
  const TestResult& begun = journey.Run(half, {}, served);
  TestRequest rest = request;
  rest.max_tokens -= half.max_tokens;
  rest.generated = begun.tokens;
  rest.cached_blocks = begun.blocks;
  served.accounting = {};
  journey.Run(rest, {}, served);
}

Served Serve(TestRequest request, const Way& way, DType dtype) {
  const std::vector<TestRequest> others = Others(request, way.others);
  const TestRequest first = FirstQuestion(request);
  int64_t blocks = BlocksOf(request) + (way.cached ? BlocksOf(first) : 0);
  for (const TestRequest& other : others) blocks += BlocksOf(other);

  Journey journey(way, dtype, blocks);
  if (way.cached) request.cached_blocks = journey.ReadDocument(first);
  Served served;
  if (way.preempted) {
    ServeInHalves(request, journey, served);
  } else {
    journey.Run(request, others, served);
  }
  return served;
}

// Checks that the way was followed, and the policy too.
void CheckPremises(const Way& way, uint32_t policy, const Served& served) {
  const v1::RowAccounting& a = served.accounting;
  const v1::PhaseAccounting pages = BothPhases(a);
  EXPECT_EQ(pages.skipped_selected_out() + pages.skipped_window() > 0,
            policy != kAll && policy != kTerminated);
  EXPECT_EQ(pages.skipped_terminated() > 0, policy == kTerminated || policy == kTerminatedQuest);
  EXPECT_EQ(pages.skipped_pruned() > 0, policy == kPruned);
  const bool reuses =
      (policy >= kHipByInterval && policy <= kInfiniteHipOfLayer) || policy == kKeptWidened;
  EXPECT_EQ(a.contract().dense() > 0, policy == kKeptDense);
  EXPECT_EQ(a.contract().widened() > 0, policy == kKeptWidened);
  ASSERT_EQ(a.stages_run_size() > 0, reuses);
  if (reuses) {
    EXPECT_GT(a.stages_run(0), 0u);
    EXPECT_GT(a.stages_reused(0), 0u);
  }
  EXPECT_EQ(a.cached_device_tokens() + a.cached_host_tokens() > 0,
            (way.cached && !way.disk) || way.preempted);
  EXPECT_EQ(a.cached_disk_tokens() > 0, way.disk);
  EXPECT_EQ(served.stats.tier.read_blocks > 0, way.disk);
  EXPECT_EQ(served.stats.evictions > 0, way.device_part < 1);
  // Sink and window, the only pages that streaming reads, stay in the device tier.
  if (policy == kStreaming) return;
  // Blocks from disk lie in the host tier until they are read there.
  const bool misses = way.device_part < 1 || way.disk;
  EXPECT_EQ(served.stats.device_misses > 0, misses);
  EXPECT_EQ(pages.page_misses() > 0, misses);
  // Dense attention needs every page in every step, so none gives way to another.
  // infinitehip, in blocks of 16 tokens, and both heads of tokenselect of layer scope read other
  // tokens of a page after each selection: hardly ever a page's worth.
  if (policy == kAll || policy == kInfiniteHip || policy == kInfiniteHipByBoth ||
      policy == kTokenSelectOfLayer || policy == kInfiniteHipOfLayer)
    return;
  if (policy == kKeptDense || policy == kKeptWidened) return;  // rows made dense need them too
  EXPECT_EQ(served.stats.promotions > 0, misses);
}

// Bit by bit: -0 is not 0, and NaN equals itself.
void ExpectSameBits(const Served& expected, const Served& actual) {
  EXPECT_EQ(expected.tokens, actual.tokens);
  ASSERT_EQ(expected.logits.size(), actual.logits.size());
  for (const auto& [position, logits] : expected.logits) {
    ASSERT_TRUE(actual.logits.contains(position)) << "no logits at position " << position;
    ASSERT_EQ(std::memcmp(logits.data(), actual.logits.at(position).data(),
                          logits.size() * sizeof(float)),
              0)
        << "position " << position;
  }
}

// Two computations of the same text, position by position.
class Comparison {
 public:
  void Add(const TestWorker::Logits& expected, const TestWorker::Logits& actual) {
    difference_.Add(expected, actual);
    choices_.push_back({TopTwoMargin(expected), ArgMax(expected) == ArgMax(actual)});
  }

  // At least nine tenths of `num_tokens` must have been compared. `tolerance` is a share of the
  // largest logit.
  void Check(int64_t num_tokens, float tolerance) const {
    int64_t clear = 0;
    for (const Choice& choice : choices_) {
      if (choice.margin <= 4 * difference_.largest) continue;
      ++clear;
      EXPECT_TRUE(choice.is_same) << "though the margin is " << choice.margin;
    }
    std::cout << "largest difference " << difference_.largest << ", largest logit "
              << difference_.scale << "; of " << num_tokens << " tokens " << choices_.size()
              << " compared, " << clear << " of them clear" << std::endl;
    EXPECT_LE(difference_.largest, tolerance * difference_.scale);
    EXPECT_GE(std::ssize(choices_) * 10, num_tokens * 9);
  }

 private:
  struct Choice {
    float margin;
    bool is_same;
  };
  LogitsDifference difference_;
  std::vector<Choice> choices_;
};

// Compares the text of `expected`, a few tokens at a time: where sampling drew another token, the
// rest of the piece is not comparable.
Comparison CompareByPieces(const TestRequest& request, const Served& expected,
                           const std::function<Served(const TestRequest&)>& serve) {
  const int64_t piece = std::max<int64_t>(32, request.max_tokens / 16);
  Comparison comparison;
  for (int64_t begin = 0; begin < request.max_tokens; begin += piece) {
    TestRequest part = request;
    part.prompt.insert(part.prompt.end(), expected.tokens.begin(), expected.tokens.begin() + begin);
    part.max_tokens = std::min(piece, request.max_tokens - begin);
    // Generated tokens are read again as they were first: one by one.
    part.tail_tokens += static_cast<uint32_t>(begin);
    const Served served = serve(part);
    for (int64_t i = 0; i < part.max_tokens; ++i) {
      const int64_t position = std::ssize(part.prompt) + i - 1;
      comparison.Add(expected.logits.at(position), served.logits.at(position));
      if (served.tokens[static_cast<size_t>(i)] != expected.tokens[static_cast<size_t>(begin + i)])
        break;
    }
  }
  return comparison;
}

std::string NameOf(const ::testing::TestParamInfo<std::tuple<uint32_t, Way>>& test) {
  const auto& [policy, way] = test.param;
  // Names of the policies of DefaultOptions.
  constexpr const char* kNames[] = {"All",
                                    "Streaming",
                                    "Quest",
                                    "",
                                    "TokenSelect",
                                    "Hip",
                                    "InfiniteHip",
                                    "Pruned",
                                    "HipByInterval",
                                    "TokenSelectByCosine",
                                    "InfiniteHipByBoth",
                                    "TokenSelectOfLayer",
                                    "InfiniteHipOfLayer",
                                    "Terminated",
                                    "TerminatedQuest",
                                    "KeptDense",
                                    "KeptWidened"};
  return std::string(kNames[policy]) + way.name;
}

// The policy's request, served alone.
const Served& Alone(const TestRequest& request, DType dtype, PositionExtension extension) {
  static auto* const all = new std::map<std::tuple<uint32_t, DType, PositionExtension>, Served>();
  Served& served = (*all)[{request.policy, dtype, extension}];
  if (!served.tokens.empty()) return served;
  const Way alone = {.name = "Alone", .extension = extension};
  served = Serve(request, alone, dtype);
  CheckPremises(alone, request.policy, served);
  // Includes text with small margins, not only answers.
  const int64_t close = std::count_if(served.logits.begin(), served.logits.end(),
                                      [](const auto& l) { return TopTwoMargin(l.second) < 1; });
  EXPECT_GT(close * 10, request.max_tokens);
  return served;
}

class InvarianceTest : public ::testing::TestWithParam<std::tuple<uint32_t, Way>> {
 protected:
  uint32_t policy() const { return std::get<0>(GetParam()); }
  const Way& way() const { return std::get<1>(GetParam()); }
  TestRequest request() const {
    return MakeRequest(0, kPromptTokens, policy(), testing::Iterations(32));
  }
  Served ServeThisWay(const TestRequest& request, DType dtype) const {
    Served served = Serve(request, way(), dtype);
    CheckPremises(way(), policy(), served);
    return served;
  }
  void ExpectSameClearChoices(DType dtype, float tolerance) const {
    const auto serve = [&](const TestRequest& part) { return ServeThisWay(part, dtype); };
    CompareByPieces(request(), Alone(request(), dtype, way().extension), serve)
        .Check(request().max_tokens, tolerance);
  }
};

class Float32Test : public InvarianceTest {};
TEST_P(Float32Test, LogitsHaveTheSameBits) {
  const Served& alone = Alone(request(), DType::kFloat32, way().extension);
  ExpectSameBits(alone, ServeThisWay(request(), DType::kFloat32));
}
INSTANTIATE_TEST_SUITE_P(Ways, Float32Test, Combine(ValuesIn(kPolicies), ValuesIn(kWays)), NameOf);

INSTANTIATE_TEST_SUITE_P(ExtendedWays, Float32Test,
                         Combine(ValuesIn(kPolicies), ValuesIn(kExtendedWays)), NameOf);

INSTANTIATE_TEST_SUITE_P(GroupedWays, Float32Test,
                         Combine(Values(kAll, kStreaming, kQuest, kHip, kInfiniteHip),
                                 ValuesIn(kGroupedWays)),
                         NameOf);

TEST(PositionExtensionTest, GroupsChangeEveryAnswerBehindTheirNeighbourhood) {
  for (const uint32_t policy : {kAll, kHip}) {
    const TestRequest request = MakeRequest(0, kPromptTokens, policy, testing::Iterations(32));
    EXPECT_NE(Alone(request, DType::kFloat32, PositionExtension::kNone).logits,
              Alone(request, DType::kFloat32, PositionExtension::kSelfExtend).logits);
  }
  TestRequest within = MakeRequest(0, kGrouped.window - 40, kAll, 32);
  ExpectSameBits(Serve(within, {.name = "Alone"}, DType::kFloat32),
                 Serve(within, {.name = "Alone", .extension = PositionExtension::kSelfExtend},
                       DType::kFloat32));
}

TEST(PositionExtensionTest, ChangesWhatSparsePoliciesAnswerOnly) {
  for (const uint32_t policy : {kAll, kQuest}) {
    const TestRequest request = MakeRequest(0, kPromptTokens, policy, testing::Iterations(32));
    const Served& native = Alone(request, DType::kFloat32, PositionExtension::kNone);
    const Served& extended = Alone(request, DType::kFloat32, PositionExtension::kStreaming);
    if (policy == kAll) {
      ExpectSameBits(native, extended);  // within the trained window positions are the same
    } else {
      EXPECT_NE(native.logits, extended.logits);
    }
  }
}

class BFloat16Test : public InvarianceTest {};
TEST_P(BFloat16Test, ClearChoicesAreTheSame) { ExpectSameClearChoices(DType::kBFloat16, 2e-2f); }
INSTANTIATE_TEST_SUITE_P(Ways, BFloat16Test, Combine(Values(kQuest), ValuesIn(kWays)), NameOf);

class RanksTest : public InvarianceTest {};
TEST_P(RanksTest, ClearChoicesAreTheSame) {
  ExpectSameClearChoices(DType::kFloat32, policy() == kAll ? 1e-4f : 2e-2f);
}
INSTANTIATE_TEST_SUITE_P(Ways, RanksTest,
                         Combine(Values(kAll, kQuest, kTokenSelect), ValuesIn(kGroups)), NameOf);
INSTANTIATE_TEST_SUITE_P(ExtendedWays, RanksTest,
                         Combine(Values(kQuest, kTokenSelect, kInfiniteHip, kPruned),
                                 ValuesIn(kExtendedGroups)),
                         NameOf);

}  // namespace
}  // namespace kvasir::worker
