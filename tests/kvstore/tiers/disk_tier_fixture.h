// A disk tier over a folder of its own.
#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <string>
#include <sys/stat.h>
#include <vector>

#include "kvstore/tiers/disk_tier.h"
#include "tests/kvstore/test_blocks.h"
#include "tests/support/scratch_directory.h"

namespace kvasir::kvstore {

inline std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline void WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

class DiskTierTest : public ::testing::Test {
 protected:
  std::vector<std::string> Segments() const {
    std::vector<std::string> paths;
    for (const auto& file : std::filesystem::directory_iterator(segments_)) {
      paths.push_back(file.path());
    }
    std::sort(paths.begin(), paths.end());
    return paths;
  }
  // Returns the space that the file system gave to the segments.
  int64_t DiskBytes() const {
    int64_t bytes = 0;
    for (const std::string& path : Segments()) {
      struct stat info = {};
      EXPECT_EQ(::stat(path.c_str(), &info), 0);
      bytes += info.st_blocks * 512;
    }
    return bytes;
  }

  testing::ScratchDirectory scratch_;
  const std::string directory_ = scratch_.path() + "/kv";
  const std::string segments_ = directory_ + "/segments";
  TestStore store_{directory_};
};

}  // namespace kvasir::kvstore
