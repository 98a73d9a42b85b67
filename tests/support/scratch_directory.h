// A new empty directory that goes with its object; in memory for tests that make thousands of files
// durable and do not care how. Thread-compatible.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <gtest/gtest.h>
#include <string>
#include <system_error>
#include <unistd.h>

namespace kvasir::testing {

class ScratchDirectory {
 public:
  enum class On { kDisk, kMemory };

  explicit ScratchDirectory(On on = On::kDisk)
      : path_((on == On::kMemory && ::access("/dev/shm", W_OK) == 0 ? std::string("/dev/shm/")
                                                                    : ::testing::TempDir()) +
              "kvasir_XXXXXX") {
    if (::mkdtemp(path_.data()) == nullptr) std::abort();
  }
  ~ScratchDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace kvasir::testing
