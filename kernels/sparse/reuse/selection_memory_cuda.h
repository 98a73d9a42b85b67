// The memory of a sequence's selections in device memory. Made by the CUDA backend for a sequence
// that reuses selections. Thread-compatible. Only in builds with CUDA.
#pragma once

#include <cuda_runtime_api.h>
#include <memory>

#include "absl/status/statusor.h"

#include "kernels/base/device_buffer.h"
#include "kernels/sparse/common/device_memory.h"
#include "kernels/sparse/reuse/reusing_select.h"

namespace kvasir::kernels {

class CudaSelectionMemory final : public RememberedSelections {
 public:
  // REQUIRES: the rule is one of reuse_rules.h. RESOURCE_EXHAUSTED when there is no memory. The
  // memory is empty once the stream has reached this call's work.
  static absl::StatusOr<std::unique_ptr<CudaSelectionMemory>> Create(const MemoryNeeds& needs,
                                                                     cudaStream_t stream);

  const DeviceSelectionMemory& view() const { return view_; }
  int64_t size_bytes() const override { return buffer_.size_bytes(); }

 private:
  DeviceBuffer buffer_;
  DeviceSelectionMemory view_;
};

}  // namespace kvasir::kernels
