#include "worker/parallel/gloo_collective.h"

#include <cstring>
#include <functional>
#include <latch>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/worker/parallel/relay.h"
#include "worker/parallel/rendezvous.h"
#include "worker/parallel/single_collective.h"

namespace kvasir::worker {
namespace {

// Runs `body` as every rank of a group, each on its own thread.
void RunGroup(int size, absl::Duration timeout, const std::function<void(GlooCollective&)>& body) {
  Relay relay(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      auto collective = GlooCollective::Connect({.rank = rank, .size = size, .timeout = timeout},
                                                relay.rank(rank));
      ASSERT_TRUE(collective.ok()) << collective.status();
      body(**collective);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Numbers of very different size: another order of addition gives different bits.
float Value(int rank, size_t i) {
  const float scale[] = {1.0f, 1e6f, -1e6f, 1e-3f};
  return scale[(static_cast<size_t>(rank) + i) % 4] * (1.0f + static_cast<float>(i % 977) * 1e-3f);
}

class GlooCollectiveTest : public testing::TestWithParam<int> {};

TEST_P(GlooCollectiveTest, SumsInRankOrderOnEveryRank) {
  const int size = GetParam();
  RunGroup(size, absl::Seconds(20), [&](GlooCollective& collective) {
    // One element, less than a message, exactly one, one more, and many with a remainder.
    for (const size_t n :
         {size_t{1}, size_t{4096}, size_t{16384}, size_t{16385}, size_t{100'003}}) {
      std::vector<float> data(n), expected(n);
      for (size_t i = 0; i < n; ++i) {
        data[i] = Value(collective.rank(), i);
        expected[i] = Value(0, i);
        for (int rank = 1; rank < size; ++rank) expected[i] += Value(rank, i);
      }
      ASSERT_TRUE(collective.AllReduceSum(absl::MakeSpan(data)).ok());
      ASSERT_EQ(std::memcmp(data.data(), expected.data(), n * sizeof(float)), 0) << "n = " << n;
    }
  });
}

TEST_P(GlooCollectiveTest, GathersInRankOrder) {
  const int size = GetParam();
  RunGroup(size, absl::Seconds(20), [&](GlooCollective& collective) {
    for (const size_t n : {size_t{1}, size_t{40'000}}) {
      std::vector<float> in(n), out(n * static_cast<size_t>(size));
      for (size_t i = 0; i < n; ++i) in[i] = Value(collective.rank(), i);
      ASSERT_TRUE(collective.AllGather(in, absl::MakeSpan(out)).ok());
      for (int rank = 0; rank < size; ++rank) {
        for (size_t i = 0; i < n; ++i) {
          ASSERT_EQ(out[static_cast<size_t>(rank) * n + i], Value(rank, i));
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, GlooCollectiveTest, testing::Values(2, 3, 4));

TEST(GlooCollectiveFailureTest, SilentRankIsDeadlineExceededAndBreaksTheCollective) {
  std::latch done(1);
  RunGroup(2, absl::Seconds(3), [&](GlooCollective& collective) {
    if (collective.rank() == 1) {
      done.wait();  // silent but alive: its socket stays open
      return;
    }
    std::vector<float> data(16);
    const absl::Status status = collective.AllReduceSum(absl::MakeSpan(data));
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_EQ(collective.AllReduceSum(absl::MakeSpan(data)), status);
    done.count_down();
  });
}

TEST(GlooCollectiveFailureTest, LeavingRankIsUnavailableAtOnce) {
  std::latch connected(2);  // a rank that leaves earlier fails the other's Connect
  RunGroup(2, absl::Seconds(20), [&](GlooCollective& collective) {
    connected.arrive_and_wait();
    if (collective.rank() == 1) return;
    std::vector<float> data(16);
    const absl::Status status = collective.AllReduceSum(absl::MakeSpan(data));
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  });
}

TEST(GlooCollectiveFailureTest, RanksOutOfStepAreAnErrorAndNotGarbage) {
  RunGroup(2, absl::Seconds(20), [](GlooCollective& collective) {
    std::vector<float> data(static_cast<size_t>(16 + collective.rank()));
    const absl::Status status = collective.AllReduceSum(absl::MakeSpan(data));
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
  });
}

TEST(GlooCollectiveFailureTest, FailedRendezvousEndsConnect) {
  Relay relay(2);
  std::thread failing([&] { relay.rank(0).Fail(absl::CancelledError("the stream ended")); });
  const auto collective = GlooCollective::Connect({.rank = 0, .size = 2}, relay.rank(0));
  failing.join();
  EXPECT_EQ(collective.status(), absl::CancelledError("the stream ended"));
}

TEST(GlooCollectiveFailureTest, MissingRankEndsConnectAtTheDeadline) {
  Relay relay(2);
  const auto collective = GlooCollective::Connect(
      {.rank = 0, .size = 2, .rendezvous_timeout = absl::Milliseconds(50)}, relay.rank(0));
  EXPECT_EQ(collective.status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST(SingleCollectiveTest, IsItsOwnSum) {
  SingleCollective collective;
  std::vector<float> data = {1, 2}, out(2);
  ASSERT_TRUE(collective.AllReduceSum(absl::MakeSpan(data)).ok());
  ASSERT_TRUE(collective.AllGather(data, absl::MakeSpan(out)).ok());
  EXPECT_THAT(out, testing::ElementsAre(1, 2));
}

}  // namespace
}  // namespace kvasir::worker
