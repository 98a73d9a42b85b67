#include "worker/checkpoint/try_parallel_for.h"

#include <array>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

#include "tests/support/thread_executor.h"

namespace kvasir::worker {
namespace {

TEST(TryParallelFor, RunsEveryItemOnce) {
  tests::ThreadExecutor executor(4);
  std::array<std::atomic<int>, 1000> runs = {};
  const absl::Status status = TryParallelFor(executor, 1000, [&](int64_t i, int) {
    ++runs[static_cast<size_t>(i)];
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  for (const std::atomic<int>& count : runs) EXPECT_EQ(count, 1);
}

TEST(TryParallelFor, TheFirstItemThatFailsIsTold) {
  const auto fail_from_seventh = [](int64_t i, int) {
    return i % 7 == 6 ? absl::DataLossError(absl::StrCat(i)) : absl::OkStatus();
  };
  for (const int threads : {1, 4}) {
    tests::ThreadExecutor executor(threads);
    for (int round = 0; round < 100; ++round) {
      EXPECT_EQ(TryParallelFor(executor, 100, fail_from_seventh), absl::DataLossError("6"));
    }
  }
}

TEST(TryParallelFor, NothingIsBegunAfterAnError) {
  kernels::SerialExecutor executor;
  int64_t last = -1;
  const absl::Status status = TryParallelFor(executor, 100, [&](int64_t i, int) {
    last = i;
    return i == 10 ? absl::InternalError("ten") : absl::OkStatus();
  });
  EXPECT_EQ(status, absl::InternalError("ten"));
  EXPECT_EQ(last, 10);
}

}  // namespace
}  // namespace kvasir::worker
