// Ops across ranks, with all ranks on one GPU: their kernels run beside each other.
#include "kernels/ranks/rank_ops_cuda.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <gtest/gtest.h>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/base/device_buffer.h"
#include "kernels/base/dtype.h"
#include "tests/support/device_memory.h"
#include "tests/support/peer_ranks.h"

namespace kvasir::kernels {
namespace {

TensorView Matrix(const DeviceBuffer& buffer, DType dtype, int64_t rows, int64_t width) {
  return TensorView(buffer.data(), dtype, {rows, width}, Device::kCuda);
}

template <typename T>
DeviceBuffer Upload(const std::vector<T>& values) {
  const size_t bytes = values.size() * sizeof(T);
  DeviceBuffer buffer = DeviceBuffer::Allocate(static_cast<int64_t>(bytes)).value();
  EXPECT_EQ(cudaMemcpy(buffer.data(), values.data(), bytes, cudaMemcpyDefault), cudaSuccess);
  return buffer;
}

template <typename T>
std::vector<T> Download(const DeviceBuffer& buffer, int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  EXPECT_EQ(cudaMemcpy(values.data(), buffer.data(), values.size() * sizeof(T), cudaMemcpyDefault),
            cudaSuccess);
  return values;
}

class RankOpsTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!HasGpu()) GTEST_SKIP() << "no GPU on this machine";
    progress_ = PinnedBuffer::Allocate(sizeof(uint32_t)).value();
    *progress_.As<uint32_t>() = 7;
  }

  PinnedBuffer progress_;
};

TEST_F(RankOpsTest, SumsAreRoundedAndAddedAsOnTheCpu) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  std::vector<float> x = {0.0f,   -0.0f,           kInf,   -kInf, std::nanf(""), 1 + 0x1p-8f,
                          1e-40f, 1 + 3 * 0x1p-8f, 3.4e38f};
  std::mt19937 rng(1);
  while (x.size() < 300'000) x.push_back(std::bit_cast<float>(static_cast<uint32_t>(rng())));
  const auto count = std::ssize(x);
  std::vector<BFloat16> y;
  for (size_t i = 0; i < x.size(); ++i) y.push_back(BFloat16(i % 2 == 0 ? 0 : x[i / 2]));
  const DeviceBuffer from = Upload(x), to = Upload(y);
  const absl::Status status =
      AddSums(Matrix(from, DType::kFloat32, 1, count), Matrix(to, DType::kBFloat16, 1, count),
              progress_.As<uint32_t>(), nullptr);
  ASSERT_TRUE(status.ok()) << status;
  const std::vector<uint16_t> found = Download<uint16_t>(to, count);
  for (size_t i = 0; i < x.size(); ++i) {
    const float sum = static_cast<float>(y[i]) + static_cast<float>(BFloat16(x[i]));
    BFloat16 value;
    value.bits = found[i];
    if (std::isnan(sum)) {
      ASSERT_TRUE(std::isnan(static_cast<float>(value))) << x[i];
    } else {
      ASSERT_EQ(found[i], BFloat16(sum).bits) << x[i];
    }
  }
  EXPECT_EQ(*progress_.As<uint32_t>(), 8u);
}

TEST_F(RankOpsTest, ColumnsOfRanksStandSideBySide) {
  // The last rank has two columns, the others three; its rows are packed.
  const std::vector<float> gathered = {1,   2,   3,   4,   5,   6,   101, 102, 103,
                                       104, 105, 106, 201, 202, 203, 204, -1,  -1};
  const DeviceBuffer from = Upload(gathered), to = Zeros(16 * 4);
  PlaceColumnsParams params = {.gathered = Matrix(from, DType::kFloat32, 6, 3),
                               .y = Matrix(to, DType::kFloat32, 2, 8),
                               .progress = progress_.As<uint32_t>()};
  ASSERT_TRUE(PlaceColumns(params, nullptr).ok());
  EXPECT_EQ(Download<float>(to, 16), (std::vector<float>{1, 2, 3, 101, 102, 103, 201, 202,  //
                                                         4, 5, 6, 104, 105, 106, 203, 204}));
  // Only the second and the third rank.
  params.y = Matrix(to, DType::kFloat32, 2, 5);
  params.first_rank = 1;
  ASSERT_TRUE(PlaceColumns(params, nullptr).ok());
  EXPECT_EQ(Download<float>(to, 10),
            (std::vector<float>{101, 102, 103, 201, 202, 104, 105, 106, 203, 204}));
  EXPECT_EQ(*progress_.As<uint32_t>(), 9u);
}

