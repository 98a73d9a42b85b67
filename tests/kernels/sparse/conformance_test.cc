// Rules that hold for the selections and the output of every sparse method and every pair of them,
// at native and at compact positions. tests/worker/conformance_test.cc tests the methods as the
// engine serves them, reuse_test.cc that reuse loses no token between refreshes, and oracle_test.cc
// what is chosen.
#include <algorithm>
#include <bit>
#include <cstring>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/attention/attend_cpu.h"
#include "kernels/sparse/common/select_common.h"
#include "kernels/sparse/policy.h"
#include "kernels/sparse/reuse/reusing_select.h"
#include "tests/support/attention_batch.h"
#include "tests/support/few_frames.h"
#include "tests/support/sparse_methods.h"

namespace kvasir::kernels {
namespace {

using Kind = SelectionHeader::Kind;
using Side = FakePagedKv::Side;

constexpr int64_t kContext = 2112;
constexpr AttentionShape kShape = {.head_dim = 32, .kv_heads = 2, .group = 2};
constexpr int64_t kLayer = kShape.layer;

enum class Positions { kNative, kCompact };

// Random keys, and `blocks` of random queries.
AttentionBatch MakeBatch(Positions positions, const std::vector<QueryTile>& tiles) {
  AttentionBatch batch(kShape, 1, kContext, 81);
  if (positions == Positions::kCompact) batch.UseCompactPositions();
  batch.FillContext(0, kContext);
  for (const QueryTile& tile : tiles) batch.AddBlock(0, tile.first_position, tile.num_rows);
  return batch;
}

// Consecutive decode steps, through a multiple of 64.
std::vector<QueryTile> DecodeSteps() {
  std::vector<QueryTile> tiles;
  for (int64_t position = 2030; position < 2060; ++position) {
    tiles.push_back({.num_rows = 1, .first_position = position});
  }
  return tiles;
}

// The stages of a method, and their results on a batch.
class Pipeline {
 public:
  Pipeline(const SparseMethod& method, const PolicyNumbers& numbers)
      : selector_(MakeSelector(method.selector).value()), numbers_(numbers) {
    numbers_.window_tokens = std::max(numbers.window_tokens, selector_->MinWindowTokens());
    if (!method.rule.empty()) {
      rule_ = MakeReuseRule(method.rule).value();
      numbers_.reach_tokens = ReachTokens(*selector_, *rule_, numbers_.reuse);
    }
    if (!method.pruner.empty()) pruner_ = MakePruner(method.pruner).value();
    if (!method.terminator.empty()) {
      // Random keys are attended to alike: it ends rows where that matters.
      terminator_ = MakeTerminator(method.terminator, {{"guard", "none"},
                                                       {"scale_tolerance", "1"},
                                                       {"direction_tolerance", "1"},
                                                       {"mass_tolerance", "0.2"}})
                        .value();
    }
  }

  const PolicyNumbers& numbers() const { return numbers_; }

  // Selects, places, prunes and attends; the batch has the output. Blocks are consecutive steps.
  void Run(AttentionBatch& batch) {
    Select(batch);
    if (terminator_ != nullptr) {
      std::vector<Termination> terminations;
      for (const QueryTile& tile : batch.blocks()) {
        terminations.push_back(MakeTermination(terminator_.get(), tile, numbers_));
      }
      batch.SetTerminations(std::move(terminations));
    }
    batch.Run([&](AttendParams params, Executor& executor) {
      params.selection = selection();
      AttendReference(params, executor);
    });
  }

  PageSelection selection() {
    return {.headers = headers_.data(),
            .entries = entries_.data(),
            .num_rows = std::ssize(headers_),
            .capacity = capacity_};
  }

