#include "worker/checkpoint/input_file.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace kvasir::worker {
namespace {

// Linux transfers at most about 2 GiB a call.
constexpr int64_t kMaxReadBytes = int64_t{1} << 30;

}  // namespace

absl::StatusOr<InputFile> InputFile::Open(const std::string& path) {
  // O_NONBLOCK: opening a FIFO must not wait for its writer. It has no effect on regular files.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path));
  InputFile file(path, fd);
  struct stat status = {};
  if (fstat(fd, &status) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot examine ", path));
  }
  if (!S_ISREG(status.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is not a regular file"));
  }
  file.size_bytes_ = status.st_size;
  return file;
}

InputFile::~InputFile() {
  if (fd_ >= 0) close(fd_);
}

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)),
      fd_(std::exchange(other.fd_, -1)),
      size_bytes_(other.size_bytes_) {}

InputFile& InputFile::operator=(InputFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(fd_, other.fd_);
  std::swap(size_bytes_, other.size_bytes_);
  return *this;
}

absl::Status InputFile::ReadAt(int64_t offset, int64_t size, void* out) const {
  char* next = static_cast<char*>(out);
  while (size > 0) {
    const ssize_t n = pread(fd_, next, static_cast<size_t>(std::min(size, kMaxReadBytes)), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      return absl::ErrnoToStatus(
          errno, absl::StrCat("cannot read ", size, " bytes at ", offset, " of ", path_));
    }
    if (n == 0) {
      return absl::DataLossError(absl::StrCat(
          path_, " ends at byte ", offset, ", ", size, " bytes before the end of a read; it had ",
          size_bytes_, " bytes when it was opened and was changed since"));
    }
    next += n;
    offset += n;
    size -= n;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadTextFile(const std::string& path, int64_t max_bytes) {
  KVASIR_ASSIGN_OR_RETURN(const InputFile file, InputFile::Open(path));
  if (file.size_bytes() > max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " has ", file.size_bytes(), " bytes, expected at most ", max_bytes));
  }
  std::string text(static_cast<size_t>(file.size_bytes()), '\0');
  KVASIR_RETURN_IF_ERROR(file.ReadAt(0, file.size_bytes(), text.data()));
  return text;
}

}  // namespace kvasir::worker
