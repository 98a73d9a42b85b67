// Rules that hold for every selector and every reuse rule over consecutive decode steps.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/rope/rope.h"
#include "kernels/sparse/methods.h"
#include "kernels/sparse/policy.h"
#include "kernels/sparse/reuse/reusing_select.h"
#include "tests/support/attention_batch.h"

namespace kvasir::kernels {
namespace {

using Kind = SelectionHeader::Kind;

constexpr int64_t kDim = 64;
constexpr AttentionShape kShape = {.kv = DType::kBFloat16, .head_dim = kDim};

// A selector under test and what it is made with.
struct Shape {
  std::string selector;
  MethodOptions options = {};
};
std::vector<Shape> Shapes() {
  std::vector<Shape> shapes;
  for (const SelectorMethod& method : SelectorMethods()) {
    const std::string name(method.name.data(), method.name.size());
    if (name == "infinitehip") {
      for (const char* preset : {"3k", "3k-fast", "3k-flash", "5k"}) {
        shapes.push_back({name, {{"preset", preset}}});
      }
    } else {
      shapes.push_back({name});
    }
  }
  return shapes;
}

std::string NameOf(const Shape& shape) {
  std::string name = shape.selector;
  for (const MethodOption& option : shape.options) name += "_" + option.value;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

// Decode steps of sequences whose keys lie in the slots of a batch; slot s is sequence s.
class Steps {
 public:
  Steps(const Shape& shape, const std::string& rule, ReuseNumbers reuse, int64_t slots = 1)
      : selector_(MakeSelector(shape.selector, shape.options).value()),
        rule_(rule.empty() ? nullptr : MakeReuseRule(rule).value()),
        batch_(kShape, slots, kContext, 71) {
    numbers_ = {.sink_tokens = 4,
                .window_tokens = std::max<int64_t>(150, selector_->MinWindowTokens()),
                .budget_tokens = 704,
                .reuse = reuse};
    for (int64_t slot = 0; slot < slots; ++slot) batch_.FillContext(slot, kContext);
    for (int64_t slot = 0; rule_ != nullptr && slot < slots; ++slot) {
      numbers_.reach_tokens = ReachTokens(*selector_, *rule_, reuse);
      memories_.push_back(MakeSelectionMemory({*selector_, *rule_, batch_.kv().View().layout,
                                               kShape.group, numbers_, kContext})
                              .value());
    }
  }

  AttentionBatch& batch() { return batch_; }
  Selector& selector() { return *selector_; }
  PolicyNumbers& numbers() { return numbers_; }
  void set_rotation(QueryRotation rotation) { rotation_ = rotation; }

  // Selects for the batch's query tiles, `blocks_per_call` in a call (0: all).
  PageSelection Run(size_t blocks_per_call = 0) {
    PageSelection selection = batch_.MakeSelection(selector_->MaxEntries(numbers_, kContext));
    const size_t blocks = batch_.blocks().size();
    const size_t step = blocks_per_call == 0 ? blocks : blocks_per_call;
    for (size_t begin = 0; begin < blocks; begin += step) Call(begin, step, selection);
    return selection;
  }

  static constexpr int64_t kContext = 2400;

 private:
  void Call(size_t begin, size_t count, const PageSelection& selection) {
    const std::vector<PolicyNumbers> numbers(batch_.blocks().size(), numbers_);
    SelectParams params = batch_.ParamsForSelect(numbers);
    params.tiles = params.tiles.subspan(begin, count);
    params.numbers = params.numbers.subspan(begin, count);
    params.rotation = rotation_;
    const int64_t heads = kShape.kv_heads;
    PageSelection rows =
        selection.Rows(static_cast<int64_t>(begin) * heads, static_cast<int64_t>(count) * heads);
    SerialExecutor executor;
    if (rule_ == nullptr) {
      EXPECT_TRUE(selector_->Select(params, rows, executor).ok());
      return;
    }
    std::vector<RowMemory*> memories;
    for (const QueryTile& tile : params.tiles) {
      for (int64_t head = 0; head < heads; ++head) {
        memories.push_back(
            &memories_[static_cast<size_t>(tile.slot)]->row(AttentionBatch::kLayer, head));
      }
    }
    params.memories = memories;
    const absl::Status status = SelectReusing(*selector_, *rule_, params, rows, executor);
    EXPECT_TRUE(status.ok()) << status;
  }

  std::unique_ptr<Selector> selector_;
  std::unique_ptr<ReuseRule> rule_;
  AttentionBatch batch_;
  PolicyNumbers numbers_;
  QueryRotation rotation_;
  std::vector<std::unique_ptr<SelectionMemory>> memories_;
};

// Every step asks the same: all queries are as those of the first one.
void RepeatFirstQuery(AttentionBatch& batch) {
  for (int64_t token = 1; token < batch.num_tokens(); ++token) {
    for (int64_t head = 0; head < batch.heads(); ++head) {
      std::copy_n(batch.q(0, head), kDim, batch.q(token, head));
    }
  }
}

int64_t ReusedRows(const PageSelection& selection) {
  return std::count_if(selection.headers, selection.headers + selection.num_rows,
                       [](const SelectionHeader& header) { return header.reused_stages > 0; });
}

void ExpectSameRow(const PageSelection& a, int64_t row_a, const PageSelection& b, int64_t row_b) {
  const SelectionHeader &x = a.header(row_a), &y = b.header(row_b);
  EXPECT_EQ(x.kind, y.kind);
  EXPECT_EQ(x.sink_end, y.sink_end);
  EXPECT_EQ(x.window_begin, y.window_begin);
  EXPECT_EQ(x.query_position, y.query_position);
  EXPECT_EQ(x.made_at, y.made_at);
  EXPECT_EQ(x.reused_stages, y.reused_stages);
  ASSERT_EQ(x.count, y.count);
  for (int32_t i = 0; i < x.count; ++i) {
    EXPECT_EQ(a.list(row_a)[i].page, b.list(row_b)[i].page);
    EXPECT_EQ(a.list(row_a)[i].chosen, b.list(row_b)[i].chosen);
    EXPECT_EQ(a.list(row_a)[i].live, b.list(row_b)[i].live);
    EXPECT_EQ(a.list(row_a)[i].score, b.list(row_b)[i].score);
  }
}

class ReuseTest : public ::testing::TestWithParam<Shape> {
 protected:
  bool selects() const { return GetParam().selector != "all"; }
};
INSTANTIATE_TEST_SUITE_P(Methods, ReuseTest, ::testing::ValuesIn(Shapes()),
                         [](const auto& test) { return NameOf(test.param); });

// Through a multiple of 64, and with the queries of one step alike to those of the next.
TEST_P(ReuseTest, AnIntervalOfOneAndAThetaOfOneAreNoReuse) {
  for (const auto& [rule, reuse] : {std::pair{"interval", ReuseNumbers{.interval = 1}},
                                    std::pair{"cosine", ReuseNumbers{.theta = 1}}}) {
    SCOPED_TRACE(rule);
    Steps anew(GetParam(), "", {}), reusing(GetParam(), rule, reuse);
    for (Steps* steps : {&anew, &reusing}) {
      for (int64_t step = 0; step < 70; ++step) steps->batch().AddBlock(0, 2300 + step, 1);
      RepeatFirstQuery(steps->batch());
    }
    const PageSelection expected = anew.Run(), actual = reusing.Run();
    EXPECT_EQ(expected.header(0).kind == Kind::kList, selects());
    for (int64_t row = 0; row < expected.num_rows; ++row) {
      ExpectSameRow(expected, row, actual, row);
    }
  }
}

class ReuseRuleTest : public ::testing::TestWithParam<std::tuple<Shape, std::string>> {
 protected:
  const Shape& shape() const { return std::get<0>(GetParam()); }
  const std::string& rule() const { return std::get<1>(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Methods, ReuseRuleTest,
                         ::testing::Combine(::testing::ValuesIn(Shapes()),
                                            ::testing::Values("interval", "cosine", "both")),
                         [](const auto& test) {
                           return NameOf(std::get<0>(test.param)) + "_" + std::get<1>(test.param);
                         });

// Logits rise with the position. A selector that chose in every step would choose the tokens just
// before the window, so that they and the window cover the context's end without a gap. That must
// stay true when the window moves on while a list serves.
TEST_P(ReuseRuleTest, NoTokenOfTheWindowIsLostBetweenRefreshes) {
  if (shape().selector == "all" || shape().selector == "streaming") return;
  Steps steps(shape(), rule(), {});
  AttentionBatch& batch = steps.batch();
  for (int64_t head = 0; head < kShape.kv_heads; ++head) {
    for (int64_t t = 0; t < Steps::kContext; ++t) {
      std::byte* key =
          batch.kv().Token(FakePagedKv::Side::kKey, 0, t, AttentionBatch::kLayer, head);
      for (int64_t i = 0; i < kDim; ++i) {
        // By 8 tokens: bfloat16 and key codes tell these apart.
        const float x = 0.01f * static_cast<float>(t / 8);
        batch.kv().Set(key, i, i % 2 == 0 ? x : -x);
      }
    }
  }
  for (int64_t block = 0; block * kPageTokens < Steps::kContext; ++block) {
    const int64_t tokens = std::min(kPageTokens, Steps::kContext - block * kPageTokens);
    ASSERT_TRUE(RebuildBounds(batch.kv().View(), 0, block, tokens).ok());
    ASSERT_TRUE(RebuildKeyCodes(batch.kv().View(), 0, block, tokens).ok());
  }
  constexpr int64_t kSteps = 200;  // more than the largest interval
  for (int64_t step = 0; step < kSteps; ++step) {
    batch.AddBlock(0, 2150 + step, 1);
    for (int64_t head = 0; head < batch.heads(); ++head) {
      for (int64_t i = 0; i < kDim; ++i) batch.q(step, head)[i] = i % 2 == 0 ? 0.05f : -0.05f;
    }
  }
  const PageSelection selection = steps.Run();
  EXPECT_GT(ReusedRows(selection), selection.num_rows / 2);
  for (int64_t row = 0; row < selection.num_rows; ++row) {
    const int64_t position = selection.header(row).query_position;
    std::vector<bool> attended(static_cast<size_t>(position + 1));
    for (SelectedPages walk(selection.header(row), selection.list(row), position); walk.valid();
         walk.Next()) {
      for (int64_t t = 0; t < kPageTokens; ++t) {
        if (walk.mask() >> t & 1)
          attended[static_cast<size_t>(walk.page() * kPageTokens + t)] = true;
      }
    }
    // The longest that a list serves, and a token more.
    for (int64_t t = position - steps.numbers().window_tokens - kPageTokens; t <= position; ++t) {
      ASSERT_TRUE(attended[static_cast<size_t>(t)])
          << "query " << position << " misses token " << t << " with a list of "
          << selection.header(row).made_at;
    }
  }
}

// Two sequences a step, beside each other, and each alone.
TEST_P(ReuseRuleTest, ASequenceDoesNotDependOnItsNeighbour) {
  const ReuseNumbers reuse = {.theta = 0.3f, .theta_force = -0.2f};
  constexpr int64_t kSteps = 40;
  const auto query = [](int64_t slot, int64_t step, int64_t head, int64_t i) {
    const double drift = 0.05 * static_cast<double>((slot + 1) * step);
    return static_cast<float>(std::sin(static_cast<double>(3 * head + i) + drift));
  };
  const auto add = [&](Steps& steps, int64_t slot, int64_t step) {
    const int64_t token = steps.batch().num_tokens();
    steps.batch().AddBlock(slot, 2000 + 77 * slot + step, 1);
    for (int64_t head = 0; head < steps.batch().heads(); ++head) {
      for (int64_t i = 0; i < kDim; ++i) {
        steps.batch().q(token, head)[i] = query(slot, step, head, i);
      }
    }
  };
  Steps together(shape(), rule(), reuse, 2);
  for (int64_t step = 0; step < kSteps; ++step) {
    for (int64_t slot = 0; slot < 2; ++slot) add(together, slot, step);
  }
  const PageSelection both = together.Run(2);
  if (shape().selector != "all") {
    EXPECT_GT(ReusedRows(both), 0);
    EXPECT_LT(ReusedRows(both), both.num_rows);
  }
  for (int64_t slot = 0; slot < 2; ++slot) {
    Steps alone(shape(), rule(), reuse, 2);
    for (int64_t step = 0; step < kSteps; ++step) add(alone, slot, step);
    const PageSelection one = alone.Run();
    for (int64_t row = 0; row < one.num_rows; ++row) {
      const int64_t step = row / kShape.kv_heads, head = row % kShape.kv_heads;
      ExpectSameRow(one, row, both, (2 * step + slot) * kShape.kv_heads + head);
    }
  }
}

// From the first multiple of 64 on, which is where a sequence resumes.
TEST_P(ReuseRuleTest, ASequenceThatResumesAtAMultipleOf64FindsWhatItWouldHaveFound) {
  Steps whole(shape(), rule(), {}), resumed(shape(), rule(), {});
  for (int64_t position = 2010; position < 2100; ++position) whole.batch().AddBlock(0, position, 1);
  for (int64_t position = 2048; position < 2100; ++position) {
    const int64_t token = resumed.batch().num_tokens();
    resumed.batch().AddBlock(0, position, 1);
    for (int64_t head = 0; head < resumed.batch().heads(); ++head) {
      std::copy_n(whole.batch().q(position - 2010, head), kDim, resumed.batch().q(token, head));
    }
  }
  const PageSelection all = whole.Run(), rest = resumed.Run();
  if (shape().selector != "all" && rule() == "interval") {
    EXPECT_GT(ReusedRows(rest), 0);
  }
  for (int64_t row = 0; row < rest.num_rows; ++row) {
    ExpectSameRow(rest, row, all, row + 38 * kShape.kv_heads);
  }
}

TEST(ReusingSelect, WhatDoesNotFollowDirectlyStartsAnew) {
  Steps steps({"hip"}, "interval", {});
  for (const int64_t position : {2000, 2001, 2003, 2004, 2004, 2005, 2002}) {
    steps.batch().AddBlock(0, position, 1);
  }
  const PageSelection selection = steps.Run();
  std::vector<int32_t> reused;
  for (int64_t row = 0; row < selection.num_rows; row += kShape.kv_heads) {
    reused.push_back(selection.header(row).reused_stages);
  }
  EXPECT_EQ(reused, (std::vector<int32_t>{0, 1, 0, 1, 0, 1, 0}));
}

// The stages of a preset, from a multiple of 64 on.
TEST(ReusingSelect, StagesRunAtTheirIntervalsAndWithThoseBeforeThem) {
  struct Preset {
    const char* name;
    std::array<int64_t, 3> intervals;
  };
  for (const Preset& preset : {Preset{"3k", {16, 8, 4}}, Preset{"3k-fast", {32, 16, 8}},
                               Preset{"3k-flash", {96, 24, 8}}, Preset{"5k", {16, 8, 4}}}) {
    SCOPED_TRACE(preset.name);
    Steps steps({"infinitehip", {{"preset", preset.name}}}, "interval", {});
    for (int64_t step = 0; step < 128; ++step) steps.batch().AddBlock(0, 2048 + step, 1);
    const PageSelection selection = steps.Run();
    for (int64_t row = 0; row < selection.num_rows; ++row) {
      const int64_t t = row / kShape.kv_heads % kPageTokens;
      int32_t reused = 0;
      while (reused < 3 && t % preset.intervals[static_cast<size_t>(reused)] != 0) ++reused;
      EXPECT_EQ(selection.header(row).reused_stages, reused) << "step " << row / kShape.kv_heads;
    }
  }
}

TEST(ReusingSelect, AnIntervalIsThatOfTheFirstStageAndThoseOfLaterOnesAreInProportion) {
  Steps steps({"infinitehip"}, "interval", {.interval = 6});
  for (int64_t step = 0; step < 13; ++step) steps.batch().AddBlock(0, 2048 + step, 1);
  const PageSelection selection = steps.Run();
  std::vector<int32_t> reused;
  for (int64_t row = 0; row < selection.num_rows; row += kShape.kv_heads) {
    reused.push_back(selection.header(row).reused_stages);
  }
  EXPECT_EQ(reused, (std::vector<int32_t>{0, 2, 2, 1, 2, 2, 0, 2, 2, 1, 2, 2, 0}));
}

// A query that points the same way in every step is rotated by its position; it is compared
// un-rotated.
TEST(ReusingSelect, QueriesAreComparedUnrotated) {
  std::vector<double> inv_freq;
  for (double i = 0; i < kDim / 2; ++i) inv_freq.push_back(std::pow(1e4, -2 * i / kDim));
  RopeTable table(inv_freq, 1.5);
  const auto reused = [&](bool knows_rotation) {
    Steps steps({"quest"}, "cosine", {.theta = 0.999f});
    std::vector<int64_t> positions;
    for (int64_t step = 0; step < 20; ++step) {
      positions.push_back(2050 + step);
      steps.batch().AddBlock(0, 2050 + step, 1);
    }
    RepeatFirstQuery(steps.batch());
    SerialExecutor executor;
    table.SetPositions(positions, executor);
    const TensorView q(steps.batch().q(0, 0), DType::kFloat32, {20, steps.batch().heads(), kDim});
    EXPECT_TRUE(ApplyRope(table, q, executor).ok());
    if (knows_rotation) steps.set_rotation({.cos = table.cos(), .sin = table.sin()});
    return ReusedRows(steps.Run());
  };
  EXPECT_EQ(reused(true), 19 * kShape.kv_heads);
  EXPECT_EQ(reused(false), 0);
}

TEST(SelectionMemory, IsASmallPartOfTheKv) {
  const auto selector = MakeSelector("infinitehip").value();
  const auto rule = MakeReuseRule("both").value();
  const KvLayout layout = {
      .num_layers = 2, .num_kv_heads = 2, .head_dim = 128, .dtype = DType::kBFloat16};
  for (const int64_t budget : {2048, 1 << 20}) {
    const auto memory =
        MakeSelectionMemory({*selector, *rule, layout, 4, {256, 1024, budget}, 1 << 20}).value();
    const int64_t kv_bytes = (1 << 20) / kPageTokens * layout.block_bytes();
    EXPECT_GT(memory->size_bytes(), 0);
    EXPECT_LT(memory->size_bytes(), kv_bytes / 500);
  }
}

TEST(MakeReuseRule, UnknownNamesListTheKnownOnes) {
  EXPECT_EQ(MakeReuseRule("never").status().message(),
            "unknown reuse rule 'never'; the reuse rules are interval, cosine, both");
}

TEST(ReuseRules, DecideByAgeAndCosine) {
  struct Case {
    const char* rule;
    StageAge age;
    bool refreshes;
  };
  const ReuseNumbers numbers = {.theta = 0.9f, .theta_force = 0.5f, .max_age = 10};
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const Case& c : {
           Case{"interval", {7, 8, 0}, false},
           Case{"interval", {8, 8, 1}, true},
           Case{"cosine", {1, 8, 0.9f}, false},
           Case{"cosine", {1, 8, 0.89f}, true},
           Case{"cosine", {9, 8, 0.95f}, false},
           Case{"cosine", {10, 8, 0.95f}, true},
           Case{"cosine", {1, 8, kNan}, true},
           Case{"both", {7, 8, 0.5f}, false},
           Case{"both", {7, 8, 0.49f}, true},
           Case{"both", {8, 8, 0.89f}, true},
           Case{"both", {8, 8, 0.9f}, false},
           Case{"both", {31, 8, 0.9f}, false},
           Case{"both", {32, 8, 1.0f}, true},
           Case{"both", {1, 8, kNan}, true},
       }) {
    EXPECT_EQ(MakeReuseRule(c.rule).value()->Refreshes(c.age, numbers), c.refreshes)
        << c.rule << " after " << c.age.steps << " steps with cosine " << c.age.cosine;
  }
}

}  // namespace
}  // namespace kvasir::kernels