 private:
  void Select(AttentionBatch& batch) {
    const int64_t heads = batch.shape().kv_heads;
    const std::vector<PolicyNumbers> numbers(batch.blocks().size(), numbers_);
    capacity_ = selector_->MaxEntries(numbers_, kContext);
    headers_.assign(batch.blocks().size() * static_cast<size_t>(heads), {});
    entries_.assign(headers_.size() * static_cast<size_t>(capacity_), {});
    std::unique_ptr<SelectionMemory> memory;
    std::vector<RowMemory*> memories;
    if (rule_ != nullptr) {
      memory = MakeSelectionMemory({*selector_, *rule_, batch.kv().View().layout,
                                    batch.shape().group, numbers_, kContext})
                   .value();
      for (int64_t row = 0; row < std::ssize(headers_); ++row) {
        memories.push_back(&memory->row(kLayer, row % heads));
      }
    }
    SelectParams params = batch.ParamsForSelect(numbers);
    params.memories = memories;
    PageSelection out = selection();
    SerialExecutor executor;
    const absl::Status selected = rule_ == nullptr
                                      ? selector_->Select(params, out, executor)
                                      : SelectReusing(*selector_, *rule_, params, out, executor);
    ASSERT_TRUE(selected.ok()) << selected;
    if (batch.rope() != nullptr) AssignPositions(out);
    if (pruner_ == nullptr) return;
    const absl::Status pruned = pruner_->Prune(params, out, executor);
    ASSERT_TRUE(pruned.ok()) << pruned;
  }

  std::unique_ptr<Selector> selector_;
  std::unique_ptr<ReuseRule> rule_;
  std::unique_ptr<Pruner> pruner_;
  std::unique_ptr<Terminator> terminator_;
  PolicyNumbers numbers_;
  int64_t capacity_ = 0;
  std::vector<SelectionHeader> headers_;
  std::vector<SelectionEntry> entries_;
};

PolicyNumbers SomeNumbers() {
  return {.sink_tokens = 70,
          .window_tokens = 130,
          .budget_tokens = 640,
          .top_p = 0.8f,
          .patience = 1,
          .reuse = {.theta = 0.1f, .theta_force = -0.2f}};
}

// Counts of the tokens and pages that all rows leave out.
struct Counts {
  int64_t lists = 0;    // rows with lists: not under rule R2
  int64_t reused = 0;   // rows
  int64_t skipped = 0;  // tokens that were not chosen
  int64_t pruned = 0;   // tokens
  int64_t unread = 0;   // pages
};

int64_t AttendedTokens(const PageSelection& selection, int64_t row, int64_t last) {
  int64_t attended = 0;
  for (SelectedPages walk(selection.header(row), selection.list(row), last); walk.valid();
       walk.Next()) {
    attended += std::popcount(walk.mask());
  }
  return attended;
}

// Between sink and window.
int64_t PrunedTokens(const PageSelection& selection, int64_t row) {
  const SelectionHeader& header = selection.header(row);
  int64_t pruned = 0;
  for (int32_t i = 0; i < header.count; ++i) {
    const SelectionEntry& entry = selection.list(row)[i];
    const int64_t start = entry.page * kPageTokens;
    pruned += std::popcount(entry.chosen & ~entry.live &
                            TokenMask(header.sink_end - start, header.window_begin - start));
  }
  return pruned;
}

class ConformanceTest : public ::testing::TestWithParam<std::tuple<SparseMethod, Positions>> {
 protected:
  const SparseMethod& method() const { return std::get<0>(GetParam()); }
  Positions positions() const { return std::get<1>(GetParam()); }

