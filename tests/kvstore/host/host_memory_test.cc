// Memory of the host tier: who may have it, and what it keeps.
#include "kvstore/host/host_memory.h"

#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

#include "tests/kvstore/test_blocks.h"
#include "tests/support/scratch_directory.h"

namespace kvasir::kvstore {
namespace {

using ::testing::HasSubstr;

const ExtentFormat kFormat = ExtentFormat::Create(SmallShard()).value();

class HostMemoryTest : public ::testing::Test {
 protected:
  ~HostMemoryTest() override { close(memfd_); }

  const int memfd_ = memfd_create("test", MFD_CLOEXEC);
  const std::string path_ = absl::StrCat("/proc/self/fd/", memfd_);
};

TEST_F(HostMemoryTest, KeepsItsExtentsWhenItGrowsAndShrinks) {
  for (const int64_t extents : {4, 9, 3}) {
    const auto memory = HostMemory::Open(path_).value();
    ASSERT_EQ(memory->Fit(kFormat, "rank 0 of 1", extents), absl::OkStatus());
    EXPECT_EQ(memory->WasTouched(2), extents != 4);
    ASSERT_EQ(memory->Reserve(2), absl::OkStatus());
    std::byte* const first = memory->extents() + 2 * kFormat.extent_bytes();
    std::byte* const last = first + kFormat.extent_bytes() - 1;
    for (std::byte* byte : {first, last}) {
      EXPECT_EQ(*byte, extents == 4 ? std::byte{0} : std::byte{5});
      *byte = std::byte{5};
    }
  }
}

TEST_F(HostMemoryTest, KvOfOthersIsErased) {
  KvShard other = SmallShard();
  other.weights_hash = std::string(32, 'x');
  const ExtentFormat foreign = ExtentFormat::Create(other).value();
  KvShard quantized = SmallShard();
  quantized.kv_form = "rotated/float8";
  const ExtentFormat form = ExtentFormat::Create(quantized).value();
  const auto memory = HostMemory::Open(path_).value();
  int64_t fits = 0;
  for (const auto& [format, owner] : {std::pair(&kFormat, "rank 0 of 1"),
                                      {&foreign, "rank 0 of 1"},
                                      {&form, "rank 0 of 1"},
                                      {&form, "rank 0 of 2"},
                                      {&form, "rank 1 of 2"}}) {
    ASSERT_EQ(memory->Fit(*format, owner, 4), absl::OkStatus());
    EXPECT_FALSE(memory->WasTouched(0)) << owner << " " << fits;
    ASSERT_EQ(memory->Reserve(0), absl::OkStatus());
    EXPECT_EQ(memory->extents()[0], std::byte{0}) << owner << " " << fits;
    memory->extents()[0] = std::byte{7};
    ++fits;
  }
}

TEST_F(HostMemoryTest, ADamagedHeaderIsNobodys) {
  {
    const auto memory = HostMemory::Open(path_).value();
    ASSERT_EQ(memory->Fit(kFormat, "rank 0 of 1", 4), absl::OkStatus());
    ASSERT_EQ(memory->Reserve(0), absl::OkStatus());
  }
  ASSERT_EQ(pwrite(memfd_, "x", 1, 20), 1);
  const auto memory = HostMemory::Open(path_).value();
  ASSERT_EQ(memory->Fit(kFormat, "rank 0 of 1", 4), absl::OkStatus());
  EXPECT_FALSE(memory->WasTouched(0));
}

TEST_F(HostMemoryTest, ErasedMemoryIsGivenBack) {
  const auto memory = HostMemory::Open(path_).value();
  ASSERT_EQ(memory->Fit(kFormat, "", 100), absl::OkStatus());
  for (int64_t extent = 0; extent < 100; ++extent) ASSERT_TRUE(memory->Reserve(extent).ok());
  EXPECT_GE(memory->held_bytes(), 100 * kFormat.extent_bytes());
  memory->Erase();
  EXPECT_EQ(memory->held_bytes(), 0);
}

constexpr int64_t kHugePage = int64_t{2} << 20;

// Whether the system makes a huge page of a file's memory when it is asked to: Linux 6.1.
bool MakesHugePages() {
  const int file = memfd_create("probe", MFD_CLOEXEC);
  void* const room = mmap(nullptr, 2 * kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const auto aligned = (reinterpret_cast<uintptr_t>(room) + kHugePage - 1) / kHugePage * kHugePage;
  void* const page = mmap(reinterpret_cast<void*>(aligned), kHugePage, PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_FIXED, file, 0);
  const bool makes = posix_fallocate(file, 0, kHugePage) == 0 &&
                     madvise(page, kHugePage, 25 /* MADV_COLLAPSE */) == 0;
  munmap(room, 2 * kHugePage);
  close(file);
  return makes;
}

// Bytes of the test's memory that are mapped in huge pages.
int64_t HugeBytes() {
  std::ifstream maps("/proc/self/smaps");
  bool is_its = false;
  int64_t kib = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("-") < line.find(" ")) is_its = line.find("memfd:test") != std::string::npos;
    if (is_its && absl::StartsWith(line, "ShmemPmdMapped:")) kib += std::stoll(line.substr(15));
  }
  return kib << 10;
}

// Bug: memory that is shared lay in pages of 4 KiB, and a step that read scattered pages of a long
// context took longer.
TEST_F(HostMemoryTest, LiesInHugePages) {
  if (!MakesHugePages()) GTEST_SKIP() << "the system has no huge pages for shared memory";
  const int64_t extents = 8 * kHugePage / kFormat.extent_bytes();
  for (const bool again : {false, true}) {
    const auto memory = HostMemory::Open(path_).value();
    ASSERT_EQ(memory->Fit(kFormat, "", extents), absl::OkStatus());
    for (int64_t i = 0; i < extents; ++i) {
      ASSERT_EQ(memory->Reserve(i), absl::OkStatus());
      memory->extents()[i * kFormat.extent_bytes()] = std::byte{1};
    }
    EXPECT_GE(HugeBytes(), 7 * kHugePage) << again;  // the last one ends after the file
  }
}

TEST_F(HostMemoryTest, OnlyOneHasItAndOnlyItsUserMayReadIt) {
  ASSERT_EQ(fchmod(memfd_, 0666), 0);
  auto memory = HostMemory::Open(path_).value();
  struct stat file = {};
  ASSERT_EQ(fstat(memfd_, &file), 0);
  EXPECT_EQ(file.st_mode & 0777, 0600u);
  const absl::Status second = HostMemory::Open(path_).status();
  EXPECT_EQ(second.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(second.message()), HasSubstr("in use by another process"));
  memory.reset();
  EXPECT_TRUE(HostMemory::Open(path_).ok());
}

TEST_F(HostMemoryTest, RefusesWhatIsNotInMemory) {
  const testing::ScratchDirectory scratch;
  const absl::Status disk = HostMemory::Open(scratch.path() + "/kv").status();
  EXPECT_EQ(disk.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(disk.message()), HasSubstr("name one on tmpfs"));
  EXPECT_EQ(HostMemory::Open("/nowhere/kv").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(HostMemoryTest, RefusesMoreThanItsFileSystemHas) {
  const std::string path = absl::StrCat("/dev/shm/kvasir-test-", getpid());
  {
    const auto memory = HostMemory::Open(path).value();
    const absl::Status fit = memory->Fit(kFormat, "", int64_t{1} << 40);
    EXPECT_EQ(fit.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(fit.message()), HasSubstr("lower --kv-host-size-gb"));
  }
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace kvasir::kvstore
