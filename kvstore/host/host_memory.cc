#include "kvstore/host/host_memory.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "spdlog/spdlog.h"

#include "kernels/base/status_macros.h"
#include "kvstore/host/freed_memory.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvasir::kvstore {
namespace {

using kernels::MutexLock;

constexpr uint64_t kMagic = 0x59524f4d454d564b;  // "KVMEMORY"
constexpr uint32_t kVersion = 1;
constexpr int kBytesPerStatBlock = 512;
constexpr int64_t kHugePageBytes = int64_t{2} << 20;
constexpr int64_t kPageBytes = 4096;
constexpr int kCollapse = 25;  // MADV_COLLAPSE of Linux 6.1, which glibc 2.36 does not name

// The first bytes of the file.
struct Header {
  uint64_t magic;
  uint32_t version;
  uint32_t identity_bytes;
  char identity[1024];
  uint64_t checksum;  // XXH3_64bits of everything before it
};

uint64_t ChecksumOf(const Header& header) {
  return XXH3_64bits(&header, offsetof(Header, checksum));
}

absl::Status Failed(const std::string& name, absl::string_view what) {
  const int error = errno;
  const auto code = error == ENOSPC || error == ENOMEM  ? absl::StatusCode::kResourceExhausted
                    : error == EACCES || error == EPERM ? absl::StatusCode::kPermissionDenied
                                                        : absl::StatusCode::kInvalidArgument;
  return absl::Status(code,
                      absl::StrCat("KV memory ", name, ": ", what, ": ", std::strerror(error)));
}

absl::Status CheckFile(int fd, const std::string& name) {
  struct statfs system = {};
  struct stat file = {};
  if (fstatfs(fd, &system) != 0 || fstat(fd, &file) != 0) return Failed(name, "cannot look at it");
  if (system.f_type != TMPFS_MAGIC || !S_ISREG(file.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "KV memory ", name,
        " is not a file in memory; name one on tmpfs, as in /dev/shm, or leave the flag out"));
  }
  if (file.st_uid != geteuid()) {
    return absl::PermissionDeniedError(
        absl::StrCat("KV memory ", name, " belongs to user ", file.st_uid, ", this is user ",
                     geteuid(), "; others could read the prompts in it: name another file"));
  }
  if (fchmod(fd, S_IRUSR | S_IWUSR) != 0) return Failed(name, "cannot make it private");
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "KV memory ", name, " is in use by another process; give each worker a file of its own"));
  }
  return absl::OkStatus();
}

// Returns 0, or why there is no memory for this part of the file.
int TakeFromSystem(int fd, int64_t begin, int64_t bytes) {
  int error = 0;
  do {
    error = posix_fallocate(fd, begin, bytes);
  } while (error == EINTR);
  return error;
}

// Maps a file where its huge pages can be huge pages of the address space. Null: errno says why
// not.
std::byte* MapOnHugePages(int fd, int64_t bytes) {
  const auto size = static_cast<size_t>(bytes + kHugePageBytes);
  void* const room = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (room == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(room);
  const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(room) % kHugePageBytes);
  const int64_t before = past == 0 ? 0 : kHugePageBytes - past;
  void* const map = mmap(begin + before, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_FIXED, fd, 0);
  if (map == MAP_FAILED) {
    const int error = errno;
    munmap(room, size);
    errno = error;
    return nullptr;
  }
  if (before > 0) munmap(room, static_cast<size_t>(before));
  munmap(begin + before + bytes, size - static_cast<size_t>(before + bytes));
  madvise(map, static_cast<size_t>(bytes), MADV_HUGEPAGE);  // only a hint
  return static_cast<std::byte*>(map);
}

}  // namespace

absl::StatusOr<std::unique_ptr<HostMemory>> HostMemory::Open(const std::string& path) {
  const std::string name = path.empty() ? "of this process" : path;
  const int fd = path.empty() ? memfd_create("kvasir-kv", MFD_CLOEXEC)
                              : open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, S_IRUSR | S_IWUSR);
  if (fd < 0) return Failed(name, "cannot open it");
  auto memory = std::unique_ptr<HostMemory>(new HostMemory(fd, name));
  KVASIR_RETURN_IF_ERROR(CheckFile(fd, name));
  return memory;
}

HostMemory::~HostMemory() {
  Unmap();
  close(fd_);
}

absl::Status HostMemory::Fit(const ExtentFormat& format, const std::string& owner,
                             int64_t num_extents) {
  const std::string identity = absl::StrCat(format.Fingerprint(), ", ", owner, ", extents of ",
                                            format.extent_bytes(), " bytes");
  const std::string found = ReadIdentity();
  if (found != identity) {
    if (!found.empty()) {
      spdlog::warn("KV memory {} holds KV of {}; this worker's is {}: it starts empty", name_,
                   found, identity);
    }
    Erase();
  }
  const int64_t bytes = kHeaderBytes + num_extents * format.extent_bytes();
  if (bytes != map_bytes_) {
    Unmap();
    KVASIR_RETURN_IF_ERROR(CheckRoom(bytes));
    if (ftruncate(fd_, bytes) != 0) return Failed(name_, "cannot resize it");
    map_ = MapOnHugePages(fd_, bytes);
    if (map_ == nullptr) return Failed(name_, absl::StrCat("cannot map ", bytes, " bytes"));
    map_bytes_ = bytes;
  }
  extent_bytes_ = format.extent_bytes();
  touched_ = FindTouched(num_extents);
  {
    MutexLock lock(mu_);
    reserved_.assign(static_cast<size_t>(num_extents), Reserved::kNo);
  }
  return found == identity ? absl::OkStatus() : WriteIdentity(identity);
}

