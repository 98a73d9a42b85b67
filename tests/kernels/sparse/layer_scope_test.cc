// Selections of layer scope: one list for all KV heads, the same for any number of ranks that hold
// the heads. Ranks are threads here.
#include <barrier>
#include <bit>
#include <cstring>
#include <gtest/gtest.h>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "kernels/append/digests.h"
#include "kernels/append/key_codes.h"
#include "kernels/sparse/policy.h"
#include "kernels/sparse/reuse/reusing_select.h"
#include "tests/support/attention_batch.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kHeads = 4, kGroup = 2, kDim = 64, kContext = 2400;

// An exchange between ranks: every call hands in a piece and takes all pieces.
class Exchange {
 public:
  explicit Exchange(int ranks) : pieces_(static_cast<size_t>(ranks)), barrier_(ranks) {}
  template <typename T>
  std::vector<std::vector<T>> All(int rank, std::span<const T> own) {
    std::vector<std::byte>& piece = pieces_[static_cast<size_t>(rank)];
    piece.resize(own.size_bytes());
    std::memcpy(piece.data(), own.data(), own.size_bytes());
    barrier_.arrive_and_wait();
    std::vector<std::vector<T>> all;
    for (const std::vector<std::byte>& bytes : pieces_) {
      all.emplace_back(bytes.size() / sizeof(T));
      std::memcpy(all.back().data(), bytes.data(), bytes.size());
    }
    barrier_.arrive_and_wait();
    return all;
  }

 private:
  std::vector<std::vector<std::byte>> pieces_;
  std::barrier<> barrier_;
};

class ThreadRanks final : public LayerRanks {
 public:
  ThreadRanks(Exchange& exchange, int rank) : exchange_(exchange), rank_(rank) {}
  absl::Status Sum(std::span<int64_t> values) override {
    ++calls;
    const auto all = exchange_.All<int64_t>(rank_, values);
    std::fill(values.begin(), values.end(), 0);
    for (const auto& more : all) {
      for (size_t i = 0; i < values.size(); ++i) values[i] += more[i];
    }
    return absl::OkStatus();
  }
  absl::Status Max(std::span<float> values) override {
    ++calls;
    for (const auto& more : exchange_.All<float>(rank_, values)) {
      for (size_t i = 0; i < values.size(); ++i) values[i] = std::max(values[i], more[i]);
    }
    return absl::OkStatus();
  }
  absl::StatusOr<std::span<const double>> Gather(std::span<const double> own) override {
    ++calls;
    gathered_.clear();
    for (const auto& more : exchange_.All<double>(rank_, own)) {
      gathered_.insert(gathered_.end(), more.begin(), more.end());
    }
    return std::span<const double>(gathered_);
  }
  int calls = 0;

 private:
  Exchange& exchange_;
  const int rank_;
  std::vector<double> gathered_;
};

// Keys of the KV heads [first, first + heads) among all, and their queries in a tile of a prompt
// and in some decode steps. The numbers do not depend on who holds the heads.
class Rank {
 public:
  Rank(int64_t first, int64_t heads)
      : heads_(heads),
        batch_({.kv = DType::kFloat32, .head_dim = kDim, .kv_heads = heads, .group = kGroup}, 1,
               kContext, 1) {
    batch_.FillContext(0, kContext);
    for (int64_t head = 0; head < heads; ++head) {
      std::mt19937_64 rng(static_cast<uint64_t>(first + head));
      std::normal_distribution<float> normal;
      for (int64_t t = 0; t < kContext; ++t) {
        std::byte* key =
            batch_.kv().Token(FakePagedKv::Side::kKey, 0, t, AttentionBatch::kLayer, head);
        for (int64_t i = 0; i < kDim; ++i) batch_.kv().Set(key, i, normal(rng));
      }
    }
    for (int64_t block = 0; block * kPageTokens < kContext; ++block) {
      const int64_t tokens = std::min(kPageTokens, kContext - block * kPageTokens);
      KVASIR_CHECK(RebuildBounds(batch_.kv().View(), 0, block, tokens).ok());
      KVASIR_CHECK(RebuildKeyCodes(batch_.kv().View(), 0, block, tokens).ok());
    }
    AddQueries(first, 2176, 64);
    // Steps between two multiples of 64; the second and third queries are much like the first.
    for (int64_t step = 0; step < kSteps; ++step) AddQueries(first, 2250 + step, 1);
  }
  static constexpr int64_t kSteps = 6;
  static constexpr int64_t kBlocks = 1 + kSteps;

