// Changes of extents and bindings that the store asks for between two steps: written down on the
// host, then copied to the device as lists that the residency's kernels read. Used by the residency
// on the GPU. Thread-compatible.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/base/device_buffer.h"
#include "kernels/residency/residency_cuda.h"
#include "worker/backend/cuda/memory/cuda_memory.h"

namespace kvasir::worker {

// The changes, in the order in which they are carried out.
struct ResidencyCommands {
  std::vector<int32_t> copied;  // extents copied to the host tier; sealed when the copy is over
  std::vector<int32_t> sealed, freed, restored, opened;
  std::vector<int64_t> bound;  // entries of the table of extents by slot, each once
  std::vector<int32_t> promoted;
  std::vector<uint8_t> running;  // [block] whether a slot has it, where any is promoted

  bool empty() const {
    return copied.empty() && sealed.empty() && freed.empty() && restored.empty() &&
           opened.empty() && bound.empty() && promoted.empty();
  }
};

// The same in device memory, except for `copied`: no kernel reads that list.
struct DeviceCommands {
  std::span<int32_t> sealed, freed, restored, opened;
  std::span<kernels::BlockExtentChange> bound;
  std::span<int32_t> promoted;
  std::span<uint8_t> running;
};

// Memory in which commands go to the device; grows to the largest number seen.
class CommandUpload {
 public:
  static absl::StatusOr<CommandUpload> Create();

  // Puts the copy of the commands on the stream. `block_extents` is the table that `bound` has
  // entries of. Waits for the copy before. The lists are valid until the next call.
  absl::StatusOr<DeviceCommands> Upload(const ResidencyCommands& commands,
                                        std::span<const int32_t> block_extents,
                                        const CudaStream& stream);

 private:
  CudaEvent uploaded_;
  kernels::PinnedBuffer host_;
  kernels::DeviceBuffer device_;
};

}  // namespace kvasir::worker
