// The seam to the file system: every operation that the disk tier needs. Reads and writes go in
// batches through queues: io_uring where the kernel allows it, else a few threads with pread and
// pwrite. Files are opened with O_DIRECT where the file system supports it, so offsets, sizes and
// memory of requests are multiples of kExtentAlignment. tests/support has a double that fails on
// purpose. Thread-safe, except queues: one thread each.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvasir::kvstore {

class File {
 public:
  virtual ~File() = default;
};

struct IoRequest {
  enum class Op : uint8_t { kRead, kWrite };
  Op op = Op::kRead;
  File* file = nullptr;
  int64_t offset = 0;
  absl::Span<std::byte> memory;  // a write only reads it
  int64_t result = 0;            // bytes moved, maybe fewer than requested, or -errno
};

class IoQueue {
 public:
  virtual ~IoQueue() = default;
  // Carries out the requests, in any order, and sets their results. Returns when all are done.
  virtual void Run(absl::Span<IoRequest> batch) = 0;
};

class FileIo {
 public:
  enum class Mode : uint8_t { kCreate, kExisting };

  virtual ~FileIo() = default;
  // Opens for reading and writing. kCreate: the file must not exist.
  virtual absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path, Mode mode) = 0;
  virtual std::unique_ptr<IoQueue> NewQueue() = 0;
  virtual absl::StatusOr<int64_t> Size(File& file) = 0;
  // Makes all bytes written so far survive a crash.
  virtual absl::Status Sync(File& file) = 0;
  // Gives the space back; the range then reads as zeros. UNIMPLEMENTED where the file system
  // cannot.
  virtual absl::Status PunchHole(File& file, int64_t offset, int64_t bytes) = 0;
  virtual absl::Status Remove(const std::string& path) = 0;
  // Returns names, without "." and "..", in ascending order.
  virtual absl::StatusOr<std::vector<std::string>> List(const std::string& directory) = 0;
  // Creates the directory and its parents, or does nothing if it exists. Only the owner may enter
  // it.
  virtual absl::Status MakeDirectory(const std::string& directory) = 0;
  // Takes a lock that lasts as long as the file; FAILED_PRECONDITION, naming the owner, when
  // another process has it.
  virtual absl::StatusOr<std::unique_ptr<File>> Lock(const std::string& path) = 0;
  // UNAVAILABLE when the locked file is no longer at the path: it was removed.
  virtual absl::Status CheckLock(File& lock, const std::string& path) = 0;
  // Makes the creation of files in it survive a crash.
  virtual absl::Status SyncDirectory(const std::string& directory) = 0;
};

enum class IoEngine : uint8_t { kIoUringOrThreads, kThreads };

std::unique_ptr<FileIo> MakeFileIo(IoEngine engine);
// Returns "io_uring" or "threads": what a queue made now would use.
absl::string_view IoEngineInUse(IoEngine engine);

// Runs the batch to its end, resuming requests that moved fewer bytes than requested. Returns one
// status per request: DATA_LOSS where a file ends too early, otherwise the system's error.
std::vector<absl::Status> RunFully(IoQueue& queue, absl::Span<IoRequest> batch);
// Does the same with requests that follow each other in a file and in memory as one, of at most
// kMergedBytes. They fail together.
inline constexpr int64_t kMergedBytes = int64_t{4} << 20;
std::vector<absl::Status> RunMerged(IoQueue& queue, absl::Span<const IoRequest> batch);

}  // namespace kvasir::kvstore