  // Runs every query tile alone, the steps with memory where there is a rule.
  void Run(const Selector& selector, const ReuseRule* rule, LayerRanks* ranks) {
    PolicyNumbers numbers = {.sink_tokens = 4,
                             .window_tokens = std::max<int64_t>(150, selector.MinWindowTokens()),
                             .budget_tokens = 320};
    std::unique_ptr<SelectionMemory> memory;
    std::vector<RowMemory*> memories;
    if (rule != nullptr) {
      numbers.reach_tokens = ReachTokens(selector, *rule, numbers.reuse);
      memory = MakeSelectionMemory(
                   {selector, *rule, batch_.kv().View().layout, kGroup, numbers, kContext})
                   .value();
      for (int64_t head = 0; head < heads_; ++head) {
        memories.push_back(&memory->row(AttentionBatch::kLayer, head));
      }
    }
    selection = batch_.MakeSelection(selector.MaxEntries(numbers, kContext));
    const std::vector<PolicyNumbers> all_numbers(kBlocks, numbers);
    SerialExecutor executor;
    for (int64_t block = 0; block < kBlocks; ++block) {
      SelectParams params = batch_.ParamsForSelect(all_numbers);
      params.tiles = params.tiles.subspan(static_cast<size_t>(block), 1);
      params.numbers = params.numbers.subspan(0, 1);
      params.ranks = ranks;
      PageSelection rows = selection.Rows(block * heads_, heads_);
      const bool remembers = rule != nullptr && block > 0;
      if (remembers) params.memories = memories;
      const absl::Status status = remembers ? SelectReusing(selector, *rule, params, rows, executor)
                                            : selector.Select(params, rows, executor);
      ASSERT_TRUE(status.ok()) << status;
    }
  }

  PageSelection selection;

 private:
  void AddQueries(int64_t first, int64_t position, int64_t rows) {
    const int64_t token = batch_.num_tokens();
    batch_.AddBlock(0, position, rows);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t head = 0; head < heads_ * kGroup; ++head) {
        std::mt19937_64 rng(static_cast<uint64_t>(1000 + first * kGroup + head));
        std::mt19937_64 turn(static_cast<uint64_t>((position + r) * 100 + first * kGroup + head));
        std::normal_distribution<float> normal;
        const float share = rows == 1 && position < 2253 ? 0.1f : 2.0f;
        for (int64_t i = 0; i < kDim; ++i) {
          batch_.q(token + r, head)[i] = normal(rng) + share * normal(turn);
        }
      }
    }
  }

  const int64_t heads_;
  AttentionBatch batch_;
};

struct Shape {
  std::string name;
  std::string selector;
  MethodOptions options;
  std::string rule;
};

class LayerScopeTest : public testing::TestWithParam<Shape> {
 protected:
  std::unique_ptr<Selector> selector_ =
      MakeSelector(GetParam().selector, GetParam().options).value();
  std::unique_ptr<ReuseRule> rule_ =
      GetParam().rule.empty() ? nullptr : MakeReuseRule(GetParam().rule).value();
};

INSTANTIATE_TEST_SUITE_P(
    Methods, LayerScopeTest,
    testing::Values(
        Shape{"tokenselect", "tokenselect", {{"scope", "layer"}}, ""},
        Shape{"tokenselect_cosine", "tokenselect", {{"scope", "layer"}}, "cosine"},
        Shape{"infinitehip", "infinitehip", {{"scope", "layer"}, {"preset", "5k"}}, ""},
        Shape{"infinitehip_centre",
              "infinitehip",
              {{"scope", "layer"}, {"preset", "5k"}, {"probe", "centre"}},
              ""},
        Shape{"infinitehip_both", "infinitehip", {{"scope", "layer"}, {"preset", "5k"}}, "both"}),
    [](const auto& param) { return param.param.name; });

