#include "worker/backend/memory_limit.h"

#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/scratch_directory.h"

namespace kvasir::worker {
namespace {

class MemoryLimitTest : public ::testing::Test {
 protected:
  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_.path() + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  absl::Status Check(int64_t bytes) {
    return CheckMemoryLimit(bytes, "--kv-host-size-gb", root_.path());
  }

  testing::ScratchDirectory root_;
};

TEST_F(MemoryLimitTest, WithoutLimitsAnythingIsAllowed) {
  EXPECT_TRUE(Check(int64_t{1} << 50).ok());
  Write("/proc/self/cgroup", "0::/a\n");
  Write("/sys/fs/cgroup/a/memory.max", "max\n");
  EXPECT_TRUE(Check(int64_t{1} << 50).ok());
}

TEST_F(MemoryLimitTest, WhatTheGroupHoldsIsTaken) {
  Write("/proc/self/cgroup", "0::/\n");
  Write("/sys/fs/cgroup/memory.max", "1000\n");
  Write("/sys/fs/cgroup/memory.stat", "file 700\nanon 300\nanon_thp 0\n");
  EXPECT_TRUE(Check(700).ok());
  const absl::Status refused = Check(701);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  for (const char* part : {"701", "1000", "300", "--kv-host-size-gb"}) {
    EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr(part));
  }
}

TEST_F(MemoryLimitTest, TheTightestGroupAboveCounts) {
  Write("/proc/self/cgroup", "0::/pod/container\n");
  Write("/sys/fs/cgroup/pod/container/memory.max", "max\n");
  Write("/sys/fs/cgroup/pod/memory.max", "500\n");
  Write("/sys/fs/cgroup/memory.max", "1000\n");
  EXPECT_TRUE(Check(500).ok());
  EXPECT_FALSE(Check(501).ok());
}

TEST_F(MemoryLimitTest, GroupsOfTheFirstVersionCountToo) {
  Write("/proc/self/cgroup", "9:cpu:/x\n4:memory:/x\n");
  Write("/sys/fs/cgroup/memory/x/memory.limit_in_bytes", "100\n");
  Write("/sys/fs/cgroup/memory/x/memory.stat", "total_rss 40\n");
  EXPECT_TRUE(Check(60).ok());
  EXPECT_FALSE(Check(61).ok());
}

TEST_F(MemoryLimitTest, WhatIsLeftIsThatOfTheTightestGroup) {
  Write("/proc/self/cgroup", "0::/pod/container\n");
  Write("/proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n");
  EXPECT_EQ(HostMemoryLeft(root_.path()), 8000 * 1024);
  Write("/sys/fs/cgroup/pod/container/memory.max", "max\n");
  EXPECT_EQ(HostMemoryLeft(root_.path()), 8000 * 1024);
  Write("/sys/fs/cgroup/memory.max", "1000\n");
  Write("/sys/fs/cgroup/pod/memory.max", "500\n");
  Write("/sys/fs/cgroup/pod/memory.stat", "file 400\nanon 300\n");
  EXPECT_EQ(HostMemoryLeft(root_.path()), 200);
  Write("/sys/fs/cgroup/pod/memory.stat", "anon 600\n");
  EXPECT_EQ(HostMemoryLeft(root_.path()), 0);
}

}  // namespace
}  // namespace kvasir::worker
