// What the CUDA backend holds of the device: its stream, buffers that grow to the largest step
// seen, memory of the KV store's device tier, and the store's tables as kernels read them.
// Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <memory>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/device_buffer.h"
#include "kernels/base/status_macros.h"
#include "kernels/paged/paged_kv.h"
#include "kvstore/tiers/tier_memory.h"

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

class CudaTierMemory final : public kvstore::TierMemory {
 public:
  // The stream outlives it.
  static absl::StatusOr<std::unique_ptr<CudaTierMemory>> Make(const kvstore::TierMemorySizes& sizes,
                                                              const CudaStream& stream);

  std::byte* pages() const override { return pages_.data(); }
  std::byte* bounds(int64_t block) const override {
    return bounds_.data() + block * block_bounds_bytes_;
  }
  std::byte* key_codes(int64_t block) const override {
    return key_codes_.data() + block * block_key_codes_bytes_;
  }
  bool in_host() const override { return false; }
  absl::Status CopyToHost(std::span<const Copy> copies, int64_t bytes) override;
  absl::Status CopyFromHost(std::span<const Copy> copies, int64_t bytes) override;

 private:
  explicit CudaTierMemory(const CudaStream& stream) : stream_(stream) {}

  const CudaStream& stream_;
  kernels::DeviceBuffer pages_;
  kernels::DeviceBuffer bounds_;
  kernels::DeviceBuffer key_codes_;
  int64_t block_bounds_bytes_ = 0;
  int64_t block_key_codes_bytes_ = 0;
};

// The store's tables on the device: copied whole at a step's begin, the record of accesses back at
// its end. Tables that stay there, and change by what changed, are the paging protocol's matter.
class CudaKvTables {
 public:
  absl::StatusOr<kernels::PagedKv> Upload(const kernels::PagedKv& host, const CudaStream& stream);
  // To the tables that were uploaded last.
  absl::Status FetchAccesses(const kernels::PagedKv& host, const CudaStream& stream) const;

 private:
  kernels::DeviceBuffer block_rows_, pages_, bounds_, key_codes_, step_, last_touched_,
      missed_bytes_;
};

}  // namespace kvasir::worker
