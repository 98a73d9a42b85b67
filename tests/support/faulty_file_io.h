// A FileIo that fails on purpose, over a real one: errors, short transfers, a disk that fills up,
// flipped bits, a crash that loses what was not synced. Which request is hit follows from a seed.
// Tests keep the FaultControl and hand the FileIo to the disk tier. Thread-safe.
#pragma once

#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/buffer.h"
#include "kernels/base/mutex.h"
#include "kvstore/format/page_format.h"
#include "kvstore/tiers/file_io.h"

namespace kvasir::kvstore {

// Chances are per request, in [0, 1].
struct Faults {
  double read_error = 0;   // EIO
  double write_error = 0;  // EIO
  double sync_error = 0;   // EIO
  double open_error = 0;   // EACCES, of new files
  double size_error = 0;   // EIO
  double short_transfer = 0;
  double flip_read = 0;      // one bit of what was read
  bool no_holes = false;     // a file system without PunchHole
  bool hold_create = false;  // the creation of files waits for the next Set
  int64_t free_bytes = -1;   // that the disk still takes; -1: no limit
};

class FaultControl {
 public:
  explicit FaultControl(uint32_t seed) : rng_(seed) {}

  void Set(const Faults& faults) {
    kernels::MutexLock lock(mu_);
    faults_ = faults;
    changed_.NotifyAll();
  }
  // Waits while the creation of files does.
  void HoldCreation() {
    kernels::MutexLock lock(mu_);
    is_holding_ = faults_.hold_create;
    changed_.NotifyAll();
    while (faults_.hold_create) changed_.Wait(mu_);
    is_holding_ = false;
  }
  // Waits until the creation of a file waits.
  void AwaitHolding() {
    kernels::MutexLock lock(mu_);
    while (!is_holding_) changed_.Wait(mu_);
  }
  Faults faults() const {
    kernels::MutexLock lock(mu_);
    return faults_;
  }
  bool Hits(double chance) {
    kernels::MutexLock lock(mu_);
    return chance > 0 && std::uniform_real_distribution<double>(0, 1)(rng_) < chance;
  }
  uint64_t Random(uint64_t below) {
    kernels::MutexLock lock(mu_);
    return rng_() % below;
  }
  // Bytes of `wanted` that the disk still takes; takes them.
  int64_t TakeSpace(int64_t wanted) {
    kernels::MutexLock lock(mu_);
    if (faults_.free_bytes < 0) return wanted;
    const int64_t taken =
        std::min(wanted, faults_.free_bytes / kExtentAlignment * kExtentAlignment);
    faults_.free_bytes -= taken;
    return taken;
  }
  void GiveSpace(int64_t bytes) {
    kernels::MutexLock lock(mu_);
    if (faults_.free_bytes >= 0) faults_.free_bytes += bytes;
  }

  void NoteWrite(const std::string& path, int64_t offset, int64_t bytes) {
    kernels::MutexLock lock(mu_);
    unsynced_[path].emplace_back(offset, bytes);
  }
  void NoteSync(const std::string& path) {
    kernels::MutexLock lock(mu_);
    unsynced_.erase(path);
  }
  // Power is lost: of the writes since a file's last sync any may be missing. To be called when the
  // store is closed.
  void Crash(FileIo& files) {
    const std::unique_ptr<IoQueue> queue = files.NewQueue();
    for (const auto& [path, writes] : unsynced_) {
      auto file = files.Open(path, FileIo::Mode::kExisting);
      if (!file.ok()) continue;
      for (const auto& [offset, bytes] : writes) {
        if (rng_() % 2 == 0) continue;
        const std::vector<std::byte> zeros(static_cast<size_t>(bytes + kExtentAlignment));
        auto* memory = const_cast<std::byte*>(zeros.data());
        memory += -reinterpret_cast<uintptr_t>(memory) % kExtentAlignment;
        IoRequest request = {.op = IoRequest::Op::kWrite,
                             .file = file->get(),
                             .offset = offset,
                             .memory = {memory, static_cast<size_t>(bytes)},
                             .result = 0};
        RunFully(*queue, absl::MakeSpan(&request, 1));
      }
    }
    unsynced_.clear();
  }

 private:
  mutable kernels::Mutex mu_;
  kernels::CondVar changed_;
  Faults faults_ GUARDED_BY(mu_);
  bool is_holding_ GUARDED_BY(mu_) = false;
  std::mt19937 rng_;
  std::map<std::string, std::vector<std::pair<int64_t, int64_t>>> unsynced_;
};

class FaultyFile : public File {
 public:
  FaultyFile(std::unique_ptr<File> base, std::string path)
      : base_(std::move(base)), path_(std::move(path)) {}
  File& base() const { return *base_; }
  const std::string& path() const { return path_; }

