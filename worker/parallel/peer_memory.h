// Memory of this GPU that the GPUs of the other ranks write, and theirs that this one writes, over
// NVLink or PCIe: by CUDA IPC between processes, directly within one. It hides how addresses travel
// and which ranks can reach each other. Made when a group forms. Only in builds with CUDA.
// Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/device_buffer.h"
#include "worker/parallel/collective.h"

namespace kvasir::worker {

class PeerMemory {
 public:
  // Takes `bytes`, zeroed, on the current device of each rank. All ranks call it at the same time;
  // when it returns, the memory of all is ready. Null on every rank where some rank cannot reach
  // another. An error where they cannot communicate.
  static absl::StatusOr<std::unique_ptr<PeerMemory>> Share(int64_t bytes, Collective& ranks);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  // Memory of a rank, at the address where this one's kernels reach it.
  std::byte* of_rank(int rank) const { return addresses_[static_cast<size_t>(rank)]; }

 private:
  struct Card;  // tells others where a rank's memory is

  PeerMemory() = default;

  absl::Status MakeCard(Card& card) const;
  absl::Status Open(const Card& card, int rank);

  kernels::DeviceBuffer own_;
  std::vector<std::byte*> addresses_;  // by rank; null: not open
  std::vector<std::byte*> opened_;     // memory of other processes
};

}  // namespace kvasir::worker
