// A file that appears whole or not at all: it is written beside its place, made durable and then
// moved there. Whoever reads the place meanwhile reads what was there before. A draft that is not
// moved leaves nothing. It hides the draft's name and what makes a file durable. Thread-compatible.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvasir::coordinator {

class DraftFile {
 public:
  enum class Readers { kOwner, kAll };

  // Where the file is until it is moved.
  static std::string DraftOf(const std::string& path);

  // UNAVAILABLE, as of all functions here, with the path and the reason; also when the place is
  // taken by what is no file.
  static absl::StatusOr<DraftFile> Create(std::string path, Readers readers);
  DraftFile(DraftFile&& other) noexcept;
  DraftFile& operator=(DraftFile&&) = delete;
  ~DraftFile();

  absl::Status Write(absl::string_view bytes);
  // Durable when it returns OK. The last call.
  absl::Status MoveToPlace();

 private:
  DraftFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}

  std::string path_;
  int fd_;  // -1: moved
};

// Makes it durable which files are in the folder.
absl::Status SyncFolder(const std::string& folder);

}  // namespace kvasir::coordinator