 private:
  const std::unique_ptr<File> base_;
  const std::string path_;
};

class FaultyQueue : public IoQueue {
 public:
  FaultyQueue(std::unique_ptr<IoQueue> base, std::shared_ptr<FaultControl> control)
      : base_(std::move(base)), control_(std::move(control)) {}

  void Run(absl::Span<IoRequest> batch) override {
    for (IoRequest& request : batch) RunOne(request);
  }

 private:
  void RunOne(IoRequest& request) {
    const Faults faults = control_->faults();
    auto& file = static_cast<FaultyFile&>(*request.file);
    const bool is_write = request.op == IoRequest::Op::kWrite;
    if (control_->Hits(is_write ? faults.write_error : faults.read_error)) {
      request.result = -EIO;
      return;
    }
    IoRequest part = request;
    part.file = &file.base();
    const uint64_t units = request.memory.size() / kExtentAlignment;
    if (units > 1 && control_->Hits(faults.short_transfer)) {
      part.memory = part.memory.first((1 + control_->Random(units - 1)) * kExtentAlignment);
    }
    if (is_write) {
      const int64_t taken = control_->TakeSpace(static_cast<int64_t>(part.memory.size()));
      if (taken == 0) {
        request.result = -ENOSPC;
        return;
      }
      part.memory = part.memory.first(static_cast<size_t>(taken));
    }
    base_->Run(absl::MakeSpan(&part, 1));
    request.result = part.result;
    if (is_write) control_->NoteWrite(file.path(), part.offset, part.result);
    if (!is_write && part.result > 0 && control_->Hits(faults.flip_read)) {
      const uint64_t bit = control_->Random(static_cast<uint64_t>(part.result) * 8);
      part.memory[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    }
  }

  const std::unique_ptr<IoQueue> base_;
  const std::shared_ptr<FaultControl> control_;
};

class FaultyFileIo : public FileIo {
 public:
  FaultyFileIo(std::unique_ptr<FileIo> base, std::shared_ptr<FaultControl> control)
      : base_(std::move(base)), control_(std::move(control)) {}

  absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path, Mode mode) override {
    if (mode == Mode::kCreate) {
      control_->HoldCreation();
      if (control_->Hits(control_->faults().open_error)) {
        return absl::ErrnoToStatus(EACCES, "cannot create " + path);
      }
    }
    auto file = base_->Open(path, mode);
    if (!file.ok()) return file.status();
    return std::make_unique<FaultyFile>(*std::move(file), path);
  }
  std::unique_ptr<IoQueue> NewQueue() override {
    return std::make_unique<FaultyQueue>(base_->NewQueue(), control_);
  }
  absl::StatusOr<int64_t> Size(File& file) override {
    if (control_->Hits(control_->faults().size_error)) return absl::ErrnoToStatus(EIO, "size");
    return base_->Size(Base(file));
  }
  absl::Status Sync(File& file) override {
    if (control_->Hits(control_->faults().sync_error)) return absl::ErrnoToStatus(EIO, "sync");
    control_->NoteSync(static_cast<FaultyFile&>(file).path());
    return base_->Sync(Base(file));
  }
  absl::Status PunchHole(File& file, int64_t offset, int64_t bytes) override {
    if (control_->faults().no_holes) return absl::UnimplementedError("no holes");
    control_->GiveSpace(bytes);
    return base_->PunchHole(Base(file), offset, bytes);
  }
  absl::Status Remove(const std::string& path) override { return base_->Remove(path); }
  absl::StatusOr<std::vector<std::string>> List(const std::string& directory) override {
    return base_->List(directory);
  }
  absl::Status MakeDirectory(const std::string& directory) override {
    return base_->MakeDirectory(directory);
  }
  absl::StatusOr<std::unique_ptr<File>> Lock(const std::string& path) override {
    return base_->Lock(path);
  }
  absl::Status CheckLock(File& lock, const std::string& path) override {
    return base_->CheckLock(lock, path);
  }
  absl::Status SyncDirectory(const std::string& directory) override {
    return base_->SyncDirectory(directory);
  }

 private:
  static File& Base(File& file) { return static_cast<FaultyFile&>(file).base(); }

  const std::unique_ptr<FileIo> base_;
  const std::shared_ptr<FaultControl> control_;
};

}  // namespace kvasir::kvstore
