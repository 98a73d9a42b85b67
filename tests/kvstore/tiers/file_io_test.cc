#include "kvstore/tiers/file_io.h"

#include <chrono>
#include <cstddef>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <random>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <thread>

#include "kernels/base/buffer.h"
#include "kvstore/format/page_format.h"
#include "tests/support/faulty_file_io.h"
#include "tests/support/scratch_directory.h"

namespace kvasir::kvstore {
namespace {

using testing::ScratchDirectory;

// Memory for requests.
class Aligned {
 public:
  explicit Aligned(int64_t bytes)
      : buffer_(kernels::HostBuffer::Allocate(bytes + kExtentAlignment).value()) {
    std::byte* data = buffer_.data();
    data += -reinterpret_cast<uintptr_t>(data) % kExtentAlignment;
    bytes_ = {data, static_cast<size_t>(bytes)};
  }
  absl::Span<std::byte> bytes() const { return bytes_; }

 private:
  kernels::HostBuffer buffer_;
  absl::Span<std::byte> bytes_;
};

IoRequest Request(IoRequest::Op op, File& file, int64_t offset, absl::Span<std::byte> memory) {
  return {.op = op, .file = &file, .offset = offset, .memory = memory, .result = 0};
}

void FillRandom(absl::Span<std::byte> bytes, uint32_t seed) {
  std::mt19937 rng(seed);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(rng());
}

class FileIoTest : public ::testing::TestWithParam<IoEngine> {
 protected:
  ScratchDirectory directory_;
  std::unique_ptr<FileIo> io_ = MakeFileIo(GetParam());
};

INSTANTIATE_TEST_SUITE_P(Engines, FileIoTest,
                         ::testing::Values(IoEngine::kIoUringOrThreads, IoEngine::kThreads));

TEST_P(FileIoTest, BatchesLargerThanTheRingComeBackWhole) {
  constexpr int64_t kBlocks = 300;
  const auto file = io_->Open(directory_.path() + "/f", FileIo::Mode::kCreate).value();
  const auto queue = io_->NewQueue();
  const Aligned written(kBlocks * kExtentAlignment);
  const Aligned read(kBlocks * kExtentAlignment);
  FillRandom(written.bytes(), 1);
  std::vector<IoRequest> writes;
  std::vector<IoRequest> reads;
  for (int64_t i = 0; i < kBlocks; ++i) {
    const auto at = static_cast<size_t>(i * kExtentAlignment);
    writes.push_back(Request(IoRequest::Op::kWrite, *file, i * kExtentAlignment,
                             written.bytes().subspan(at, kExtentAlignment)));
    reads.push_back(Request(IoRequest::Op::kRead, *file, i * kExtentAlignment,
                            read.bytes().subspan(at, kExtentAlignment)));
  }
  for (const absl::Status& status : RunFully(*queue, absl::MakeSpan(writes))) {
    EXPECT_TRUE(status.ok()) << status;
  }
  EXPECT_TRUE(io_->Sync(*file).ok());
  EXPECT_EQ(io_->Size(*file).value(), kBlocks * kExtentAlignment);
  for (const absl::Status& status : RunFully(*queue, absl::MakeSpan(reads))) {
    EXPECT_TRUE(status.ok()) << status;
  }
  EXPECT_TRUE(std::equal(read.bytes().begin(), read.bytes().end(), written.bytes().begin()));
}

TEST_P(FileIoTest, ReadsBehindTheEndAreDataLoss) {
  const auto file = io_->Open(directory_.path() + "/f", FileIo::Mode::kCreate).value();
  const auto queue = io_->NewQueue();
  const Aligned memory(4 * kExtentAlignment);
  IoRequest write =
      Request(IoRequest::Op::kWrite, *file, 0, memory.bytes().first(kExtentAlignment));
  ASSERT_TRUE(RunFully(*queue, absl::MakeSpan(&write, 1))[0].ok());
  IoRequest read = Request(IoRequest::Op::kRead, *file, 0, memory.bytes());
  EXPECT_EQ(RunFully(*queue, absl::MakeSpan(&read, 1))[0].code(), absl::StatusCode::kDataLoss);
}

TEST_P(FileIoTest, HolesReadAsZeros) {
  const auto file = io_->Open(directory_.path() + "/f", FileIo::Mode::kCreate).value();
  const auto queue = io_->NewQueue();
  const Aligned memory(3 * kExtentAlignment);
  FillRandom(memory.bytes(), 2);
  IoRequest write = Request(IoRequest::Op::kWrite, *file, 0, memory.bytes());
  ASSERT_TRUE(RunFully(*queue, absl::MakeSpan(&write, 1))[0].ok());
  const absl::Status punched = io_->PunchHole(*file, kExtentAlignment, kExtentAlignment);
  if (absl::IsUnimplemented(punched)) GTEST_SKIP() << "this file system has no holes";
  ASSERT_TRUE(punched.ok()) << punched;
  IoRequest read = Request(IoRequest::Op::kRead, *file, 0, memory.bytes());
  ASSERT_TRUE(RunFully(*queue, absl::MakeSpan(&read, 1))[0].ok());
  for (int64_t i = kExtentAlignment; i < 2 * kExtentAlignment; ++i) {
    ASSERT_EQ(memory.bytes()[static_cast<size_t>(i)], std::byte{0});
  }
}

TEST_P(FileIoTest, FilesAreNeitherOverwrittenNorInvented) {
  const std::string path = directory_.path() + "/f";
  EXPECT_EQ(io_->Open(path, FileIo::Mode::kExisting).status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(io_->Open(path, FileIo::Mode::kCreate).ok());
  EXPECT_EQ(io_->Open(path, FileIo::Mode::kCreate).status().code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(io_->List(directory_.path()).value(), std::vector<std::string>{"f"});
  EXPECT_TRUE(io_->Remove(path).ok());
  EXPECT_FALSE(io_->Remove(path).ok());
  EXPECT_FALSE(io_->List(directory_.path() + "/none").ok());
}

TEST(RunFully, ResumesShortTransfersAndReportsErrors) {
  ScratchDirectory directory;
  const auto control = std::make_shared<FaultControl>(3);
  FaultyFileIo io(MakeFileIo(IoEngine::kThreads), control);
  const auto file = io.Open(directory.path() + "/f", FileIo::Mode::kCreate).value();
  const auto queue = io.NewQueue();
  const Aligned written(64 * kExtentAlignment);
  const Aligned read(64 * kExtentAlignment);
  FillRandom(written.bytes(), 3);
  control->Set({.short_transfer = 0.8});
  IoRequest write = Request(IoRequest::Op::kWrite, *file, 0, written.bytes());
  ASSERT_TRUE(RunFully(*queue, absl::MakeSpan(&write, 1))[0].ok());
  IoRequest load = Request(IoRequest::Op::kRead, *file, 0, read.bytes());
  ASSERT_TRUE(RunFully(*queue, absl::MakeSpan(&load, 1))[0].ok());
  EXPECT_TRUE(std::equal(read.bytes().begin(), read.bytes().end(), written.bytes().begin()));
  control->Set({.write_error = 1});
  EXPECT_FALSE(RunFully(*queue, absl::MakeSpan(&write, 1))[0].ok());
  control->Set({.free_bytes = 10 * kExtentAlignment});
  EXPECT_EQ(RunFully(*queue, absl::MakeSpan(&write, 1))[0].code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(RunMerged, NeighboursAreOneRequestAndFailTogether) {
  ScratchDirectory directory;
  const auto control = std::make_shared<FaultControl>(3);
  FaultyFileIo io(MakeFileIo(IoEngine::kThreads), control);
  const auto file = io.Open(directory.path() + "/f", FileIo::Mode::kCreate).value();
  const auto queue = io.NewQueue();
  constexpr int64_t kUnit = kExtentAlignment;
  const Aligned written(4 * kUnit);
  FillRandom(written.bytes(), 5);
  const auto write = [&](int64_t offset, int64_t memory) {
    return Request(IoRequest::Op::kWrite, *file, offset * kUnit,
                   written.bytes().subspan(static_cast<size_t>(memory * kUnit), kUnit));
  };
  // The first two follow each other in both; the third in memory alone, the last in the file alone.
  const std::vector<IoRequest> writes = {write(0, 0), write(1, 1), write(5, 2), write(6, 0)};
  for (const absl::Status& status : RunMerged(*queue, writes)) EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(io.Size(*file).value(), 7 * kUnit);
  const Aligned read(2 * kUnit);
  IoRequest load = Request(IoRequest::Op::kRead, *file, 0, read.bytes());
  ASSERT_TRUE(RunFully(*queue, absl::MakeSpan(&load, 1))[0].ok());
  EXPECT_TRUE(std::equal(read.bytes().begin(), read.bytes().end(), written.bytes().begin()));
  control->Set({.free_bytes = 3 * kUnit / 2});  // the second does not fit
  const std::vector<absl::Status> statuses = RunMerged(*queue, writes);
  EXPECT_FALSE(statuses[0].ok());
  EXPECT_FALSE(statuses[1].ok());
}

// Containers often refuse io_uring; the filter holds for the calling thread and its children.
void RefuseIoUring() {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  sock_fprog program = {.len = 4, .filter = filter};
  ASSERT_EQ(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
  ASSERT_EQ(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0), 0);
}

double WriteAndReadSeconds(IoEngine engine, const std::string& path) {
  constexpr int64_t kExtent = int64_t{4} << 20;
  constexpr int64_t kExtents = 16;
  const auto io = MakeFileIo(engine);
  const auto file = io->Open(path, FileIo::Mode::kCreate).value();
  const auto queue = io->NewQueue();
  const Aligned memory(kExtents * kExtent);
  FillRandom(memory.bytes().first(kExtent), 4);
  const auto start = std::chrono::steady_clock::now();
  for (const auto op : {IoRequest::Op::kWrite, IoRequest::Op::kRead}) {
    std::vector<IoRequest> requests;
    for (int64_t i = 0; i < kExtents; ++i) {
      requests.push_back(
          Request(op, *file, i * kExtent,
                  memory.bytes().subspan(static_cast<size_t>(i * kExtent), kExtent)));
    }
    for (const absl::Status& status : RunFully(*queue, absl::MakeSpan(requests))) {
      EXPECT_TRUE(status.ok()) << status;
    }
    EXPECT_TRUE(io->Sync(*file).ok());
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

TEST(FileIo, FallsBackToThreadsWhereIoUringIsRefused) {
  ScratchDirectory directory;
  const double granted =
      WriteAndReadSeconds(IoEngine::kIoUringOrThreads, directory.path() + "/granted");
  std::thread([&] {
    RefuseIoUring();
    EXPECT_EQ(IoEngineInUse(IoEngine::kIoUringOrThreads), "threads");
    const double refused =
        WriteAndReadSeconds(IoEngine::kIoUringOrThreads, directory.path() + "/refused");
    RecordProperty("granted_seconds", std::to_string(granted));
    RecordProperty("refused_seconds", std::to_string(refused));
  }).join();
}

}  // namespace
}  // namespace kvasir::kvstore
