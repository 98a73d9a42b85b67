// Every sparse method and every pair of them as the engine serves it: each selector alone, with
// each pruner, reuse rule and terminator, and with a pruner and a terminator, found in the list of
// methods (kernels/sparse/methods.h). All of them are policies of one server, for prompts and for
// answers. They are served alone, at once, with a device tier of 10 %, on cached prefixes, at
// compact positions and by two ranks. tests/kernels/sparse/conformance_test.cc has the properties
// of selections.
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

#include "tests/support/sparse_methods.h"
#include "tests/worker/random_model.h"
#include "tests/worker/rank_group.h"
#include "tests/worker/test_coordinator.h"
#include "tests/worker/test_worker.h"

namespace kvasir::worker {
namespace {

using kernels::AllSparseMethods;
using kernels::SparseMethod;

constexpr uint32_t kPromptTokens = 720;
constexpr int64_t kAnswerTokens = 8;
constexpr int64_t kCachedBlocks = 10;
// As the number of a stage: it lets everything through.
constexpr uint32_t kEveryStep = 1, kNeverPatient = 1 << 20;
constexpr float kNothingIsAlike = 1, kAllMass = 1;

v1::SparsityPolicy PolicyOf(const SparseMethod& method) {
  v1::SparsityPolicy policy = MakePolicy(method.selector, method.selector);
  if (!method.terminator.empty()) {
    *policy.mutable_decode() = MakeTerminatingPolicy(method.selector, "recency").decode();
  }
  if (method.selector == "infinitehip") {  // chunks that fit the prompt
    policy.mutable_prefill()->mutable_infinitehip()->set_preset("5k");
    policy.mutable_decode()->mutable_infinitehip()->set_preset("5k");
  }
  if (!method.pruner.empty()) policy.mutable_decode()->set_top_p(1);
  policy.mutable_decode()->mutable_reuse()->set_rule(method.rule);
  return policy;
}

// A request under a method. `off` names a stage that is present and lets everything through.
// `whole`: sink, window and budget cover all there is.
struct Case {
  SparseMethod method;
  std::string off = "";
  bool whole = false;

  std::string Name() const {
    return method.Name() + (off.empty() ? "" : ", " + off + " off") + (whole ? ", whole" : "");
  }
};

// Returns the method without the stage that is off.
Case Without(const Case& c) {
  Case without = {c.method};
  for (std::string SparseMethod::*stage :
       {&SparseMethod::pruner, &SparseMethod::rule, &SparseMethod::terminator}) {
    if (without.method.*stage == c.off) (without.method.*stage).clear();
  }
  return without;
}

const std::vector<Case>& Cases() {
  static const auto* const cases = [] {
    auto* all = new std::vector<Case>();
    for (const SparseMethod& method : AllSparseMethods()) {
      all->push_back({method});
      for (const std::string& stage : {method.pruner, method.rule, method.terminator}) {
        if (!stage.empty()) all->push_back({.method = method, .off = stage});
      }
      all->push_back({.method = method, .whole = true});
    }
    return all;
  }();
  return *cases;
}

v1::AttentionPolicy DecodeNumbers(const Case& c) {
  // So few single tokens that pages stay without any, and so many pages that rows may end among
  // them.
  const bool small_blocks = c.method.selector == "tokenselect" || c.method.selector == "hip";
  v1::AttentionPolicy numbers = c.whole ? MakeNumbers(16, kPromptTokens, kPromptTokens)
                                        : MakeNumbers(16, 130, small_blocks ? 24 : 384);
  v1::SetSelector(c.method.selector, numbers);
  if (!c.method.pruner.empty()) {
    numbers.set_top_p(c.off == c.method.pruner ? kAllMass : 0.8f);
  }
  if (!c.method.rule.empty()) {
    const bool off = c.off == c.method.rule;
    v1::ReusePolicy& reuse = *numbers.mutable_reuse();
    reuse.set_interval(off ? kEveryStep : 3);
    reuse.set_theta(off ? kNothingIsAlike : 0.05f);  // queries are sometimes alike
    reuse.set_theta_force(off ? kNothingIsAlike : -0.1f);
    reuse.set_max_age(20);
  }
  if (!c.method.terminator.empty()) {
    numbers.set_patience(c.off == c.method.terminator ? kNeverPatient : 1);
  }
  return numbers;
}

TestRequest RequestOf(const Case& c) {
  static const auto* const methods = new std::vector<SparseMethod>(AllSparseMethods());
  const auto found =
      std::find_if(methods->begin(), methods->end(),
                   [&](const SparseMethod& method) { return method.Name() == c.method.Name(); });
  std::vector<uint32_t> prompt(kPromptTokens);
  for (uint32_t i = 0; i < kPromptTokens; ++i) prompt[i] = (i * i + i / 7) % 101;
  return {.prompt = std::move(prompt),
          .max_tokens = kAnswerTokens,
          .policy = static_cast<uint32_t>(found - methods->begin()),
          .prefill =
              c.whole ? MakeNumbers(32, kPromptTokens, kPromptTokens) : MakeNumbers(32, 130, 192),
          .decode = DecodeNumbers(c),
          .tail_tokens = 20,
          .sampling = Greedy(),
          .cached_blocks = {}};
}

enum class Way { kAlone, kAtOnce, kTenPercent, kCached, kExtended, kTwoRanks };

struct Served {
  std::map<int64_t, TestWorker::Logits> logits;  // by the position that they follow
  TestResult result;
};

// A group of ranks that serves all cases along one way.
class Server {
 public:
  explicit Server(Way way)
      : way_(way),
        group_(Options(way)),
        coordinator_({.num_slots = std::ssize(Cases()),
                      .chunk = way == Way::kAtOnce ? 512 : 128,
                      // Blocks that are not full stay in the device tier: few at a time.
                      .max_tokens = way == Way::kTenPercent ? 1024 : 4096,
                      .keep_blocks = way == Way::kCached}) {}

