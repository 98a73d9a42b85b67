// The answer to a request must not depend on how it is served. In float32 every logit has the same
// bits along every way of kWays. In bfloat16, and over several ranks, where sums are taken in
// another order, the best token is the same wherever it exceeds the second by four times the
// largest difference. Ranks may choose differently between two pages or tokens that score the same
// up to rounding, so that difference is small only for `all`. Texts are the reference model's own,
// sampled freely after a document, so that many tokens have a small margin. KVASIR_TEST_SCALE=96
// makes them 3,072 tokens long: then threads share rows.
#include <algorithm>
#include <cstring>
#include <functional>
#include <iostream>
#include <iterator>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"

#include "tests/support/iterations.h"
#include "tests/worker/invariance_ways.h"

namespace kvasir::worker {
namespace {

using kernels::DType;
using ::testing::Combine;
using ::testing::Values;
using ::testing::ValuesIn;

// Blocks left memory, and pages of them were read while the request ran.
void CheckOnDemand(const Way& way, uint32_t policy, const Served& served) {
  const kvstore::KvStoreStats& stats = served.stats;
  EXPECT_GT(stats.lean_blocks, 0);
  EXPECT_TRUE(way.restart || stats.shed_blocks > 0);
  EXPECT_EQ(stats.pages.failed_reads, 0);
  // Streaming reads its sink and window alone. They stay, unless they come back from disk.
  if (policy == kStreaming && !way.restart) return;
  EXPECT_GT(stats.pages.reads, 0);
  EXPECT_GT(stats.pages.brought, 0);
  if (policy != kAll) return;
  EXPECT_GT(served.accounting.disk_page_waits(), 0u);
  // Elsewhere there is a frame for every page.
  EXPECT_TRUE(stats.pages.evictions > 0 || way.others > 0 || way.ranks > 1);
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
  if (way.host_blocks > 0) {
    CheckOnDemand(way, policy, served);
    return;
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
const Served& Alone(const TestRequest& request, DType dtype, PositionExtension extension,
                    bool windows = false, std::optional<DType> kv = {}) {
  static auto* const all =
      new std::map<std::tuple<uint32_t, DType, PositionExtension, bool, std::optional<DType>>,
                   Served>();
  Served& served = (*all)[{request.policy, dtype, extension, windows, kv}];
  if (!served.tokens.empty()) return served;
  const Way alone = {.name = "Alone", .extension = extension, .windows = windows, .kv = kv};
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
    CompareByPieces(request(), Alone(request(), dtype, way().extension, way().windows, way().kv),
                    serve)
        .Check(request().max_tokens, tolerance);
  }
};

class Float32Test : public InvarianceTest {};
TEST_P(Float32Test, LogitsHaveTheSameBits) {
  const Served& alone = Alone(request(), DType::kFloat32, way().extension, way().windows, way().kv);
  ExpectSameBits(alone, ServeThisWay(request(), DType::kFloat32));
}
INSTANTIATE_TEST_SUITE_P(Ways, Float32Test, Combine(ValuesIn(kPolicies), ValuesIn(kWays)), NameOf);

INSTANTIATE_TEST_SUITE_P(OnDemandWays, Float32Test,
                         Combine(ValuesIn(kPolicies), ValuesIn(kOnDemandWays)), NameOf);
INSTANTIATE_TEST_SUITE_P(OnDemandAmongOthers, Float32Test,
                         Combine(Values(kAll, kQuest, kTokenSelect, kInfiniteHip),
                                 ValuesIn(kOnDemandAmongOthers)),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(OnDemandQuantized, Float32Test,
                         Combine(Values(kAll, kQuest), ValuesIn(kOnDemandQuantized)), NameOf);

INSTANTIATE_TEST_SUITE_P(ExtendedWays, Float32Test,
                         Combine(ValuesIn(kPolicies), ValuesIn(kExtendedWays)), NameOf);

INSTANTIATE_TEST_SUITE_P(WindowWays, Float32Test,
                         Combine(ValuesIn(kPolicies), ValuesIn(kWindowWays)), NameOf);

INSTANTIATE_TEST_SUITE_P(GroupedWays, Float32Test,
                         Combine(Values(kAll, kStreaming, kQuest, kHip, kInfiniteHip),
                                 ValuesIn(kGroupedWays)),
                         NameOf);

INSTANTIATE_TEST_SUITE_P(QuantizedAtOnce, Float32Test,
                         Combine(Values(kAll, kStreaming, kQuest, kTokenSelect, kHip, kInfiniteHip,
                                        kPruned),
                                 ValuesIn(kQuantizedAtOnce)),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(QuantizedWays, Float32Test,
                         Combine(Values(kAll, kPruned), ValuesIn(kQuantizedWays)), NameOf);

// 8 bits an element change logits, by little, and the three types of KV are not mixed up.
TEST(QuantizedTest, ChangesLogitsByLittle) {
  for (const uint32_t policy : {kAll, kQuest}) {
    const TestRequest request = MakeRequest(0, kPromptTokens, policy, testing::Iterations(32));
    const auto first = [&](std::optional<DType> kv) {
      const Served& served = Alone(request, DType::kFloat32, PositionExtension::kNone, false, kv);
      return served.logits.at(kPromptTokens - 1);
    };
    LogitsDifference fp8, int8;
    fp8.Add(first({}), first(kFp8));
    int8.Add(first({}), first(kInt8));
    std::cout << "largest differences: fp8 " << fp8.largest << ", int8 " << int8.largest
              << ", of logits up to " << fp8.scale << std::endl;
    EXPECT_GT(fp8.largest, int8.largest);
    EXPECT_GT(int8.largest, 0);
    EXPECT_LT(fp8.largest, 0.1f * fp8.scale);
  }
}

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

// A window changes every answer after it and none within it, and is no loss that a policy causes.
TEST(LayerWindowsTest, ChangeAnswersBehindThem) {
  const Way windows = {.name = "Alone", .windows = true};
  const TestRequest request = MakeRequest(0, kPromptTokens, kAll, 32);
  const Served& all = Alone(request, DType::kFloat32, PositionExtension::kNone);
  const Served& windowed = Alone(request, DType::kFloat32, PositionExtension::kNone, true);
  EXPECT_NE(all.logits, windowed.logits);
  const v1::PhaseAccounting pages = BothPhases(windowed.accounting);
  EXPECT_LT(pages.blocks_total(), BothPhases(all.accounting).blocks_total() * 3 / 4);
  EXPECT_EQ(pages.skipped_window() + pages.skipped_selected_out(), 0);
  const TestRequest within = MakeRequest(0, 60, kAll, 32);  // 92 tokens with its answer
  ExpectSameBits(Serve(within, {.name = "Alone"}, DType::kFloat32),
                 Serve(within, windows, DType::kFloat32));
}

class BFloat16Test : public InvarianceTest {};
TEST_P(BFloat16Test, ClearChoicesAreTheSame) { ExpectSameClearChoices(DType::kBFloat16, 2e-2f); }
INSTANTIATE_TEST_SUITE_P(Ways, BFloat16Test, Combine(Values(kQuest), ValuesIn(kWays)), NameOf);

class OnDemandRanksTest : public ::testing::TestWithParam<uint32_t> {};
TEST_P(OnDemandRanksTest, LogitsHaveTheSameBitsWhereverPagesLie) {
  const TestRequest request = MakeRequest(0, kPromptTokens, GetParam(), testing::Iterations(32));
  const Served on_demand = Serve(request, kOnDemandGroup, DType::kFloat32);
  CheckPremises(kOnDemandGroup, GetParam(), on_demand);
  ExpectSameBits(Serve(request, kGroups[0], DType::kFloat32), on_demand);
}
INSTANTIATE_TEST_SUITE_P(Policies, OnDemandRanksTest, Values(kAll, kQuest, kInfiniteHip));

class RanksTest : public InvarianceTest {};
TEST_P(RanksTest, ClearChoicesAreTheSame) {
  ExpectSameClearChoices(DType::kFloat32, policy() == kAll ? 1e-4f : 2e-2f);
}
INSTANTIATE_TEST_SUITE_P(Ways, RanksTest,
                         Combine(Values(kAll, kQuest, kTokenSelect), ValuesIn(kGroups)), NameOf);
INSTANTIATE_TEST_SUITE_P(QuantizedWays, RanksTest,
                         Combine(Values(kAll), ValuesIn(kQuantizedGroups)), NameOf);
INSTANTIATE_TEST_SUITE_P(WindowWays, RanksTest,
                         Combine(Values(kAll, kQuest, kTokenSelect), ValuesIn(kWindowGroups)),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(ExtendedWays, RanksTest,
                         Combine(Values(kQuest, kTokenSelect, kInfiniteHip, kPruned),
                                 ValuesIn(kExtendedGroups)),
                         NameOf);

}  // namespace
}  // namespace kvasir::worker
