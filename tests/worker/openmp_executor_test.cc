#include "worker/openmp_executor.h"

#include <atomic>
#include <vector>

#include "gtest/gtest.h"

namespace kvasir::worker {
namespace {

TEST(OpenMpExecutorTest, CallsEachIndexOnceAndSharesNoThreadNumber) {
  OpenMpExecutor executor(3);
  EXPECT_EQ(executor.num_threads(), 3);
  for (const int64_t n : {0, 1, 2, 1000}) {
    std::vector<std::atomic<int>> calls(static_cast<size_t>(n));
    std::vector<std::atomic<int>> busy(3);
    executor.ParallelFor(n, [&](int64_t i, int thread) {
      ASSERT_GE(thread, 0);
      ASSERT_LT(thread, 3);
      EXPECT_EQ(busy[static_cast<size_t>(thread)].fetch_add(1), 0);
      ++calls[static_cast<size_t>(i)];
      busy[static_cast<size_t>(thread)].fetch_sub(1);
    });
    for (const std::atomic<int>& count : calls) EXPECT_EQ(count, 1);
  }
}

TEST(OpenMpExecutorTest, ZeroThreadsIsAllCores) { EXPECT_GE(OpenMpExecutor(0).num_threads(), 1); }

}  // namespace
}  // namespace kvasir::worker