  std::map<std::string, Served> Serve() {
    std::map<std::string, Served> served;
    if (way_ == Way::kAlone) {
      for (const Case& c : Cases()) ServeTogether({c}, served);
    } else {
      ServeTogether(Cases(), served);
    }
    return served;
  }

 private:
  static RankGroupOptions Options(Way way) {
    static const auto* const model = new RandomModel();
    RankGroupOptions options = {
        .model = {.folder = model->folder(),
                  .extension = way == Way::kExtended ? PositionExtension::kStreaming
                                                     : PositionExtension::kNone,
                  .edit_weights = {}},
        .size = way == Way::kTwoRanks ? 2 : 1};
    const ModelConfig config = RandomModelShape();
    const kernels::KvLayout layout = {.num_layers = config.num_layers,
                                      .num_kv_heads = config.num_kv_heads / options.size,
                                      .head_dim = config.head_dim,
                                      .dtype = kernels::DType::kFloat32};
    const int64_t requests = way == Way::kAlone ? 1 : std::ssize(Cases());
    const int64_t blocks = (kPromptTokens + kAnswerTokens) / kernels::kPageTokens + 1;
    const int64_t bytes =
        requests * (blocks + (way == Way::kCached ? blocks : 0)) * layout.block_bytes();
    options.engine.max_num_seqs = std::ssize(Cases());
    options.engine.kv.device = way == Way::kTenPercent ? bytes / 10 : bytes;
    options.engine.kv.host = 2 * bytes;
    options.engine.policies.clear();
    for (const SparseMethod& method : AllSparseMethods())
      options.engine.policies.push_back(PolicyOf(method));
    return options;
  }

  // A request that shares the document and asks something else.
  static TestRequest FirstQuestion(TestRequest request) {
    request.prompt.resize(kCachedBlocks * kernels::kPageTokens);
    request.prompt.insert(request.prompt.end(), 60, 5);
    request.max_tokens = 1;
    return request;
  }

  void ServeTogether(const std::vector<Case>& cases, std::map<std::string, Served>& served) {
    std::vector<TestRequest> requests;
    for (const Case& c : cases) requests.push_back(RequestOf(c));
    if (way_ == Way::kCached) {
      for (const TestRequest& request : requests) coordinator_.Add(FirstQuestion(request));
      group_.Run(coordinator_);
      for (size_t i = 0; i < requests.size(); ++i) {
        const std::vector<uint64_t>& blocks = coordinator_.result(i).blocks;
        requests[i].cached_blocks.assign(blocks.begin(), blocks.begin() + kCachedBlocks);
      }
    }
    std::vector<size_t> results;
    for (const TestRequest& request : requests) results.push_back(coordinator_.Add(request));
    group_.Run(coordinator_);
    for (size_t i = 0; i < cases.size(); ++i) {
      Served& one = served[cases[i].Name()];
      one.result = coordinator_.result(results[i]);
      for (const auto& [place, logits] : group_.worker(0).logits()) {
        const auto [slot, position] = place;
        if (slot == static_cast<int64_t>(i) && position >= kPromptTokens - 1) {
          one.logits[position] = logits;
        }
      }
    }
  }

