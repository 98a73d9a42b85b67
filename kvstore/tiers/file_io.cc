#include "kvstore/tiers/file_io.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <fcntl.h>
#include <filesystem>
#include <liburing.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <system_error>
#include <thread>
#include <unistd.h>

#include "absl/strings/str_cat.h"

#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "kvstore/format/page_format.h"

namespace kvasir::kvstore {
namespace {

constexpr unsigned kRingEntries = 64;
constexpr int kThreads = 4;
// A request that is still not done after this many tries never will be.
constexpr int kMaxTries = 64;

class PosixFile : public File {
 public:
  explicit PosixFile(int fd) : fd_(fd) {}
  ~PosixFile() override { ::close(fd_); }
  int fd() const { return fd_; }

 private:
  const int fd_;
};

int Fd(File* file) { return static_cast<PosixFile*>(file)->fd(); }

absl::Status Result(int returned, absl::string_view what) {
  return returned == 0 ? absl::OkStatus() : absl::ErrnoToStatus(errno, what);
}

class UringQueue : public IoQueue {
 public:
  // Null where the kernel does not allow a ring.
  static std::unique_ptr<UringQueue> Create() {
    auto queue = std::make_unique<UringQueue>();
    if (io_uring_queue_init(kRingEntries, &queue->ring_, 0) != 0) return nullptr;
    queue->initialized_ = true;
    return queue;
  }
  ~UringQueue() override {
    if (initialized_) io_uring_queue_exit(&ring_);
  }

  void Run(absl::Span<IoRequest> batch) override {
    while (!batch.empty()) {
      const size_t wave = std::min<size_t>(batch.size(), kRingEntries);
      RunWave(batch.first(wave));
      batch.remove_prefix(wave);
    }
  }

 private:
  void RunWave(absl::Span<IoRequest> wave) {
    iovec vectors[kRingEntries];
    for (size_t i = 0; i < wave.size(); ++i) {
      IoRequest& request = wave[i];
      vectors[i] = {request.memory.data(), request.memory.size()};
      io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
      const uint64_t offset = static_cast<uint64_t>(request.offset);
      // The first kernels with io_uring have only the vectored forms.
      if (request.op == IoRequest::Op::kRead) {
        io_uring_prep_readv(sqe, Fd(request.file), &vectors[i], 1, offset);
      } else {
        io_uring_prep_writev(sqe, Fd(request.file), &vectors[i], 1, offset);
      }
      io_uring_sqe_set_data(sqe, &request);
    }
    // The kernel may write to the memory until each request has been answered, so nothing ends this
    // early.
    for (size_t done = 0; done < wave.size();) {
      const int submitted = io_uring_submit_and_wait(&ring_, 1);
      KVASIR_CHECK(submitted >= 0 || submitted == -EINTR || submitted == -EAGAIN ||
                   submitted == -EBUSY);
      io_uring_cqe* cqe = nullptr;
      while (io_uring_peek_cqe(&ring_, &cqe) == 0 && cqe != nullptr) {
        static_cast<IoRequest*>(io_uring_cqe_get_data(cqe))->result = cqe->res;
        io_uring_cqe_seen(&ring_, cqe);
        ++done;
      }
    }
  }

  io_uring ring_ = {};
  bool initialized_ = false;
};

class ThreadQueue : public IoQueue {
 public:
  ThreadQueue() {
    for (int i = 0; i < kThreads; ++i) threads_.emplace_back([this] { Work(); });
  }
  ~ThreadQueue() override {
    {
      kernels::MutexLock lock(mu_);
      stop_ = true;
      wake_.NotifyAll();
    }
    for (std::thread& thread : threads_) thread.join();
  }

  void Run(absl::Span<IoRequest> batch) override {
    kernels::MutexLock lock(mu_);
    batch_ = batch;
    left_ = batch.size();
    wake_.NotifyAll();
    while (left_ > 0) done_.Wait(mu_);
  }

