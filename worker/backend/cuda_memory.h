// What the CUDA backend holds of the device: streams, events, buffers that grow to the largest step
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
  // Each is done when the stream has come to it; host memory stays as it is until then.
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
  // Recorded nowhere: nobody waits for it.
  static absl::StatusOr<CudaEvent> Create();
  // What the stream does up to here.
  absl::Status Record(const CudaStream& stream) const;
  // Whether that is over.
  absl::StatusOr<bool> IsOver() const;
  // On the host; or before anything that is put on the stream from here on.
  absl::Status Wait() const;
  absl::Status HoldBack(const CudaStream& stream) const;

 private:
  struct Destroy {
    void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
  };
  std::unique_ptr<CUevent_st, Destroy> event_;
};

// Waits until the device is done with whatever a step before this one uses. Nothing to do where
// there is none under way.
using WaitForDevice = absl::FunctionRef<absl::Status()>;

// Makes room for `count` elements, with unspecified contents. REQUIRES: nothing that the device
// still does uses the buffer.
template <typename T, typename Buffer>
absl::StatusOr<T*> Reserve(int64_t count, Buffer& buffer) {
  const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
  if (bytes > buffer.size_bytes()) {
    buffer = Buffer();  // there may not be room for both
    KVASIR_ASSIGN_OR_RETURN(buffer, Buffer::Allocate(bytes));
  }
  return buffer.template As<T>();
}

// The same where a step under way may use the buffer: waits before it is given up. What lies in a
// buffer that is large enough is overwritten by what the stream comes to only later.
template <typename T, typename Buffer>
absl::StatusOr<T*> Reserve(int64_t count, Buffer& buffer, WaitForDevice wait) {
  if (count * static_cast<int64_t>(sizeof(T)) > buffer.size_bytes()) {
    KVASIR_RETURN_IF_ERROR(wait());
  }
  return Reserve<T>(count, buffer);
}

}  // namespace kvasir::worker