std::string HostMemory::ReadIdentity() const {
  Header header = {};
  if (pread(fd_, &header, sizeof(header), 0) != ssize_t{sizeof(header)} || header.magic != kMagic ||
      header.version != kVersion || header.identity_bytes > sizeof(header.identity) ||
      header.checksum != ChecksumOf(header)) {
    return "";
  }
  return std::string(header.identity, header.identity_bytes);
}

absl::Status HostMemory::WriteIdentity(const std::string& identity) {
  Header header = {};
  KVASIR_CHECK(identity.size() <= sizeof(header.identity));
  header.magic = kMagic;
  header.version = kVersion;
  header.identity_bytes = static_cast<uint32_t>(identity.size());
  std::memcpy(header.identity, identity.data(), identity.size());
  header.checksum = ChecksumOf(header);
  if (pwrite(fd_, &header, sizeof(header), 0) == ssize_t{sizeof(header)}) return absl::OkStatus();
  return Failed(name_, "cannot write its header");
}

// A mount without a limit has 0 blocks.
absl::Status HostMemory::CheckRoom(int64_t bytes) const {
  struct statfs system = {};
  if (fstatfs(fd_, &system) != 0) return Failed(name_, "cannot look at its file system");
  const int64_t room = static_cast<int64_t>(system.f_bavail) * system.f_bsize;
  if (system.f_blocks == 0 || bytes - held_bytes() <= room) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "KV memory ", name_, ": need ", bytes, " bytes, it has ", held_bytes(),
      " and its file system ", room, " more; enlarge that, or lower --kv-host-size-gb"));
}

absl::Status HostMemory::Reserve(int64_t extent) {
  const auto index = static_cast<size_t>(extent);
  {
    MutexLock lock(mu_);
    while (reserved_[index] == Reserved::kBegun) changed_.Wait(mu_);
    if (reserved_[index] == Reserved::kYes) return absl::OkStatus();
    reserved_[index] = Reserved::kBegun;
  }
  absl::Status taken = TakeMemory(extent);
  MutexLock lock(mu_);
  reserved_[index] = taken.ok() ? Reserved::kYes : Reserved::kNo;
  changed_.NotifyAll();
  return taken;
}

bool HostMemory::MayTouch(int64_t extent) const {
  if (WasTouched(extent)) return true;
  MutexLock lock(mu_);
  return reserved_[static_cast<size_t>(extent)] == Reserved::kYes;
}

// Takes whole huge pages, with parts of the extents beside it. KV is read in scattered pages, and
// the system makes huge pages of memory that is shared only when it is asked for each of them:
// `shmem_enabled` is `never` on most machines. It makes one where at least one page is; if all are,
// it takes and zeroes them one by one, and copies them, five times as long.
absl::Status HostMemory::TakeMemory(int64_t extent) {
  const int64_t at = kHeaderBytes + extent * extent_bytes_;
  const int64_t begin = at / kHugePageBytes * kHugePageBytes;
  const int64_t last = (at + extent_bytes_ - 1) / kHugePageBytes;
  const int64_t end = std::min((last + 1) * kHugePageBytes, map_bytes_);
  const int64_t whole_end = end / kHugePageBytes * kHugePageBytes;
  int error = 0;
  for (int64_t page = begin; page < whole_end && error == 0; page += kHugePageBytes) {
    error = TakeFromSystem(fd_, page, kPageBytes);
  }
  if (error == 0 && begin < whole_end) {
    madvise(map_ + begin, static_cast<size_t>(whole_end - begin), kCollapse);  // only for speed
  }
  if (error == 0) error = TakeFromSystem(fd_, begin, end - begin);
  errno = error;
  if (error == 0) return absl::OkStatus();
  return Failed(name_, absl::StrCat("no memory for extent ", extent));
}

std::vector<uint8_t> HostMemory::FindTouched(int64_t num_extents) const {
  std::vector<uint8_t> touched(static_cast<size_t>(num_extents));
  for (off_t at = kHeaderBytes; (at = lseek(fd_, at, SEEK_DATA)) >= 0;) {
    const off_t end = lseek(fd_, at, SEEK_HOLE);
    const int64_t first = (at - kHeaderBytes + extent_bytes_ - 1) / extent_bytes_;
    const int64_t last =
        std::min<int64_t>((end - kHeaderBytes - 1) / extent_bytes_, num_extents - 1);
    for (int64_t i = first; i <= last; ++i) touched[static_cast<size_t>(i)] = 1;
    at = end;
  }
  return touched;
}

int64_t HostMemory::held_bytes() const {
  struct stat file = {};
  return fstat(fd_, &file) == 0 ? static_cast<int64_t>(file.st_blocks) * kBytesPerStatBlock : 0;
}

void HostMemory::Erase() {
  Unmap();
  if (ftruncate(fd_, 0) != 0) {
    spdlog::error("KV memory {}: cannot erase it: {}", name_, std::strerror(errno));
  }
}

void HostMemory::Unmap() {
  if (map_ == nullptr) return;
  MarkTaken(map_, map_bytes_);  // others may get these addresses
  munmap(map_, static_cast<size_t>(map_bytes_));
  map_ = nullptr;
  map_bytes_ = 0;
}

}  // namespace kvasir::kvstore
