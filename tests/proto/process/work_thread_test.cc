#include "proto/process/work_thread.h"

#include <chrono>
#include <latch>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace kvasir::proto {
namespace {

TEST(WorkThreadTest, DoesWorkInOrder) {
  constexpr int kWorks = 100;
  std::vector<int> done;
  std::latch all(kWorks);
  WorkThread<int> thread("work", [&](int work) {
    done.push_back(work);
    all.count_down();
  });
  for (int work = 0; work < kWorks; ++work) thread.Add(work);
  all.wait();
  for (int work = 0; work < kWorks; ++work) EXPECT_EQ(done[static_cast<size_t>(work)], work);
}

TEST(WorkThreadTest, StopAwaitsTheWorkThatIsDoneAndDropsTheRest) {
  std::vector<int> done;
  std::latch begun(1);
  WorkThread<int> thread("work", [&](int work) {
    begun.count_down();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    done.push_back(work);
  });
  thread.Add(1);
  thread.Add(2);
  begun.wait();
  thread.Stop();
  EXPECT_EQ(done, std::vector<int>{1});
  thread.Add(3);
  thread.Stop();
  EXPECT_EQ(done, std::vector<int>{1});
}

TEST(WorkThreadTest, EndsWithoutWork) {
  const WorkThread<int> thread("work", [](int) {});
}

}  // namespace
}  // namespace kvasir::proto
