// A large piece of host memory that the device reads and writes in place, at the host's address:
// the host tier of the KV. Touched and pinned in pieces, several at a time, for the system hands
// out and zeroes every page first: some seconds for tens of gigabytes, with progress in the log.
// Zeroed; movable; freed by the destructor. Only in builds with CUDA. Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/base/executor.h"

namespace kvasir::worker {

class PinnedRegion {
 public:
  PinnedRegion() = default;
  // `num_parts` parts, one behind the other, aligned to a page of memory as their size must be.
  // What the driver copies may lie in one part, not in several. RESOURCE_EXHAUSTED when there is no
  // room: the limits of the process's control groups are looked at before anything is taken; `flag`
  // is the one to lower.
  static absl::StatusOr<PinnedRegion> Take(int64_t part_bytes, int64_t num_parts,
                                           absl::string_view flag, kernels::Executor& executor);
  PinnedRegion(PinnedRegion&& other) noexcept;
  PinnedRegion& operator=(PinnedRegion&& other) noexcept;
  ~PinnedRegion();

  std::byte* data() const { return data_; }
  int64_t size_bytes() const { return size_bytes_; }

 private:
  absl::Status Pin(kernels::Executor& executor);

  std::byte* data_ = nullptr;
  int64_t size_bytes_ = 0;
  int64_t piece_bytes_ = 0;      // of all pieces but the last; of whole parts
  std::vector<uint8_t> pinned_;  // by piece
};

}  // namespace kvasir::worker
