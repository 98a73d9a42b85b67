// A large piece of host memory that the device reads and writes in place, at the host's address:
// the host tier of the KV. It is pinned in pieces, from the first to the last, by threads of its
// own: the system hands out and zeroes every page first, which takes seconds for tens of gigabytes,
// and a worker serves from the first pieces while the others are still on their way. Zeroed; freed
// by the destructor. Only in builds with CUDA. Await may be called on any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/base/mutex.h"

namespace kvasir::worker {

class PinnedRegion {
 public:
  // `num_parts` parts, one behind the other, aligned to a page of memory as their size must be.
  // A copy by the driver may lie in one part, not in several. Nothing is pinned yet.
  // RESOURCE_EXHAUSTED when there is no room: the limits of the process's control groups are looked
  // at before anything is taken; `flag` is the one to lower.
  static absl::StatusOr<std::unique_ptr<PinnedRegion>> Take(int64_t part_bytes, int64_t num_parts,
                                                            absl::string_view flag);
  PinnedRegion(const PinnedRegion&) = delete;
  PinnedRegion& operator=(const PinnedRegion&) = delete;
  // Does not wait for pieces that no thread has begun.
  ~PinnedRegion();

  std::byte* data() const { return data_; }
  int64_t size_bytes() const { return size_bytes_; }

  // Begins to pin; returns when the first piece is. Other calls of the driver may wait for one
  // piece each from here on. Errors as of Await. Called once.
  absl::Status Start();
  // After Start: waits until the part is pinned, before it is touched by anyone. RESOURCE_EXHAUSTED
  // or INTERNAL when it cannot be.
  absl::Status Await(int64_t part) EXCLUDES(mu_);

 private:
  enum class Piece : uint8_t { kWaits, kPinned, kFailed };

  PinnedRegion(std::byte* data, int64_t part_bytes, int64_t num_parts);

  std::byte* begin_of(int64_t piece) const { return data_ + piece * piece_bytes_; }
  // Pins pieces until none is left that nobody has begun.
  void PinPieces(int device) EXCLUDES(mu_);
  absl::Status PinPiece(int64_t piece) EXCLUDES(driver_mu_);
  // Records how a piece ended; says now and then how many there are.
  void EndPiece(int64_t piece, const absl::Status& status) EXCLUDES(mu_);

  // Constant after construction.
  std::byte* const data_;
  const int64_t size_bytes_;
  const int64_t parts_per_piece_;
  const int64_t piece_bytes_;  // of all pieces but the last

  kernels::Mutex mu_;
  kernels::CondVar changed_;
  std::vector<Piece> pieces_ GUARDED_BY(mu_);
  int64_t next_ GUARDED_BY(mu_) = 0;  // piece that nobody has begun
  int64_t num_pinned_ GUARDED_BY(mu_) = 0;
  bool stopping_ GUARDED_BY(mu_) = false;
  absl::Status failed_ GUARDED_BY(mu_);  // the first error; no piece is begun after it

  kernels::Mutex driver_mu_;  // one thread at a time is in the driver

  std::vector<std::thread> threads_;  // last: they use everything above
};

}  // namespace kvasir::worker
