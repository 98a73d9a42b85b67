#include "worker/backend/cuda/memory/cuda_memory.h"

#include "kernels/base/cuda_status.h"

namespace kvasir::worker {

using kernels::CudaStatus;

absl::StatusOr<CudaStream> CudaStream::Create() {
  cudaStream_t stream = nullptr;
  KVASIR_RETURN_IF_ERROR(
      CudaStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream"));
  CudaStream made;
  made.stream_.reset(stream);
  return made;
}

absl::Status CudaStream::Wait() const {
  return CudaStatus(cudaStreamSynchronize(get()), "waiting for the device");
}

absl::Status CudaStream::CopyToDevice(void* to, const void* from, int64_t bytes) const {
  if (bytes == 0) return absl::OkStatus();
  return CudaStatus(
      cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, get()),
      "copying to the device");
}

absl::Status CudaStream::CopyToHost(void* to, const void* from, int64_t bytes) const {
  if (bytes == 0) return absl::OkStatus();
  return CudaStatus(
      cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, get()),
      "copying from the device");
}

absl::Status CudaStream::Clear(void* memory, int64_t bytes) const {
  if (bytes == 0) return absl::OkStatus();
  return CudaStatus(cudaMemsetAsync(memory, 0, static_cast<size_t>(bytes), get()),
                    "clearing device memory");
}

absl::StatusOr<CudaEvent> CudaEvent::Create() {
  cudaEvent_t event = nullptr;
  KVASIR_RETURN_IF_ERROR(
      CudaStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event"));
  CudaEvent made;
  made.event_.reset(event);
  return made;
}

absl::Status CudaEvent::Record(const CudaStream& stream) const {
  return CudaStatus(cudaEventRecord(event_.get(), stream.get()), "recording an event");
}

absl::StatusOr<bool> CudaEvent::IsOver() const {
  const cudaError_t state = cudaEventQuery(event_.get());
  if (state == cudaErrorNotReady) return false;
  KVASIR_RETURN_IF_ERROR(CudaStatus(state, "waiting for the device"));
  return true;
}

absl::Status CudaEvent::Wait() const {
  return CudaStatus(cudaEventSynchronize(event_.get()), "waiting for an event");
}

absl::Status CudaEvent::HoldBack(const CudaStream& stream) const {
  return CudaStatus(cudaStreamWaitEvent(stream.get(), event_.get(), 0),
                    "making a stream wait for an event");
}

}  // namespace kvasir::worker
