// Inputs of a kernel that the kernel ahead of it on the stream writes as late as may be: whoever
// reads them before that one has ended (kernels/base/overlapped_launch.h) finds bytes of all ones.
// Thread-compatible.
#pragma once

#include <cstddef>
#include <cuda_runtime_api.h>
#include <vector>

#include "absl/status/status.h"

#include "tests/support/device_memory.h"

namespace kvasir::kernels {

// Bytes of device memory and what belongs there.
struct LatePiece {
  std::byte* at;
  const std::byte* from;
  size_t size;
};

class LateBytes {
 public:
  // Takes away what lies there. REQUIRES: nothing is writing to it.
  absl::Status Hold(void* at, size_t size);
  // Puts everything back, by a kernel that lets what follows it on the stream begin at once, and
  // then waits for longer than that takes.
  absl::Status PutBack(cudaStream_t stream);

 private:
  DeviceMemory memory_;
  std::vector<LatePiece> pieces_;
};

}  // namespace kvasir::kernels
