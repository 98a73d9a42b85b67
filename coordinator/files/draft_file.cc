#include "coordinator/files/draft_file.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <unistd.h>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

absl::Status Failed(const std::string& path, absl::string_view reason) {
  return absl::UnavailableError(absl::StrCat(path, " cannot be written: ", reason));
}

}  // namespace

std::string DraftFile::DraftOf(const std::string& path) { return absl::StrCat(path, ".new"); }

absl::StatusOr<DraftFile> DraftFile::Create(std::string path, Readers readers) {
  std::error_code error;
  const std::filesystem::file_status there = std::filesystem::status(path, error);
  if (std::filesystem::exists(there) && !std::filesystem::is_regular_file(there)) {
    return Failed(path, "it is no file");
  }
  const std::string draft = DraftOf(path);
  // A draft of a process that ended. One that another user made is not written to.
  unlink(draft.c_str());
  const int fd = open(draft.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC,
                      readers == Readers::kOwner ? 0600 : 0644);
  if (fd < 0) return Failed(draft, std::strerror(errno));
  return DraftFile(std::move(path), fd);
}

DraftFile::DraftFile(DraftFile&& other) noexcept
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)) {}

DraftFile::~DraftFile() {
  if (fd_ < 0) return;
  close(fd_);
  unlink(DraftOf(path_).c_str());
}

absl::Status DraftFile::Write(absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(fd_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return Failed(DraftOf(path_), std::strerror(errno));
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

absl::Status DraftFile::MoveToPlace() {
  if (fsync(fd_) != 0 || std::rename(DraftOf(path_).c_str(), path_.c_str()) != 0) {
    return Failed(path_, std::strerror(errno));
  }
  close(std::exchange(fd_, -1));
  return SyncFolder(std::filesystem::absolute(path_).parent_path());
}

absl::Status SyncFolder(const std::string& folder) {
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool is_synced = fd >= 0 && fsync(fd) == 0;
  const int error = errno;
  if (fd >= 0) close(fd);
  return is_synced ? absl::OkStatus() : Failed(folder, std::strerror(error));
}

}  // namespace kvasir::coordinator
