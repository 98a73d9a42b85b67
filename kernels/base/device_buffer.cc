#include "kernels/base/device_buffer.h"

#include <cuda_runtime_api.h>

#include "kernels/base/cuda_status.h"

namespace kvasir::kernels {
namespace {

absl::Status Take(internal::FreeDevice, int64_t bytes, void** memory) {
  return CudaStatus(cudaMalloc(memory, static_cast<size_t>(bytes)),
                    absl::StrCat("allocating ", bytes, " bytes on the device"));
}
absl::Status Take(internal::FreePinned, int64_t bytes, void** memory) {
  return CudaStatus(cudaHostAlloc(memory, static_cast<size_t>(bytes),
                                  cudaHostAllocMapped | cudaHostAllocPortable),
                    absl::StrCat("pinning ", bytes, " bytes of host memory"));
}

}  // namespace

void internal::FreeDevice::operator()(std::byte* memory) const { cudaFree(memory); }
void internal::FreePinned::operator()(std::byte* memory) const { cudaFreeHost(memory); }

template <typename Free>
absl::StatusOr<CudaBuffer<Free>> CudaBuffer<Free>::Allocate(int64_t bytes) {
  if (bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat("a buffer of ", bytes, " bytes"));
  }
  void* memory = nullptr;
  if (bytes > 0) KVASIR_RETURN_IF_ERROR(Take(Free(), bytes, &memory));
  CudaBuffer buffer;
  buffer.memory_.reset(static_cast<std::byte*>(memory));
  buffer.size_bytes_ = bytes;
  return buffer;
}

template class CudaBuffer<internal::FreeDevice>;
template class CudaBuffer<internal::FreePinned>;

}  // namespace kvasir::kernels
