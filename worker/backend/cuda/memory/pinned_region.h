// Pins a large piece of host memory, so that the device reads and writes it in place, at the host's
// address: the host tier of the KV (kvstore/host/host_memory.h). Its own threads pin it piece by
// piece, from first to last, but for pieces that somebody waits for: the system must hand out and
// zero every page first, which takes seconds for tens of gigabytes. A worker serves from the first
// pieces while the others are still being pinned. What the memory holds stays as it is. Only in
// builds with CUDA. Await may be called on any thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/base/mutex.h"
#include "kvstore/host/host_memory.h"

namespace kvasir::worker {

class PinnedRegion {
 public:
  // The memory is `num_parts` extents of `part_bytes`, a multiple of a page of memory, and outlives
  // this. A copy by the driver may lie in one part, not in several. Nothing is pinned yet.
  // RESOURCE_EXHAUSTED when there is no room: the limits of the process's control groups are
  // checked before anything is taken, and the message names `flag` as the one to lower.
  static absl::StatusOr<std::unique_ptr<PinnedRegion>> Over(kvstore::HostMemory& memory,
                                                            int64_t part_bytes, int64_t num_parts,
                                                            absl::string_view flag);
  PinnedRegion(const PinnedRegion&) = delete;
  PinnedRegion& operator=(const PinnedRegion&) = delete;
  // Does not wait for pieces that no thread has begun.
  ~PinnedRegion();

  std::byte* data() const { return data_; }
  int64_t size_bytes() const { return size_bytes_; }

  // Begins to pin, and returns when the first piece is pinned. From then on other calls of the
  // driver may each wait for one piece. Errors are those of Await. Called once.
  absl::Status Start();
  // Waits until the part is pinned; required before anyone touches it. Called after Start.
  // RESOURCE_EXHAUSTED or INTERNAL when it cannot be pinned.
  absl::Status Await(int64_t part) EXCLUDES(mu_);
  // Whether Await would not wait.
  bool IsThere(int64_t part) EXCLUDES(mu_);
  // A step is launched: for a while pinning leaves the driver to steps for most of the time, unless
  // Await waits.
  void GiveWay() EXCLUDES(mu_);

 private:
  using Clock = std::chrono::steady_clock;

  enum class Piece : uint8_t { kWaits, kBegun, kPinned, kFailed };

  PinnedRegion(kvstore::HostMemory& memory, int64_t part_bytes, int64_t num_parts);

  Piece state_of(int64_t piece) const REQUIRES(mu_) { return pieces_[static_cast<size_t>(piece)]; }
  // A piece that has been begun ends with its own status; the others end with the first error.
  bool HasEnded(int64_t piece) const REQUIRES(mu_) {
    const Piece state = state_of(piece);
    return state == Piece::kPinned || state == Piece::kFailed ||
           (state == Piece::kWaits && !failed_.ok());
  }
  // Chooses a piece that somebody waits for, or else the first that nobody has begun; none: there
  // is none.
  std::optional<int64_t> ChoosePiece() REQUIRES(mu_);
  std::byte* begin_of(int64_t piece) const { return data_ + piece * piece_bytes_; }
  // Pins pieces until all have been begun.
  void PinPieces(int device) EXCLUDES(mu_);
  absl::Status PinPiece(int64_t piece) EXCLUDES(driver_mu_, mu_);
  // Leaves the driver to others after a piece that took it for `worked`.
  void Rest(Clock::duration worked) REQUIRES(driver_mu_) EXCLUDES(mu_);
  // Records how a piece ended, and logs now and then how many are pinned.
  void EndPiece(int64_t piece, const absl::Status& status) EXCLUDES(mu_);

  // Constant after construction.
  kvstore::HostMemory& memory_;
  std::byte* const data_;
  const int64_t num_parts_;
  const int64_t size_bytes_;
  const int64_t parts_per_piece_;
  const int64_t piece_bytes_;  // of all pieces except the last

  kernels::Mutex mu_;
  kernels::CondVar changed_;
  std::vector<Piece> pieces_ GUARDED_BY(mu_);
  int64_t next_ GUARDED_BY(mu_) = 0;              // all pieces before it have been begun
  std::vector<int64_t> awaited_ GUARDED_BY(mu_);  // pieces; some may have been begun
  int64_t num_pinned_ GUARDED_BY(mu_) = 0;
  int64_t num_waiting_ GUARDED_BY(mu_) = 0;  // calls of Await
  Clock::time_point last_step_ GUARDED_BY(mu_);
  bool stopping_ GUARDED_BY(mu_) = false;
  absl::Status failed_ GUARDED_BY(mu_);  // the first error; no piece is begun after it

  kernels::Mutex driver_mu_;  // held for a call into the driver: one thread at a time

  std::vector<std::thread> threads_;  // last: they use everything above
};

}  // namespace kvasir::worker
