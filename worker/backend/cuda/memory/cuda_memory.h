// Device resources of the CUDA backend: streams, events, buffers that grow to the largest step
// seen. Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <memory>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/device_buffer.h"
#include "kernels/base/status_macros.h"

namespace kvasir::worker {

class CudaStream {
 public:
  // UNAVAILABLE without a usable device.
  static absl::StatusOr<CudaStream> Create();
  cudaStream_t get() const { return stream_.get(); }
  absl::Status Wait() const;
  // Each copy is done when the stream has come to it. Host memory must not change until then.
  absl::Status CopyToDevice(void* to, const void* from, int64_t bytes) const;
  absl::Status CopyToHost(void* to, const void* from, int64_t bytes) const;
  absl::Status Clear(void* memory, int64_t bytes) const;

 private:
  struct Destroy {
    void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
  };
  std::unique_ptr<CUstream_st, Destroy> stream_;
};

class CudaEvent {
 public:
  // A new event is recorded nowhere: waiting for it returns at once.
  static absl::StatusOr<CudaEvent> Create();
  // Records everything put on the stream so far.
  absl::Status Record(const CudaStream& stream) const;
  // Whether what was recorded is over.
  absl::StatusOr<bool> IsOver() const;
  // Wait blocks the host; HoldBack blocks everything put on the stream later.
  absl::Status Wait() const;
  absl::Status HoldBack(const CudaStream& stream) const;

 private:
  struct Destroy {
    void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
  };
  std::unique_ptr<CUevent_st, Destroy> event_;
};

// Waits until the device is done with everything that an earlier step uses. Does nothing where no
// step is in flight.
using WaitForDevice = absl::FunctionRef<absl::Status()>;

// Makes room for `count` elements, with unspecified contents. REQUIRES: no work left on the device
// uses the buffer.
template <typename T, typename Buffer>
absl::StatusOr<T*> Reserve(int64_t count, Buffer& buffer) {
  const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
  if (bytes > buffer.size_bytes()) {
    buffer = Buffer();  // there may not be room for both
    KVASIR_ASSIGN_OR_RETURN(buffer, Buffer::Allocate(bytes));
  }
  return buffer.template As<T>();
}

// The same where a step in flight may use the buffer: waits before the buffer is given up. A buffer
// that is large enough is kept; its contents are overwritten only when the stream comes to it.
template <typename T, typename Buffer>
absl::StatusOr<T*> Reserve(int64_t count, Buffer& buffer, WaitForDevice wait) {
  if (count * static_cast<int64_t>(sizeof(T)) > buffer.size_bytes()) {
    KVASIR_RETURN_IF_ERROR(wait());
  }
  return Reserve<T>(count, buffer);
}

}  // namespace kvasir::worker
