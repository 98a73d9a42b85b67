#include "proto/process/work_thread.h"

#include <latch>
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

TEST(WorkThreadTest, StopAwaitsTheWorkThatIsDoneAndDropsWhatIsAddedLater) {
  std::vector<int> done;
  std::latch begun(1);
  WorkThread<int> thread("work", [&](int work) {
    begun.count_down();
    done.push_back(work);
  });
  thread.Add(1);
  begun.wait();
  thread.Stop();
  thread.Add(2);
  thread.Stop();
  EXPECT_EQ(done, std::vector<int>{1});
}

TEST(WorkThreadTest, EndsWithoutWork) {
  const WorkThread<int> thread("work", [](int) {});
}

}  // namespace
}  // namespace kvasir::proto