TEST_F(RankOpsTest, MoreColumnsThanRanksHaveAreRefused) {
  const DeviceBuffer from = Zeros(64), to = Zeros(64);
  const absl::Status status = PlaceColumns({.gathered = Matrix(from, DType::kBFloat16, 4, 2),
                                            .y = Matrix(to, DType::kBFloat16, 2, 4),
                                            .first_rank = 1,
                                            .progress = progress_.As<uint32_t>()},
                                           nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
}

// Ranks, each with its own stream.
class PeerSumTest : public testing::Test {
 protected:
  struct Rank : PeerRank {
    DeviceBuffer x, y;
    PinnedBuffer progress;
    std::vector<float> values;
  };

  void SetUp() override {
    if (!HasGpu()) GTEST_SKIP() << "no GPU on this machine";
  }

  // Messages have at most `elements`.
  void MakeRanks(int size, int64_t elements = kPeerSumElements,
                 int64_t patience_ns = 5'000'000'000) {
    elements_ = elements;
    ranks_ = std::vector<Rank>(static_cast<size_t>(size));
    ConnectPeers(ranks_, patience_ns);
    for (Rank& rank : ranks_) {
      rank.x = Zeros(elements * 4);
      rank.y = Zeros(elements * 2);
      rank.progress = PinnedBuffer::Allocate(4).value();
      *rank.progress.As<uint32_t>() = 0;
    }
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  void FillAll(int64_t count) {
    std::uniform_real_distribution<float> values(-100, 100);
    for (Rank& rank : ranks_) {
      rank.values.resize(static_cast<size_t>(count));
      for (float& value : rank.values) value = values(rng_);
      ASSERT_EQ(cudaMemcpy(rank.x.data(), rank.values.data(), static_cast<size_t>(count) * 4,
                           cudaMemcpyDefault),
                cudaSuccess);
    }
    for (Rank& rank : ranks_) {
      ASSERT_EQ(cudaMemset(rank.y.data(), 0, static_cast<size_t>(elements_) * 2), cudaSuccess);
    }
    // A copy from pageable memory may be under way, and the ranks' streams do not wait for it.
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  static absl::Status Launch(const Rank& rank, int64_t count) {
    return PeerSum(rank.end, Matrix(rank.x, DType::kFloat32, 1, count),
                   Matrix(rank.y, DType::kBFloat16, 1, count), rank.stream);
  }
  static absl::Status LaunchSliced(const Rank& rank, int64_t count) {
    return SlicedPeerSum(rank.end, Matrix(rank.x, DType::kFloat32, 1, count),
                         Matrix(rank.y, DType::kBFloat16, 1, count), rank.progress.As<uint32_t>(),
                         rank.stream);
  }
  // Expects the sum in rank order, rounded, added `calls` times to zeros; the same bits everywhere.
  void ExpectSums(int64_t count, int calls = 1) {
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    std::vector<uint16_t> expected;
    for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
      float sum = 0;
      for (const Rank& rank : ranks_) sum += rank.values[i];
      BFloat16 y;
      for (int call = 0; call < calls; ++call) {
        y = BFloat16(static_cast<float>(y) + static_cast<float>(BFloat16(sum)));
      }
      expected.push_back(y.bits);
    }
    for (const Rank& rank : ranks_) {
      EXPECT_EQ(Download<uint16_t>(rank.y, count), expected) << "rank " << rank.end.rank;
      EXPECT_EQ(*rank.gave_up.As<uint32_t>(), 0u);
    }
  }

  int64_t elements_ = 0;
  std::vector<Rank> ranks_;
  std::mt19937 rng_{1};
};

TEST_F(PeerSumTest, AllRanksHaveTheSameSumsWhateverCameBefore) {
  for (const int size : {2, 3, 6}) {
    MakeRanks(size);
    // Sizes around a CTA's, so that CTAs have taken part in different numbers of calls.
    for (const int64_t count : {1, 512, 511, 4096, 513, 8192, 4096, 1, 12288, 4096}) {
      SCOPED_TRACE(testing::Message() << size << " ranks, " << count << " elements");
      FillAll(count);
      for (const Rank& rank : ranks_) ASSERT_TRUE(Launch(rank, count).ok());
      ExpectSums(count);
    }
  }
}

TEST_F(PeerSumTest, TheLargestMessageIsSummed) {
  MakeRanks(2);
  FillAll(kPeerSumElements);
  for (const Rank& rank : ranks_) ASSERT_TRUE(Launch(rank, kPeerSumElements).ok());
  ExpectSums(kPeerSumElements);
  const DeviceBuffer large = Zeros((kPeerSumElements + 1) * 4);
  const auto count = kPeerSumElements + 1;
  EXPECT_EQ(PeerSum(ranks_[0].end, Matrix(large, DType::kFloat32, 1, count),
                    Matrix(large, DType::kBFloat16, 1, count), nullptr)
                .code(),
            absl::StatusCode::kInvalidArgument);
}

// Up to three ranks: all their CTAs wait for each other, and one GPU must hold them at once.
TEST_F(PeerSumTest, LargeSumsAreTheSameOnAllRanksWhateverCameBefore) {
  for (const int size : {2, 3}) {
    MakeRanks(size, /*elements=*/1'000'000);
    // Less than a unit for each rank, slices of unequal sizes, more and fewer CTAs than before.
    for (const int64_t count : {8, 40, 4096, 1'000'000, 40'008, 8, 999'992, 65'536, 1'000'000}) {
      SCOPED_TRACE(testing::Message() << size << " ranks, " << count << " elements");
      FillAll(count);
      for (const Rank& rank : ranks_) ASSERT_TRUE(LaunchSliced(rank, count).ok());
      ExpectSums(count);
    }
    EXPECT_EQ(*ranks_[0].progress.As<uint32_t>(), 9u);
  }
}

TEST_F(PeerSumTest, AMessageOfSeveralLaunchesIsSummed) {
  constexpr int64_t kCount = kSlicedSumElements + 24;
  MakeRanks(3, kCount);
  FillAll(kCount);
  for (const Rank& rank : ranks_) ASSERT_TRUE(LaunchSliced(rank, kCount).ok());
  ExpectSums(kCount);
  EXPECT_EQ(*ranks_[0].progress.As<uint32_t>(), 2u);
  EXPECT_EQ(LaunchSliced(ranks_[0], 12).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(PeerSumTest, ALargeSumWithoutAPeerEnds) {
  constexpr int64_t kCount = 1'000'000;
  MakeRanks(2, kCount, /*patience_ns=*/50'000'000);
  FillAll(kCount);
  for (int call = 0; call < 5; ++call) ASSERT_TRUE(LaunchSliced(ranks_[0], kCount).ok());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(*ranks_[0].gave_up.As<uint32_t>(), 1u);
  for (const uint16_t bits : Download<uint16_t>(ranks_[0].y, kCount)) {
    ASSERT_GT(bits & 0x7fff, 0x7f80) << "not NaN";
  }
}

// One rank replays a graph of calls, the other launches them. Each call reads the result of the
// previous one. All calls of a rank start at once and wait in place, so one GPU must have room for
// a call of the other rank beside them (with 33 calls, which fill an H200, there sometimes was
// none).
TEST_F(PeerSumTest, GraphsAndLaunchesMatch) {
  constexpr int kCalls = 15;  // odd: the halves of an inbox swap from replay to replay
  constexpr int64_t kCount = 4096;
  MakeRanks(2);
  FillAll(kCount);
  const Rank &graphs = ranks_[0], &launches = ranks_[1];
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(graphs.stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  for (int call = 0; call < kCalls; ++call) ASSERT_TRUE(Launch(graphs, kCount).ok());
  ASSERT_EQ(cudaStreamEndCapture(graphs.stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  for (int replay = 0; replay < 40; ++replay) {
    FillAll(kCount);
    ASSERT_EQ(cudaGraphLaunch(executable, graphs.stream), cudaSuccess);
    for (int call = 0; call < kCalls; ++call) ASSERT_TRUE(Launch(launches, kCount).ok());
    ExpectSums(kCount, kCalls);
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

TEST_F(PeerSumTest, AMissingRankIsNoticedAndSumsEnd) {
  MakeRanks(2, kPeerSumElements, /*patience_ns=*/50'000'000);
  FillAll(4096);
  for (int call = 0; call < 65; ++call) ASSERT_TRUE(Launch(ranks_[0], 4096).ok());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(*ranks_[0].gave_up.As<uint32_t>(), 1u);
  for (const uint16_t bits : Download<uint16_t>(ranks_[0].y, 4096)) {
    EXPECT_GT(bits & 0x7fff, 0x7f80) << "not NaN";
  }
}

}  // namespace
}  // namespace kvasir::kernels
