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

#include "kernels/base/status_macros.h"
#include "openssl/sha.h"
#include "proto/text_file.h"

namespace kvasir::coordinator {
namespace {

constexpr absl::string_view kMagic = "KVCTX001";
constexpr size_t kHeadBytes = kMagic.size() + SHA256_DIGEST_LENGTH;
constexpr absl::string_view kSuffix = ".context";

std::string Sha256(absl::string_view bytes) {
  std::string hash(SHA256_DIGEST_LENGTH, '\0');
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(),
         reinterpret_cast<unsigned char*>(hash.data()));
  return hash;
}

absl::Status Failed(absl::string_view what, const std::string& path) {
  return absl::UnavailableError(
      absl::StrCat("contexts: ", path, " cannot be ", what, ": ", std::strerror(errno)));
}

class OpenFile {
 public:
  OpenFile(const std::string& path, int flags) : fd_(open(path.c_str(), flags | O_CLOEXEC, 0600)) {}
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  ~OpenFile() {
    if (fd_ >= 0) close(fd_);
  }

  bool ok() const { return fd_ >= 0; }
  int fd() const { return fd_; }
  bool Write(absl::string_view bytes) const {
    while (!bytes.empty()) {
      const ssize_t written = write(fd_, bytes.data(), bytes.size());
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(written));
    }
    return fsync(fd_) == 0;
  }

 private:
  const int fd_;
};

absl::StatusOr<v1::ContextRecord> Parse(absl::string_view bytes) {
  v1::ContextRecord record;
  if (bytes.size() >= kHeadBytes && bytes.substr(0, kMagic.size()) == kMagic &&
      bytes.substr(kMagic.size(), SHA256_DIGEST_LENGTH) == Sha256(bytes.substr(kHeadBytes)) &&
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

absl::Status RecordFolder::SyncFolder() const {
  const OpenFile folder(path_, O_RDONLY | O_DIRECTORY);
  return folder.ok() && fsync(folder.fd()) == 0 ? absl::OkStatus() : Failed("synced", path_);
}

std::vector<v1::ContextRecord> RecordFolder::Load() const {
  std::vector<v1::ContextRecord> records;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(path_, error)) {
    const std::string path = entry.path().string();
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
  const std::string path = PathOf(record.tenant(), record.name());
  const std::string beside = path + ".new";
  const std::string payload = record.SerializeAsString();
  KVASIR_RETURN_IF_ERROR(MakeFolder());
  {
    const OpenFile file(beside, O_WRONLY | O_CREAT | O_TRUNC);
    if (!file.ok() || !file.Write(absl::StrCat(kMagic, Sha256(payload), payload))) {
      const absl::Status failed = Failed("written", beside);
      unlink(beside.c_str());
      return failed;
    }
  }
  if (rename(beside.c_str(), path.c_str()) != 0) return Failed("moved to its place", beside);
  return SyncFolder();
}

absl::Status RecordFolder::Erase(const std::string& tenant, const std::string& name,
                                 int64_t& bytes) const {
  const std::string path = PathOf(tenant, name);
  const OpenFile file(path, O_WRONLY);
  if (!file.ok()) return errno == ENOENT ? absl::OkStatus() : Failed("opened", path);
  struct stat found = {};
  if (fstat(file.fd(), &found) != 0) return Failed("read", path);
  if (!file.Write(std::string(static_cast<size_t>(found.st_size), '\0'))) {
    return Failed("overwritten", path);
  }
  if (unlink(path.c_str()) != 0) return Failed("removed", path);
  bytes += found.st_size;
  return SyncFolder();
}

}  // namespace kvasir::coordinator
