#include "coordinator/contexts/record_folder.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <sys/stat.h>
#include <unistd.h>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "spdlog/spdlog.h"

#include "coordinator/files/draft_file.h"
#include "coordinator/security/sha256.h"
#include "kernels/base/status_macros.h"
#include "proto/text_file.h"

namespace kvasir::coordinator {
namespace {

constexpr absl::string_view kMagic = "KVCTX001";
constexpr size_t kHeadBytes = kMagic.size() + kSha256Bytes;
constexpr absl::string_view kSuffix = ".context";

absl::Status Failed(absl::string_view what, const std::string& path) {
  return absl::UnavailableError(
      absl::StrCat("contexts: ", path, " cannot be ", what, ": ", std::strerror(errno)));
}

absl::Status Prefixed(const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat("contexts: ", status.message()));
}

// Overwrites a file with zeros, durably.
bool Wipe(int fd, int64_t bytes) {
  const std::string zeros(size_t{1} << 16, '\0');
  for (int64_t at = 0; at < bytes;) {
    const int64_t part = std::min<int64_t>(bytes - at, std::ssize(zeros));
    const ssize_t written = pwrite(fd, zeros.data(), static_cast<size_t>(part), at);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    at += written;
  }
  return fsync(fd) == 0;
}

absl::StatusOr<v1::ContextRecord> Parse(absl::string_view bytes) {
  v1::ContextRecord record;
  if (bytes.size() >= kHeadBytes && bytes.substr(0, kMagic.size()) == kMagic &&
      bytes.substr(kMagic.size(), kSha256Bytes) == Sha256(bytes.substr(kHeadBytes)) &&
      record.ParseFromArray(bytes.data() + kHeadBytes,
                            static_cast<int>(bytes.size() - kHeadBytes))) {
    return record;
  }
  return absl::DataLossError("it is damaged, or no record");
}

}  // namespace

absl::StatusOr<RecordFolder> RecordFolder::Open(std::string path) {
  // The folder, or the last one of its path that there is.
  std::filesystem::path there = std::filesystem::absolute(path);
  std::error_code error;
  while (!std::filesystem::exists(there, error) && there.has_relative_path()) {
    there = there.parent_path();
  }
  if (access(there.c_str(), R_OK | W_OK | X_OK) != 0) return Failed("written", there.string());
  return RecordFolder(std::move(path));
}

absl::Status RecordFolder::MakeFolder() const {
  std::filesystem::path made;
  for (const std::filesystem::path& part : std::filesystem::absolute(path_)) {
    made /= part;
    if (mkdir(made.c_str(), 0700) != 0 && errno != EEXIST) return Failed("made", made.string());
  }
  return absl::OkStatus();
}

std::string RecordFolder::PathOf(const std::string& tenant, const std::string& name) const {
  // A length keeps tenant and name apart.
  const std::string hash = Sha256(absl::StrCat(tenant.size(), ":", tenant, name));
  return absl::StrCat(path_, "/", absl::BytesToHexString(hash), kSuffix);
}

std::vector<v1::ContextRecord> RecordFolder::Load() const {
  std::vector<v1::ContextRecord> records;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(path_, error)) {
    const std::string path = entry.path().string();
    if (absl::EndsWith(path, DraftFile::DraftOf(std::string(kSuffix)))) {
      int64_t bytes = 0;
      const absl::Status erased = EraseFile(path, bytes);
      if (!erased.ok()) spdlog::warn("{}", std::string(erased.message()));
    }
    if (!absl::EndsWith(path, kSuffix)) continue;
    const absl::StatusOr<std::string> bytes = proto::ReadTextFile("contexts:", path);
    absl::StatusOr<v1::ContextRecord> record = bytes.ok() ? Parse(*bytes) : bytes.status();
    if (record.ok()) {
      records.push_back(*std::move(record));
    } else {
      spdlog::warn("contexts: {} is left out: {}", path, std::string(record.status().message()));
    }
  }
  return records;
}

absl::Status RecordFolder::Save(const v1::ContextRecord& record) const {
  const std::string payload = record.SerializeAsString();
  KVASIR_RETURN_IF_ERROR(MakeFolder());
  const auto save = [&]() -> absl::Status {
    KVASIR_ASSIGN_OR_RETURN(
        DraftFile file,
        DraftFile::Create(PathOf(record.tenant(), record.name()), DraftFile::Readers::kOwner));
    KVASIR_RETURN_IF_ERROR(file.Write(absl::StrCat(kMagic, Sha256(payload), payload)));
    return file.MoveToPlace();
  };
  return Prefixed(save());
}

absl::Status RecordFolder::Erase(const std::string& tenant, const std::string& name,
                                 int64_t& bytes) const {
  return EraseFile(PathOf(tenant, name), bytes);
}

absl::Status RecordFolder::EraseFile(const std::string& path, int64_t& bytes) const {
  const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC);
  if (fd < 0) return errno == ENOENT ? absl::OkStatus() : Failed("opened", path);
  struct stat found = {};
  const bool is_wiped = fstat(fd, &found) == 0 && Wipe(fd, found.st_size);
  const absl::Status failed = is_wiped ? absl::OkStatus() : Failed("overwritten", path);
  close(fd);
  KVASIR_RETURN_IF_ERROR(failed);
  if (unlink(path.c_str()) != 0) return Failed("removed", path);
  bytes += found.st_size;
  return Prefixed(SyncFolder(path_));
}

}  // namespace kvasir::coordinator