  const Way way_;
  RankGroup group_;
  TestCoordinator coordinator_;
};

const Served& ServedBy(Way way, const Case& c) {
  static auto* const all = new std::map<Way, std::map<std::string, Served>>();
  auto found = all->find(way);
  if (found == all->end()) found = all->emplace(way, Server(way).Serve()).first;
  return found->second.at(c.Name());
}

// Bit by bit: -0 is not 0, and NaN equals itself.
bool SameBits(const Served& a, const Served& b) {
  if (a.logits.size() != b.logits.size()) return false;
  for (const auto& [position, logits] : a.logits) {
    const auto other = b.logits.find(position);
    if (other == b.logits.end()) return false;
    if (std::memcmp(logits.data(), other->second.data(), logits.size() * sizeof(float)) != 0) {
      return false;
    }
  }
  return a.result.tokens == b.result.tokens;
}

class ConformanceTest : public testing::TestWithParam<std::pair<const char*, Way>> {
 protected:
  Way way() const { return GetParam().second; }
};
constexpr std::pair<const char*, Way> kWays[] = {
    {"Alone", Way::kAlone},   {"AtOnce", Way::kAtOnce},     {"TenPercent", Way::kTenPercent},
    {"Cached", Way::kCached}, {"Extended", Way::kExtended}, {"TwoRanks", Way::kTwoRanks}};
INSTANTIATE_TEST_SUITE_P(Ways, ConformanceTest, testing::ValuesIn(kWays),
                         [](const auto& test) { return test.param.first; });

// Checks that the way was followed, and that every stage had something to do.
TEST_P(ConformanceTest, EveryStageOfEveryCaseIsAtWork) {
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.Name());
    const Served& served = ServedBy(way(), c);
    ASSERT_TRUE(served.result.status.ok()) << served.result.status;
    ASSERT_EQ(std::ssize(served.logits), kAnswerTokens);
    const v1::RowAccounting& a = served.result.accounting;
    const v1::PhaseAccounting pages = BothPhases(a);
    const bool sparse = !c.whole;
    EXPECT_EQ(pages.skipped_selected_out() > 0, sparse && c.method.lists());
    EXPECT_EQ(pages.skipped_window() > 0, sparse && c.method.selector == "streaming");
    EXPECT_EQ(pages.skipped_pruned() > 0,
              sparse && !c.method.pruner.empty() && c.off != c.method.pruner);
    EXPECT_EQ(pages.skipped_terminated() > 0,
              sparse && !c.method.terminator.empty() && c.off != c.method.terminator);
    ASSERT_EQ(a.stages_run_size() > 0, sparse && !c.method.rule.empty());
    if (a.stages_run_size() > 0) {
      EXPECT_GT(a.stages_run(0), 0u);
      EXPECT_EQ(a.stages_reused(0) > 0, c.off != c.method.rule);
    }
    EXPECT_EQ(a.cached_device_tokens() + a.cached_host_tokens() > 0, way() == Way::kCached);
    // Sink and window, the only pages that streaming reads, stay in the device tier.
    if (c.method.selector != "streaming") {
      EXPECT_EQ(pages.page_misses() > 0, way() == Way::kTenPercent);
    }
  }
}

// p = 1 is the selector alone, refresh 1 is no reuse, patience that is never reached is no ART.
TEST_P(ConformanceTest, AStageThatLetsEverythingThroughChangesNoBit) {
  for (const Case& c : Cases()) {
    if (c.off.empty()) continue;
    SCOPED_TRACE(c.Name());
    const Served& without = ServedBy(way(), Without(c));
    EXPECT_TRUE(SameBits(ServedBy(way(), c), without));
    EXPECT_FALSE(SameBits(ServedBy(way(), {c.method}), without)) << "it matters when on";
  }
}

TEST_P(ConformanceTest, TheWholeBudgetIsDense) {
  const Served& dense = ServedBy(way(), {{"all"}});
  for (const Case& c : Cases()) {
    if (c.method.Name() == "all") continue;
    SCOPED_TRACE(c.Name());
    if (c.off.empty()) {
      EXPECT_EQ(SameBits(ServedBy(way(), c), dense), c.whole);
    }
  }
}

TEST_P(ConformanceTest, TheAnswerIsTheOneThatIsGivenAlone) {
  // Sums over ranks have another order; at compact positions lists give other answers.
  if (way() == Way::kTwoRanks || way() == Way::kExtended) return;
  for (const Case& c : Cases()) {
    EXPECT_TRUE(SameBits(ServedBy(way(), c), ServedBy(Way::kAlone, c))) << c.Name();
  }
}

// Selections are made per KV group, on whatever rank it lies.
TEST(ConformanceOfRanksTest, WhatIsSelectedDoesNotDependOnTheirNumber) {
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.Name());
    const TestResult& one = ServedBy(Way::kAtOnce, c).result;
    const TestResult& two = ServedBy(Way::kTwoRanks, c).result;
    EXPECT_EQ(one.tokens, two.tokens);
    const auto counts = [](const v1::RowAccounting& row) {
      const v1::PhaseAccounting a = BothPhases(row);
      return std::tuple(a.blocks_total(), a.skipped_selected_out(), a.skipped_window(),
                        a.skipped_pruned(), a.skipped_terminated(), a.page_hits());
    };
    EXPECT_EQ(counts(one.accounting), counts(two.accounting));
    EXPECT_TRUE(std::ranges::equal(one.accounting.stages_run(), two.accounting.stages_run()));
    EXPECT_TRUE(std::ranges::equal(one.accounting.stages_reused(), two.accounting.stages_reused()));
  }
}

}  // namespace
}  // namespace kvasir::worker
