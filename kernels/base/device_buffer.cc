#include "kernels/base/device_buffer.h"

#include <cuda_runtime_api.h>

#include "kernels/base/cuda_status.h"

namespace kvasir::kernels {
namespace {

absl::Status CheckSize(int64_t bytes) {
  if (bytes >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("a buffer of ", bytes, " bytes"));
}

}  // namespace

void DeviceBuffer::Free::operator()(std::byte* memory) const { cudaFree(memory); }
void PinnedBuffer::Free::operator()(std::byte* memory) const { cudaFreeHost(memory); }

absl::StatusOr<DeviceBuffer> DeviceBuffer::Allocate(int64_t bytes) {
  KVASIR_RETURN_IF_ERROR(CheckSize(bytes));
  DeviceBuffer buffer;
  void* memory = nullptr;
  if (bytes > 0) {
    KVASIR_RETURN_IF_ERROR(CudaStatus(cudaMalloc(&memory, static_cast<size_t>(bytes)),
                                      absl::StrCat("allocating ", bytes, " bytes on the device")));
  }
  buffer.memory_.reset(static_cast<std::byte*>(memory));
  buffer.size_bytes_ = bytes;
  return buffer;
}

absl::StatusOr<PinnedBuffer> PinnedBuffer::Allocate(int64_t bytes) {
  KVASIR_RETURN_IF_ERROR(CheckSize(bytes));
  PinnedBuffer buffer;
  void* memory = nullptr;
  if (bytes > 0) {
    KVASIR_RETURN_IF_ERROR(CudaStatus(cudaHostAlloc(&memory, static_cast<size_t>(bytes),
                                                    cudaHostAllocMapped | cudaHostAllocPortable),
                                      absl::StrCat("pinning ", bytes, " bytes of host memory")));
  }
  buffer.memory_.reset(static_cast<std::byte*>(memory));
  buffer.size_bytes_ = bytes;
  return buffer;
}

}  // namespace kvasir::kernels