 private:
  void Work() {
    mu_.Lock();
    for (;;) {
      while (batch_.empty() && !stop_) wake_.Wait(mu_);
      if (stop_) break;
      IoRequest& request = batch_.front();
      batch_.remove_prefix(1);
      mu_.Unlock();
      Perform(request);
      mu_.Lock();
      if (--left_ == 0) done_.NotifyAll();
    }
    mu_.Unlock();
  }
  static void Perform(IoRequest& request) {
    const int fd = Fd(request.file);
    const auto moved =
        request.op == IoRequest::Op::kRead
            ? ::pread(fd, request.memory.data(), request.memory.size(), request.offset)
            : ::pwrite(fd, request.memory.data(), request.memory.size(), request.offset);
    request.result = moved < 0 ? -errno : moved;
  }

  std::vector<std::thread> threads_;
  kernels::Mutex mu_;
  kernels::CondVar wake_;
  kernels::CondVar done_;
  absl::Span<IoRequest> batch_ GUARDED_BY(mu_);  // not yet taken by a thread
  size_t left_ GUARDED_BY(mu_) = 0;              // not yet done
  bool stop_ GUARDED_BY(mu_) = false;
};

class PosixFileIo : public FileIo {
 public:
  explicit PosixFileIo(IoEngine engine) : engine_(engine) {}

  absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path, Mode mode) override {
    const int flags =
        O_RDWR | O_CLOEXEC | O_NOFOLLOW | (mode == Mode::kCreate ? O_CREAT | O_EXCL : 0);
    int fd = ::open(path.c_str(), flags | O_DIRECT, 0600);
    // Some file systems do not support O_DIRECT; a failed open may have created the file.
    if (fd < 0 && errno == EINVAL) fd = ::open(path.c_str(), flags & ~O_EXCL, 0600);
    if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path));
    return std::make_unique<PosixFile>(fd);
  }
  std::unique_ptr<IoQueue> NewQueue() override {
    if (engine_ == IoEngine::kIoUringOrThreads) {
      if (auto queue = UringQueue::Create(); queue != nullptr) return queue;
    }
    return std::make_unique<ThreadQueue>();
  }
  absl::StatusOr<int64_t> Size(File& file) override {
    struct stat info;
    KVASIR_RETURN_IF_ERROR(Result(::fstat(Fd(&file), &info), "cannot get the size of a segment"));
    return info.st_size;
  }
  absl::Status Sync(File& file) override {
    return Result(::fdatasync(Fd(&file)), "cannot make a segment durable");
  }
  absl::Status PunchHole(File& file, int64_t offset, int64_t bytes) override {
    const int result =
        ::fallocate(Fd(&file), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes);
    if (result != 0 && (errno == EOPNOTSUPP || errno == ENOSYS)) {
      return absl::UnimplementedError("the file system cannot punch holes");
    }
    return Result(result, "cannot punch a hole into a segment");
  }
  absl::Status Remove(const std::string& path) override {
    return Result(::unlink(path.c_str()), absl::StrCat("cannot remove ", path));
  }
  absl::StatusOr<std::vector<std::string>> List(const std::string& directory) override {
    std::error_code error;
    std::vector<std::string> names;
    for (auto it = std::filesystem::directory_iterator(directory, error);
         !error && it != std::filesystem::directory_iterator(); it.increment(error)) {
      names.push_back(it->path().filename().string());
    }
    if (error) return absl::ErrnoToStatus(error.value(), absl::StrCat("cannot list ", directory));
    std::sort(names.begin(), names.end());
    return names;
  }
  absl::Status MakeDirectory(const std::string& directory) override {
    std::error_code error;
    const bool made = std::filesystem::create_directories(directory, error);
    if (!error && made) {
      std::filesystem::permissions(directory, std::filesystem::perms::owner_all, error);
    }
    if (error) return absl::ErrnoToStatus(error.value(), absl::StrCat("cannot make ", directory));
    return absl::OkStatus();
  }
  absl::StatusOr<std::unique_ptr<File>> Lock(const std::string& path) override {
    const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path));
    auto file = std::make_unique<PosixFile>(fd);
    if (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
      char owner[32] = {};
      const auto size = ::pread(fd, owner, sizeof(owner) - 1, 0);
      return absl::FailedPreconditionError(
          absl::StrCat(path, " is locked by process ",
                       size > 0 ? absl::string_view(owner) : absl::string_view("unknown")));
    }
    const std::string owner = absl::StrCat(::getpid());
    if (::ftruncate(fd, 0) != 0 ||
        ::pwrite(fd, owner.data(), owner.size(), 0) != static_cast<ssize_t>(owner.size())) {
      return absl::ErrnoToStatus(errno, absl::StrCat("cannot write ", path));
    }
    return file;
  }
  absl::Status CheckLock(File& lock, const std::string& path) override {
    struct stat locked = {}, found = {};
    if (::fstat(Fd(&lock), &locked) == 0 && ::stat(path.c_str(), &found) == 0 &&
        locked.st_dev == found.st_dev && locked.st_ino == found.st_ino) {
      return absl::OkStatus();
    }
    return absl::UnavailableError(absl::StrCat(path, " was removed under this process"));
  }
  absl::Status SyncDirectory(const std::string& directory) override {
    const int fd = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", directory));
    const PosixFile file(fd);
    return Result(::fsync(fd), absl::StrCat("cannot make ", directory, " durable"));
  }

 private:
  const IoEngine engine_;
};

}  // namespace