  Counts Count(AttentionBatch& batch, Pipeline& pipeline) const {
    Counts counts;
    const PageSelection selection = pipeline.selection();
    for (int64_t row = 0; row < selection.num_rows; ++row) {
      const SelectionHeader& header = selection.header(row);
      const QueryTile& tile = batch.blocks()[static_cast<size_t>(row / kShape.kv_heads)];
      const int64_t last = tile.first_position + tile.num_rows - 1;
      const int64_t pruned = PrunedTokens(selection, row);
      counts.lists += header.kind == Kind::kList;
      counts.reused += header.reused_stages > 0;
      counts.skipped += last + 1 - AttendedTokens(selection, row, last) - pruned;
      counts.pruned += pruned;
      if (method().terminator.empty()) continue;
      const UnreadPages& unread = batch.unread(row / kShape.kv_heads, row % kShape.kv_heads);
      counts.unread += unread.device + unread.host;
    }
    return counts;
  }
};

std::string NameOf(const ::testing::TestParamInfo<std::tuple<SparseMethod, Positions>>& test) {
  std::string name = std::get<0>(test.param).Name();
  std::replace_if(
      name.begin(), name.end(), [](char c) { return !std::isalnum(c); }, '_');
  return name + (std::get<1>(test.param) == Positions::kNative ? "_native" : "_compact");
}
INSTANTIATE_TEST_SUITE_P(Methods, ConformanceTest,
                         ::testing::Combine(::testing::ValuesIn(AllSparseMethods()),
                                            ::testing::Values(Positions::kNative,
                                                              Positions::kCompact)),
                         NameOf);

// Selectors alone: prompts know no other stage.
class PromptConformanceTest : public ConformanceTest {};
std::vector<SparseMethod> SelectorsAlone() {
  std::vector<SparseMethod> all;
  for (const std::string& selector : NamesOf(SelectorMethods())) all.push_back({selector});
  return all;
}
INSTANTIATE_TEST_SUITE_P(Methods, PromptConformanceTest,
                         ::testing::Combine(::testing::ValuesIn(SelectorsAlone()),
                                            ::testing::Values(Positions::kNative,
                                                              Positions::kCompact)),
                         NameOf);

// Ascending, unique, of tokens that there are; a subset of them live; sink and window whole.
void ExpectValid(const PageSelection& selection, int64_t row, const QueryTile& tile,
                 const PolicyNumbers& numbers, bool prunes) {
  const SelectionHeader& header = selection.header(row);
  const int64_t last = tile.first_position + tile.num_rows - 1;
  int64_t chosen = 0;
  for (int32_t i = 0; i < header.count; ++i) {
    const SelectionEntry& entry = selection.list(row)[i];
    if (i > 0) {
      EXPECT_GT(entry.page, selection.list(row)[i - 1].page);
    }
    EXPECT_GE(entry.page, 0);
    EXPECT_LT(entry.page * kPageTokens, tile.first_position);
    EXPECT_NE(entry.chosen, 0u);
    EXPECT_EQ(entry.live & ~entry.chosen, 0u);
    if (!prunes) {
      EXPECT_EQ(entry.live, entry.chosen);
    }
    chosen += std::popcount(entry.chosen);
  }
  EXPECT_LE(chosen, numbers.budget_tokens);
  std::vector<bool> attended(static_cast<size_t>(last + 1));
  for (SelectedPages walk(header, selection.list(row), last); walk.valid(); walk.Next()) {
    for (uint64_t rest = walk.mask(); rest != 0; rest &= rest - 1) {
      const int64_t token = walk.page() * kPageTokens + std::countr_zero(rest);
      ASSERT_LE(token, last);
      attended[static_cast<size_t>(token)] = true;
    }
  }
  for (int64_t token = 0; token <= last; ++token) {
    if (token >= numbers.sink_tokens && token <= tile.first_position - numbers.window_tokens) {
      continue;
    }
    ASSERT_TRUE(attended[static_cast<size_t>(token)]) << "token " << token;
  }
}

TEST_P(ConformanceTest, DecodingSelectsValidUniqueAndCausal) {
  Pipeline pipeline(method(), SomeNumbers());
  AttentionBatch batch = MakeBatch(positions(), DecodeSteps());
  pipeline.Run(batch);
  const PageSelection selection = pipeline.selection();
  for (int64_t row = 0; row < selection.num_rows; ++row) {
    SCOPED_TRACE(testing::Message() << "row " << row);
    ExpectValid(selection, row, batch.blocks()[static_cast<size_t>(row / kShape.kv_heads)],
                pipeline.numbers(), !method().pruner.empty());
  }
  const Counts counts = Count(batch, pipeline);
  EXPECT_EQ(counts.lists, method().selector == "all" ? 0 : selection.num_rows);
  EXPECT_EQ(counts.skipped > 0, method().selector != "all");
  EXPECT_EQ(counts.pruned > 0, !method().pruner.empty());
  EXPECT_EQ(counts.unread > 0, !method().terminator.empty());
  EXPECT_EQ(counts.reused > 0, !method().rule.empty());
  EXPECT_LT(counts.reused, selection.num_rows);
}

std::vector<float> Out(const AttentionBatch& batch, int64_t token, int64_t head) {
  std::vector<float> out(batch.out(token, head), batch.out(token, head) + kShape.head_dim);
  out.push_back(batch.lse(token, head));
  return out;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void CopyToken(AttentionBatch& from, int64_t from_head, int64_t from_token, AttentionBatch& to,
               int64_t to_head, int64_t token) {
  for (const Side side : {Side::kKey, Side::kValue}) {
    for (int64_t i = 0; i < kShape.head_dim; ++i) {
      to.kv().Set(to.kv().Token(side, 0, token, kLayer, to_head), i,
                  from.kv().Get(from.kv().Token(side, 0, from_token, kLayer, from_head), i));
    }
  }
}

void RebuildDigests(AttentionBatch& batch) {
  for (int64_t block = 0; block * kPageTokens < kContext; ++block) {
    KVASIR_CHECK(RebuildBounds(batch.kv().View(), 0, block, kPageTokens).ok());
    KVASIR_CHECK(RebuildKeyCodes(batch.kv().View(), 0, block, kPageTokens).ok());
  }
}

// Pages on disk are used no longer than they stay, by selectors that read keys too.
TEST_P(ConformanceTest, PagesFromDiskAreSelectedAndReadAlike) {
  std::vector<QueryTile> tiles = DecodeSteps();
  if (method().pruner.empty() && method().rule.empty() && method().terminator.empty()) {
    tiles.push_back({.num_rows = 64, .first_position = 1984});  // prompts know no other stage
  }
  AttentionBatch memory = MakeBatch(positions(), tiles);
  AttentionBatch disk = MakeBatch(positions(), tiles);
  const FewFrames frames(disk.kv());
  Pipeline expected(method(), SomeNumbers()), pipeline(method(), SomeNumbers());
  expected.Run(memory);
  pipeline.Run(disk);
  EXPECT_GT(frames.num_left(PageUse::kAttend), 0);
  const bool reads_keys = method().selector == "tokenselect" || method().selector == "hip";
  EXPECT_TRUE(!reads_keys || frames.num_left(PageUse::kSelect) > 0);
  EXPECT_EQ(disk.fault(0), 0);
  for (int64_t row = 0; row < disk.num_tokens(); ++row) {
    for (int64_t head = 0; head < disk.heads(); ++head) {
      ASSERT_TRUE(SameBits(Out(memory, row, head), Out(disk, row, head))) << "row " << row;
    }
  }
}

// The scope is the KV group: with one KV head on each of two ranks the same is selected, attended
// to and left unread as with both on one.
TEST_P(ConformanceTest, AKvHeadAloneSelectsAsBesideAnother) {
  AttentionBatch both = MakeBatch(positions(), DecodeSteps());
  Pipeline together(method(), SomeNumbers());
  together.Run(both);
  for (int64_t head = 0; head < kShape.kv_heads; ++head) {
    AttentionShape shape = kShape;
    shape.kv_heads = 1;
    AttentionBatch one(shape, 1, kContext, 82);
    if (positions() == Positions::kCompact) one.UseCompactPositions();
    one.FillContext(0, kContext);
    for (int64_t token = 0; token < kContext; ++token) CopyToken(both, head, token, one, 0, token);
    RebuildDigests(one);
    for (const QueryTile& tile : DecodeSteps()) one.AddBlock(0, tile.first_position, 1);
    for (int64_t token = 0; token < one.num_tokens(); ++token) {
      for (int64_t g = 0; g < kShape.group; ++g) {
        std::copy_n(both.q(token, head * kShape.group + g), kShape.head_dim, one.q(token, g));
      }
    }
    Pipeline alone(method(), SomeNumbers());
    alone.Run(one);
    for (int64_t token = 0; token < one.num_tokens(); ++token) {
      SCOPED_TRACE(testing::Message() << "step " << token);
      const int64_t row = token * kShape.kv_heads + head;
      const SelectionHeader& header = together.selection().header(row);
      ASSERT_EQ(alone.selection().header(token).count, header.count);
      EXPECT_EQ(alone.selection().header(token).window_begin, header.window_begin);
      for (int32_t i = 0; i < header.count; ++i) {
        const SelectionEntry& a = alone.selection().list(token)[i];
        const SelectionEntry& b = together.selection().list(row)[i];
        ASSERT_EQ(std::tuple(a.page, a.chosen, a.live, a.pos0),
                  std::tuple(b.page, b.chosen, b.live, b.pos0));
      }
      if (!method().terminator.empty()) {
        EXPECT_EQ(one.unread(token, 0).device, both.unread(token, head).device);
      }
      for (int64_t g = 0; g < kShape.group; ++g) {
        EXPECT_TRUE(SameBits(Out(one, token, g), Out(both, token, head * kShape.group + g)));
      }
    }
  }
  const Counts counts = Count(both, together);
  EXPECT_EQ(counts.skipped > 0, method().selector != "all");
}

// One token short of rule R2: rounded up to blocks that is everything, and token by token all but
// one. Stages that let everything through change nothing of it.
TEST_P(ConformanceTest, AlmostTheWholeBudgetIsDense) {
  if (method().selector == "streaming") return;  // it has no budget
  constexpr int64_t kPosition = 2047;
  PolicyNumbers numbers = SomeNumbers();
  numbers.sink_tokens = 64;
  numbers.window_tokens = Pipeline(method(), {.window_tokens = 128}).numbers().window_tokens;
  ASSERT_EQ((kPosition + 1 - numbers.window_tokens) % kPageTokens, 0);
  numbers.budget_tokens = kPosition + 1 - 64 - numbers.window_tokens - 1;
  numbers.top_p = 1;
  numbers.patience = 1 << 20;
  numbers.reuse = {.interval = 1, .theta = 1, .theta_force = 1};
  const std::vector<QueryTile> tiles = {{.num_rows = 1, .first_position = kPosition}};
  AttentionBatch dense = MakeBatch(positions(), tiles);
  Pipeline({"all"}, numbers).Run(dense);
  AttentionBatch batch = MakeBatch(positions(), tiles);
  Pipeline pipeline(method(), numbers);
  pipeline.Run(batch);
  const Counts counts = Count(batch, pipeline);
  EXPECT_EQ(counts.lists, method().lists() ? 2 : 0);
  const int64_t attended = AttendedTokens(pipeline.selection(), 0, kPosition);
  if (method().selector == "tokenselect") {
    EXPECT_EQ(attended, kPosition);
    return;
  }
  if (method().selector == "infinitehip") {  // a part of its list may lie in the window
    EXPECT_GE(attended, kPosition + 1 - 256);
    return;
  }
  EXPECT_EQ(attended, kPosition + 1);
  for (int64_t head = 0; head < batch.heads(); ++head) {
    EXPECT_TRUE(SameBits(Out(batch, 0, head), Out(dense, 0, head)));
  }
}

// A query tile of a prompt: no query is answered by tokens after it.
TEST_P(PromptConformanceTest, QueriesDoNotSeeWhatFollows) {
  const std::vector<QueryTile> tiles = {{.num_rows = 64, .first_position = 1984}};
  AttentionBatch batch = MakeBatch(positions(), tiles);
  Pipeline pipeline(method(), SomeNumbers());
  pipeline.Run(batch);
  for (int64_t row = 0; row < kShape.kv_heads; ++row) {
    ExpectValid(pipeline.selection(), row, tiles[0], pipeline.numbers(), false);
  }
  EXPECT_EQ(Count(batch, pipeline).skipped > 0, method().selector != "all");

  AttentionBatch other = MakeBatch(positions(), tiles);
  for (int64_t head = 0; head < kShape.kv_heads; ++head) {
    for (int64_t token = 2016; token < kContext; ++token) {
      CopyToken(batch, head, token - 1000, other, head, token);
    }
  }
  RebuildDigests(other);
  Pipeline again(method(), SomeNumbers());
  again.Run(other);
  for (int64_t token = 0; token < 64; ++token) {
    for (int64_t head = 0; head < batch.heads(); ++head) {
      ASSERT_EQ(SameBits(Out(batch, token, head), Out(other, token, head)), token < 32)
          << "query " << token;
    }
  }
}

}  // namespace
}  // namespace kvasir::kernels
