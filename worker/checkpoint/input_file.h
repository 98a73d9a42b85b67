// A regular file, open for reading at given offsets. It hides the descriptor, partial reads and
// errno. Files are read with pread, never mapped, so a file that shrinks while it is read is an
// error and not a SIGBUS. Called by the loaders of this folder. Thread-safe after Open.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvasir::worker {

class InputFile {
 public:
  // NOT_FOUND, PERMISSION_DENIED and so on as the system says; INVALID_ARGUMENT when it is not a
  // regular file.
  static absl::StatusOr<InputFile> Open(const std::string& path);
  ~InputFile();
  InputFile(InputFile&& other) noexcept;
  InputFile& operator=(InputFile&& other) noexcept;

  const std::string& path() const { return path_; }
  int64_t size_bytes() const { return size_bytes_; }  // when it was opened

  // Reads exactly [offset, offset + size) into `out`. DATA_LOSS when the file ends before that.
  absl::Status ReadAt(int64_t offset, int64_t size, void* out) const;

 private:
  InputFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}

  std::string path_;
  int fd_ = -1;
  int64_t size_bytes_ = 0;
};

// Returns the whole text of a small file. INVALID_ARGUMENT when it has more than `max_bytes`.
absl::StatusOr<std::string> ReadTextFile(const std::string& path, int64_t max_bytes);

}  // namespace kvasir::worker