std::unique_ptr<FileIo> MakeFileIo(IoEngine engine) {
  return std::make_unique<PosixFileIo>(engine);
}

absl::string_view IoEngineInUse(IoEngine engine) {
  return engine == IoEngine::kIoUringOrThreads && UringQueue::Create() != nullptr ? "io_uring"
                                                                                  : "threads";
}

std::vector<absl::Status> RunFully(IoQueue& queue, absl::Span<IoRequest> batch) {
  std::vector<absl::Status> statuses(batch.size());
  std::vector<IoRequest> rest(batch.begin(), batch.end());
  std::vector<size_t> which(batch.size());
  for (size_t i = 0; i < which.size(); ++i) which[i] = i;
  for (int tries = 0; !rest.empty(); ++tries) {
    if (tries == kMaxTries) {
      for (size_t i : which) statuses[i] = absl::UnavailableError("the file moves no more bytes");
      break;
    }
    queue.Run(absl::MakeSpan(rest));
    size_t kept = 0;
    for (size_t i = 0; i < rest.size(); ++i) {
      IoRequest request = rest[i];
      absl::Status& status = statuses[which[i]];
      const int64_t size = static_cast<int64_t>(request.memory.size());
      if (request.result == size) continue;
      if (request.result < 0 && request.result != -EINTR && request.result != -EAGAIN) {
        status = absl::ErrnoToStatus(static_cast<int>(-request.result),
                                     absl::StrCat(size, " bytes at offset ", request.offset));
        continue;
      }
      if (request.result == 0) {
        status = absl::DataLossError(
            absl::StrCat(size, " bytes at offset ", request.offset, ": the file ends before them"));
        continue;
      }
      // Continues from an aligned place: moving some bytes twice does no harm.
      const int64_t moved =
          std::max<int64_t>(request.result, 0) / kExtentAlignment * kExtentAlignment;
      request.offset += moved;
      request.memory.remove_prefix(static_cast<size_t>(moved));
      rest[kept] = request;
      which[kept++] = which[i];
    }
    rest.resize(kept);
    which.resize(kept);
  }
  return statuses;
}

std::vector<absl::Status> RunMerged(IoQueue& queue, absl::Span<const IoRequest> batch) {
  std::vector<IoRequest> merged;
  std::vector<size_t> which;  // of `merged`, by request of the batch
  for (const IoRequest& request : batch) {
    const auto follows = [&](const IoRequest& last) {
      const auto bytes = static_cast<int64_t>(last.memory.size() + request.memory.size());
      return last.op == request.op && last.file == request.file &&
             last.offset + static_cast<int64_t>(last.memory.size()) == request.offset &&
             last.memory.data() + last.memory.size() == request.memory.data() &&
             bytes <= kMergedBytes;
    };
    if (!merged.empty() && follows(merged.back())) {
      absl::Span<std::byte>& memory = merged.back().memory;
      memory = {memory.data(), memory.size() + request.memory.size()};
    } else {
      merged.push_back(request);
    }
    which.push_back(merged.size() - 1);
  }
  const std::vector<absl::Status> ran = RunFully(queue, absl::MakeSpan(merged));
  std::vector<absl::Status> statuses;
  for (const size_t i : which) statuses.push_back(ran[i]);
  return statuses;
}

}  // namespace kvasir::kvstore
