#include "worker/thread_pool.h"

#include <atomic>
#include <vector>

#include "gtest/gtest.h"

namespace kvasir::worker {
namespace {

TEST(ThreadPoolTest, CallsEachIndexOnceAndSharesNoThreadNumber) {
  ThreadPool pool(3);
  EXPECT_EQ(pool.num_threads(), 3);
  for (const int64_t n : {0, 1, 2, 1000}) {
    std::vector<std::atomic<int>> calls(static_cast<size_t>(n));
    std::vector<std::atomic<int>> busy(3);
    pool.ParallelFor(n, [&](int64_t i, int thread) {
      ASSERT_GE(thread, 0);
      ASSERT_LT(thread, 3);
      EXPECT_EQ(busy[static_cast<size_t>(thread)].fetch_add(1), 0);
      ++calls[static_cast<size_t>(i)];
      busy[static_cast<size_t>(thread)].fetch_sub(1);
    });
    for (const std::atomic<int>& count : calls) EXPECT_EQ(count, 1);
  }
}

// Loops of different sizes closely follow each other, so that threads are late for most of them.
// The sums are plain: a loop that returns before its last item is done is also a data race.
TEST(ThreadPoolTest, ReturnsWhenAllItemsAreDoneLoopAfterLoop) {
  ThreadPool pool(4);
  std::vector<int64_t> squares(97);
  for (int64_t loop = 0; loop < 20'000; ++loop) {
    const int64_t n = loop % 97 + 1;
    pool.ParallelFor(n, [&](int64_t i, int) { squares[static_cast<size_t>(i)] = loop * i; });
    int64_t sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += squares[static_cast<size_t>(i)];
    ASSERT_EQ(sum, loop * n * (n - 1) / 2);
  }
}

TEST(ThreadPoolTest, OneThreadRunsOnTheCaller) {
  ThreadPool pool(1);
  int sum = 0;
  pool.ParallelFor(10, [&](int64_t i, int thread) {
    EXPECT_EQ(thread, 0);
    sum += static_cast<int>(i);
  });
  EXPECT_EQ(sum, 45);
}

TEST(ThreadPoolTest, ZeroThreadsIsAllCores) { EXPECT_GE(ThreadPool(0).num_threads(), 1); }

}  // namespace
}  // namespace kvasir::worker
