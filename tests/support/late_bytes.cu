#include <cstdint>

#include "kernels/base/status_macros.h"
#include "tests/support/late_bytes.h"

namespace kvasir::kernels {
namespace {

constexpr int kThreads = 512;
constexpr uint64_t kWaitNs = 2'000'000;  // a launch takes some microseconds

__device__ uint64_t NowNs() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__global__ void PutBackKernel(const LatePiece* pieces, size_t count) {
  cudaTriggerProgrammaticLaunchCompletion();
  const uint64_t begin = NowNs();
  while (NowNs() - begin < kWaitNs) __nanosleep(1000);
  for (size_t i = 0; i < count; ++i) {
    for (size_t at = threadIdx.x; at < pieces[i].size; at += kThreads) {
      pieces[i].at[at] = pieces[i].from[at];
    }
  }
}

}  // namespace

absl::Status LateBytes::Hold(void* at, size_t size) {
  std::vector<std::byte> bytes(size);
  KVASIR_RETURN_IF_ERROR(DeviceMemory::Fetch(at, bytes.data(), size));
  KVASIR_ASSIGN_OR_RETURN(const std::byte* from, memory_.Copy(bytes.data(), size));
  pieces_.push_back({.at = static_cast<std::byte*>(at), .from = from, .size = size});
  return CudaStatus(cudaMemset(at, 0xff, size), "taking bytes away");
}

absl::Status LateBytes::PutBack(cudaStream_t stream) {
  KVASIR_ASSIGN_OR_RETURN(const LatePiece* pieces, memory_.Copy(pieces_.data(), pieces_.size()));
  KVASIR_RETURN_IF_ERROR(CudaStatus(cudaDeviceSynchronize(), "waiting for bytes to be gone"));
  PutBackKernel<<<1, kThreads, 0, stream>>>(pieces, pieces_.size());
  return CudaStatus(cudaGetLastError(), "launching the kernel that is late");
}

}  // namespace kvasir::kernels
