// Selections of layer scope: one list for all KV heads, the same for any number of ranks that hold
// the heads. Ranks are threads here.
#include <barrier>
#include <cstring>
#include <gtest/gtest.h>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "kernels/sparse/policy.h"
#include "kernels/sparse/reuse/reusing_select.h"
#include "tests/kernels/sparse/layer_rank.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kHeads = LayerRank::kHeads;

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

TEST_P(LayerScopeTest, TheSameListForAllHeadsOnAnyNumberOfRanks) {
  LayerRank one(0, kHeads);
  one.Run(*selector_, rule_.get(), nullptr);
  int64_t reused = 0;
  for (int64_t block = 0; block < LayerRank::kBlocks; ++block) {
    ASSERT_GT(one.selection.header(block * kHeads).count, 4);
    reused += one.selection.header(block * kHeads).reused_stages > 0;
    for (int64_t head = 1; head < kHeads; ++head) {
      ExpectSameRow(one.selection, block * kHeads + head, one.selection, block * kHeads);
    }
  }
  EXPECT_EQ(reused > 0, rule_ != nullptr);
  EXPECT_LT(reused, LayerRank::kSteps);
  for (const int num_ranks : {2, 4}) {
    SCOPED_TRACE(testing::Message() << num_ranks << " ranks");
    Exchange exchange(num_ranks);
    const int64_t heads = kHeads / num_ranks;
    std::vector<std::unique_ptr<LayerRank>> ranks(static_cast<size_t>(num_ranks));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < num_ranks; ++rank) {
      threads.emplace_back([&, rank] {
        auto& mine = ranks[static_cast<size_t>(rank)];
        mine = std::make_unique<LayerRank>(rank * heads, heads);
        ThreadRanks others(exchange, rank);
        mine->Run(*selector_, rule_.get(), &others);
        EXPECT_GT(others.calls, 0);
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const auto& rank : ranks) {
      for (int64_t row = 0; row < LayerRank::kBlocks * heads; ++row) {
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
  LayerRank layer(0, kHeads), groups(0, kHeads);
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
    LayerRank alone(head, 1), alone_group(head, 1);
    alone.Run(*selector_, nullptr, nullptr);
    alone_group.Run(*of_group, nullptr, nullptr);
    for (int64_t block = 0; block < LayerRank::kBlocks; ++block) {
      EXPECT_EQ(tokens(alone.selection, block), tokens(alone_group.selection, block));
    }
  }
}

}  // namespace
}  // namespace kvasir::kernels
