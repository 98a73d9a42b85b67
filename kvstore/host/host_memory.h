// The memory of the host tier, which outlives the store over it: the extents that a store sealed
// are still there for the next one, also when their process was killed. It is a file on tmpfs, or a
// memfd; nothing of it reaches a disk. A small header says whose KV it is. What a store finds in an
// extent must be verified before use: this file only hides where the memory comes from and who may
// have it. Made by the worker, which lends it to one store after another. Thread-compatible, except
// Reserve and MayTouch.
//
//   file: [header 4 KiB][extent][extent] ...      extents as in kvstore/format/page_format.h
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/mutex.h"
#include "kvstore/format/page_format.h"

namespace kvasir::kvstore {

class HostMemory {
 public:
  // `path` is a file on tmpfs, made with mode 0600 if there is none, or /proc/self/fd/N of a memfd
  // that was handed down. Empty: memory that ends with the process. INVALID_ARGUMENT for a file
  // that is not in memory, PERMISSION_DENIED for one of another user, FAILED_PRECONDITION while
  // another process has it.
  static absl::StatusOr<std::unique_ptr<HostMemory>> Open(const std::string& path);
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;
  ~HostMemory();

  // Makes it `num_extents` extents of the format and of the rank `owner` says ("rank 0 of 2").
  // Extents that were sealed for the same are kept; others, of another model, form or degree, are
  // erased, and the log says so. No store may use it meanwhile. RESOURCE_EXHAUSTED when the file
  // system has no room.
  absl::Status Fit(const ExtentFormat& format, const std::string& owner, int64_t num_extents);
  // The first extent, aligned to kExtentAlignment. Valid until Fit, Erase or the end.
  std::byte* extents() const { return map_ + kHeaderBytes; }
  // Takes an extent's memory from the system, in huge pages where it can, so that touching it
  // cannot fail. RESOURCE_EXHAUSTED when there is none. Thread-safe; waits for a thread that
  // reserves the same extent.
  absl::Status Reserve(int64_t extent);
  // Whether an extent's first bytes have memory since before Fit: whoever sealed a block in it is
  // among those who touched them. Others must not be touched before they are reserved.
  bool WasTouched(int64_t extent) const { return touched_[static_cast<size_t>(extent)] != 0; }
  // Whether an extent's first bytes may be touched: it is reserved, or was touched before. Then
  // Reserve does not wait for long. Thread-safe.
  bool MayTouch(int64_t extent) const;
  // Size of an extent, since Fit.
  int64_t extent_bytes() const { return extent_bytes_; }
  // Bytes that it has taken from the system.
  int64_t held_bytes() const;
  // Gives all memory back, and with it what it holds.
  void Erase();

 private:
  static constexpr int64_t kHeaderBytes = kExtentAlignment;

  HostMemory(int fd, std::string name) : fd_(fd), name_(std::move(name)) {}
  // Empty when the file holds nothing that this build made.
  std::string ReadIdentity() const;
  absl::Status WriteIdentity(const std::string& identity);
  absl::Status CheckRoom(int64_t bytes) const;
  std::vector<uint8_t> FindTouched(int64_t num_extents) const;
  void Unmap();
  absl::Status TakeMemory(int64_t extent);

  const int fd_;
  const std::string name_;  // for messages
  std::byte* map_ = nullptr;
  int64_t map_bytes_ = 0;
  int64_t extent_bytes_ = 0;
  std::vector<uint8_t> touched_;  // [extent]

  enum class Reserved : uint8_t { kNo, kBegun, kYes };
  mutable kernels::Mutex mu_;
  kernels::CondVar changed_;
  std::vector<Reserved> reserved_ GUARDED_BY(mu_);  // [extent], by this process since Fit
};

}  // namespace kvasir::kvstore
