#include "worker/start_times.h"

#include <gtest/gtest.h>

namespace kvasir::worker {
namespace {

using std::chrono::milliseconds;

TEST(StartTimes, StagesFollowEachOtherInOneLine) {
  const StartTimes::Clock::time_point begin = {};
  StartTimes times(begin);
  times.Enter("process", begin);
  times.Enter("weights", begin + milliseconds(1000));
  times.Enter("weights", begin + milliseconds(1500));  // still
  times.Enter("KV", begin + milliseconds(5000));
  times.SetBytes("weights", 16'000'000'000);
  EXPECT_EQ(times.Summary(begin + milliseconds(5400)),
            "5.40 s: process 1.00, weights 4.00 (16.0 GB at 4.0 GB/s), KV 0.40");
}

TEST(StartTimes, WithoutStagesThereIsTheWholeTime) {
  EXPECT_EQ(StartTimes({}).Summary(StartTimes::Clock::time_point() + milliseconds(250)), "0.25 s");
}

}  // namespace
}  // namespace kvasir::worker
