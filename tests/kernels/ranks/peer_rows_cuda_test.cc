// Sums and maxima of rows over ranks, which share one GPU or have one each.
#include <algorithm>
#include <cstdint>
#include <gtest/gtest.h>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/ranks/rank_ops_cuda.h"
#include "kernels/sparse/common/ranking.h"
#include "tests/support/device_memory.h"
#include "tests/support/peer_ranks.h"

namespace kvasir::kernels {
namespace {

[[maybe_unused]] const bool kLoaded = LoadKernelsAtOnce();

absl::Status Join(const PeerRank& rank, const RankRows<int64_t>& rows) {
  return SumRows(rank.end, rows, rank.stream);
}
absl::Status Join(const PeerRank& rank, const RankRows<uint32_t>& rows) {
  return MaxRows(rank.end, rows, rank.stream);
}
// As unsigned, so that tests may count past the largest sum.
int64_t Joined(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
uint32_t Joined(uint32_t a, uint32_t b) { return std::max(a, b); }

int64_t Draw(std::mt19937_64& rng, int64_t) {
  switch (rng() % 8) {
    case 0:
      return 0;
    case 1:  // the votes of most heads of a layer
      return int64_t{1} << 59;
    case 2:
      return -1;
    case 3:
      return std::numeric_limits<int64_t>::min();
    default:
      return static_cast<int64_t>(rng());
  }
}
uint32_t Draw(std::mt19937_64& rng, uint32_t) {
  switch (rng() % 8) {
    case 0:
      return 0;
    case 1:
      return OrderedScore(-std::numeric_limits<float>::infinity());
    case 2:
      return OrderedScore(std::numeric_limits<float>::infinity());
    case 3:
      return std::numeric_limits<uint32_t>::max();
    default:
      return OrderedScore(static_cast<float>(rng() % 2001) - 1000);
  }
}

// Number of ranks, and whether each has a GPU of its own.
class PeerRowsTest : public testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  static constexpr int64_t kMostValues = 600'000;
  struct Rank : PeerRank {
    DeviceBuffer values, counts;
  };

  void SetUp() override {
    const auto& [size, apart] = GetParam();
    const int needed = apart ? size : 1;
    if (CountGpus() < needed) GTEST_SKIP() << "fewer than " << needed << " GPUs on this machine";
    MakeRanks(5'000'000'000);
  }
  void TearDown() override { cudaSetDevice(0); }

  void MakeRanks(int64_t patience_ns) {
    const auto& [size, apart] = GetParam();
    ranks_ = std::vector<Rank>(static_cast<size_t>(size));
    for (int r = 0; r < size; ++r) ranks_[static_cast<size_t>(r)].device = apart ? r : 0;
    ConnectPeers(ranks_, patience_ns);
    for (Rank& rank : ranks_) {
      rank.Use();
      rank.values = Zeros(kMostValues * 8);
      rank.counts = Zeros(kMostValues * 4);
    }
    AwaitAll(ranks_);
  }

  template <typename Value>
  RankRows<Value> RowsOf(const Rank& rank, int64_t rows, int64_t stride, bool counted) const {
    return {.values = rank.values.As<Value>(),
            .counts = counted ? rank.counts.As<int32_t>() : nullptr,
            .rows = rows,
            .stride = stride};
  }

  // Joins rows of the counts, or whole rows where there are none, and compares all values. Rows are
  // joined `calls` times without a wait between.
  template <typename Value>
  void ExpectJoined(int64_t rows, int64_t stride, const std::vector<int32_t>& counts,
                    int calls = 1) {
    ASSERT_LE(rows * stride, kMostValues);
    const auto size = static_cast<size_t>(rows * stride);
    std::vector<std::vector<Value>> own(ranks_.size(), std::vector<Value>(size));
    for (size_t r = 0; r < ranks_.size(); ++r) {
      ranks_[r].Use();
      for (Value& value : own[r]) value = Draw(rng_, Value{});
      Upload(ranks_[r].values, own[r]);
      Upload(ranks_[r].counts, counts);
    }
    AwaitAll(ranks_);
    for (int call = 0; call < calls; ++call) {
      for (const Rank& rank : ranks_) {
        rank.Use();
        const absl::Status status = Join(rank, RowsOf<Value>(rank, rows, stride, !counts.empty()));
        ASSERT_TRUE(status.ok()) << status;
      }
    }
    AwaitAll(ranks_);
    std::vector<Value> expected;
    for (int call = 0; call < calls; ++call) {
      expected = own[0];
      for (size_t r = 1; r < ranks_.size(); ++r) {
        for (size_t i = 0; i < size; ++i) expected[i] = Joined(expected[i], own[r][i]);
      }
      for (auto& values : own) values = expected;
    }
    for (const Rank& rank : ranks_) {
      EXPECT_EQ(*rank.gave_up.As<uint32_t>(), 0u);
      std::vector<Value> found(size);
      ASSERT_EQ(
          cudaMemcpy(found.data(), rank.values.data(), size * sizeof(Value), cudaMemcpyDefault),
          cudaSuccess);
      int64_t others = 0;
      for (size_t row = 0; row < static_cast<size_t>(rows); ++row) {
        const auto count =
            counts.empty() ? static_cast<size_t>(stride) : static_cast<size_t>(counts[row]);
        for (size_t i = 0; i < count; ++i) {
          const size_t at = row * static_cast<size_t>(stride) + i;
          others += found[at] != expected[at];
        }
      }
      EXPECT_EQ(others, 0) << "rank " << rank.end.rank;
    }
  }

  template <typename T>
  static void Upload(const DeviceBuffer& to, const std::vector<T>& values) {
    ASSERT_EQ(cudaMemcpy(to.data(), values.data(), values.size() * sizeof(T), cudaMemcpyDefault),
              cudaSuccess);
  }

  std::vector<Rank> ranks_;
  std::mt19937_64 rng_{7};
};

std::string NameOf(const testing::TestParamInfo<std::tuple<int, bool>>& test) {
  const auto& [size, apart] = test.param;
  return std::to_string(size) + (apart ? "Apart" : "OnOneGpu");
}
// One GPU must hold the CTAs of all ranks that share it, and of a next call of each.
INSTANTIATE_TEST_SUITE_P(Sharing, PeerRowsTest,
                         testing::Combine(testing::Values(2, 3), testing::Values(false)), NameOf);
INSTANTIATE_TEST_SUITE_P(Apart, PeerRowsTest,
                         testing::Combine(testing::Values(2, 4, 8), testing::Values(true)), NameOf);

TEST_P(PeerRowsTest, WholeRowsAreTheSameOnAllRanksWhateverCameBefore) {
  // Sizes around those of a thread, a CTA and all CTAs, so that CTAs have had different numbers of
  // turns.
  for (const int64_t stride : {1, 2, 255, 257, 512, 513, 1024, 1025, 65'537, 1, 300'001, 511}) {
    SCOPED_TRACE(stride);
    ExpectJoined<int64_t>(1, stride, {});
    ExpectJoined<uint32_t>(1, stride, {});
  }
}

TEST_P(PeerRowsTest, OnlyTheCountedValuesOfManyRowsAreExchanged) {
  for (const int64_t rows : {1, 3, 255, 256, 257, 600}) {
    const int64_t stride = kMostValues / 600;
    for (int round = 0; round < 4; ++round) {
      SCOPED_TRACE(testing::Message() << rows << " rows, round " << round);
      std::vector<int32_t> counts;
      for (int64_t row = 0; row < rows; ++row) {
        const int32_t some = static_cast<int32_t>(rng_() % static_cast<uint64_t>(stride + 1));
        counts.push_back(rng_() % 3 == 0 ? 0 : rng_() % 3 == 0 ? 1 : some);
      }
      ExpectJoined<int64_t>(rows, stride, counts);
      ExpectJoined<uint32_t>(rows, stride, counts);
    }
  }
  ExpectJoined<int64_t>(2, 1000, {0, 0});
}

TEST_P(PeerRowsTest, ManyCallsFollowEachOtherWithoutAWait) {
  ExpectJoined<int64_t>(2, 40'000, {39'999, 7}, /*calls=*/101);
  ExpectJoined<uint32_t>(1, 700, {}, /*calls=*/101);
  ExpectJoined<int64_t>(1, 1, {}, /*calls=*/500);
}

// One rank replays a graph of calls, the others launch them.
TEST_P(PeerRowsTest, GraphsAndLaunchesMatch) {
  constexpr int kCalls = 7;  // odd: the halves of an inbox swap from replay to replay
  constexpr int64_t kValues = 3000;
  const auto call = [&](const Rank& rank) {
    rank.Use();
    for (int i = 0; i < kCalls; ++i) {
      ASSERT_TRUE(Join(rank, RowsOf<int64_t>(rank, 1, kValues, false)).ok());
      if (i != 3) continue;
      ASSERT_TRUE(Join(rank, RowsOf<uint32_t>(rank, 1, 2 * kValues, false)).ok());
    }
  };
  const Rank& graphs = ranks_[0];
  graphs.Use();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(graphs.stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  call(graphs);
  ASSERT_EQ(cudaStreamEndCapture(graphs.stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  for (int replay = 0; replay < 20; ++replay) {
    for (size_t r = 0; r < ranks_.size(); ++r) {
      ranks_[r].Use();
      Upload(ranks_[r].values, std::vector<int64_t>(kValues, static_cast<int64_t>(r) + replay));
    }
    AwaitAll(ranks_);
    graphs.Use();
    ASSERT_EQ(cudaGraphLaunch(executable, graphs.stream), cudaSuccess);
    for (size_t r = 1; r < ranks_.size(); ++r) call(ranks_[r]);
    AwaitAll(ranks_);
    const auto size = std::ssize(ranks_);
    int64_t expected = 0;
    for (int64_t r = 0; r < size; ++r) expected += r + replay;
    for (int i = 1; i < kCalls; ++i) expected *= size;  // the maximum changes nothing
    for (const Rank& rank : ranks_) {
      std::vector<int64_t> found(kValues);
      ASSERT_EQ(cudaMemcpy(found.data(), rank.values.data(), kValues * 8, cudaMemcpyDefault),
                cudaSuccess);
      EXPECT_EQ(std::count(found.begin(), found.end(), expected), kValues)
          << "replay " << replay << ", rank " << rank.end.rank << ": " << found[0];
    }
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

TEST_P(PeerRowsTest, AMissingRankIsNoticedAndCallsEnd) {
  MakeRanks(50'000'000);
  ranks_[0].Use();
  for (int call = 0; call < 20; ++call) {
    ASSERT_TRUE(Join(ranks_[0], RowsOf<int64_t>(ranks_[0], 3, 100'000, false)).ok());
  }
  AwaitAll(ranks_);
  EXPECT_EQ(*ranks_[0].gave_up.As<uint32_t>(), 1u);
  EXPECT_EQ(*ranks_[1].gave_up.As<uint32_t>(), 0u);
}

TEST(PeerRowsCallTest, TooManyRanksAreRefused) {
  const PeerSumEnd end = {.num_ranks = kMaxPeers + 1};
  EXPECT_EQ(SumRows(end, {.rows = 1, .stride = 1}, nullptr).code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvasir::kernels