void ExpectSameRow(const PageSelection& found, int64_t row, const PageSelection& expected,
                   int64_t expected_row) {
  const SelectionHeader& header = found.header(row);
  const SelectionHeader& other = expected.header(expected_row);
  ASSERT_EQ(header.count, other.count);
  EXPECT_EQ(header.made_at, other.made_at);
  EXPECT_EQ(header.reused_stages, other.reused_stages);
  for (int32_t i = 0; i < header.count; ++i) {
    const SelectionEntry& a = found.list(row)[i];
    const SelectionEntry& b = expected.list(expected_row)[i];
    ASSERT_EQ(a.page, b.page);
    ASSERT_EQ(a.chosen, b.chosen);
    ASSERT_EQ(std::bit_cast<uint32_t>(a.score), std::bit_cast<uint32_t>(b.score));
  }
}

TEST_P(LayerScopeTest, TheSameListForAllHeadsOnAnyNumberOfRanks) {
  Rank one(0, kHeads);
  one.Run(*selector_, rule_.get(), nullptr);
  int64_t reused = 0;
  for (int64_t block = 0; block < Rank::kBlocks; ++block) {
    ASSERT_GT(one.selection.header(block * kHeads).count, 4);
    reused += one.selection.header(block * kHeads).reused_stages > 0;
    for (int64_t head = 1; head < kHeads; ++head) {
      ExpectSameRow(one.selection, block * kHeads + head, one.selection, block * kHeads);
    }
  }
  EXPECT_EQ(reused > 0, rule_ != nullptr);
  EXPECT_LT(reused, Rank::kSteps);
  for (const int num_ranks : {2, 4}) {
    SCOPED_TRACE(testing::Message() << num_ranks << " ranks");
    Exchange exchange(num_ranks);
    const int64_t heads = kHeads / num_ranks;
    std::vector<std::unique_ptr<Rank>> ranks(static_cast<size_t>(num_ranks));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < num_ranks; ++rank) {
      threads.emplace_back([&, rank] {
        auto& mine = ranks[static_cast<size_t>(rank)];
        mine = std::make_unique<Rank>(rank * heads, heads);
        ThreadRanks others(exchange, rank);
        mine->Run(*selector_, rule_.get(), &others);
        EXPECT_GT(others.calls, 0);
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const auto& rank : ranks) {
      for (int64_t row = 0; row < Rank::kBlocks * heads; ++row) {
        ExpectSameRow(rank->selection, row, one.selection, row / heads * kHeads);
      }
    }
  }
}

// The list differs from the choice of each KV group alone; with one group it is that group's
// choice.
TEST_P(LayerScopeTest, AllHeadsAreHeard) {
  if (rule_ != nullptr) GTEST_SKIP() << "the same selector without a rule is a case of its own";
  MethodOptions group = GetParam().options;
  group[0].value = "group";
  const std::unique_ptr<Selector> of_group = MakeSelector(GetParam().selector, group).value();
  Rank layer(0, kHeads), groups(0, kHeads);
  layer.Run(*selector_, nullptr, nullptr);
  groups.Run(*of_group, nullptr, nullptr);
  const auto tokens = [](const PageSelection& selection, int64_t row) {
    std::vector<std::pair<int64_t, uint64_t>> all;
    for (int32_t i = 0; i < selection.header(row).count; ++i) {
      all.emplace_back(selection.list(row)[i].page, selection.list(row)[i].chosen);
    }
    return all;
  };
  for (int64_t head = 0; head < kHeads; ++head) {
    EXPECT_NE(tokens(layer.selection, head), tokens(groups.selection, head));
  }
  for (int64_t head = 0; head < kHeads; ++head) {
    Rank alone(head, 1), alone_group(head, 1);
    alone.Run(*selector_, nullptr, nullptr);
    alone_group.Run(*of_group, nullptr, nullptr);
    for (int64_t block = 0; block < Rank::kBlocks; ++block) {
      EXPECT_EQ(tokens(alone.selection, block), tokens(alone_group.selection, block));
    }
  }
}

}  // namespace
}  // namespace kvasir::kernels
