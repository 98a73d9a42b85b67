#include "worker/backend/cuda_memory.h"

#include "kernels/base/cuda_status.h"

namespace kvasir::worker {

using kernels::CudaStatus;
using kernels::DeviceBuffer;
using kernels::PagedKv;

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

absl::StatusOr<std::unique_ptr<CudaTierMemory>> CudaTierMemory::Make(
    const kvstore::TierMemorySizes& sizes, const CudaStream& stream) {
  std::unique_ptr<CudaTierMemory> memory(new CudaTierMemory(stream));
  KVASIR_ASSIGN_OR_RETURN(memory->pages_,
                          DeviceBuffer::Allocate(sizes.num_pages * sizes.page_bytes));
  KVASIR_ASSIGN_OR_RETURN(memory->bounds_,
                          DeviceBuffer::Allocate(sizes.num_blocks * sizes.block_bounds_bytes));
  KVASIR_ASSIGN_OR_RETURN(memory->key_codes_,
                          DeviceBuffer::Allocate(sizes.num_blocks * sizes.block_key_codes_bytes));
  memory->block_bounds_bytes_ = sizes.block_bounds_bytes;
  memory->block_key_codes_bytes_ = sizes.block_key_codes_bytes;
  return memory;
}

absl::Status CudaTierMemory::CopyToHost(std::span<const Copy> copies, int64_t bytes) {
  for (const Copy& copy : copies) {
    KVASIR_RETURN_IF_ERROR(stream_.CopyToHost(copy.to, copy.from, bytes));
  }
  return stream_.Wait();
}

absl::Status CudaTierMemory::CopyFromHost(std::span<const Copy> copies, int64_t bytes) {
  for (const Copy& copy : copies) {
    KVASIR_RETURN_IF_ERROR(stream_.CopyToDevice(copy.to, copy.from, bytes));
  }
  return stream_.Wait();
}

namespace {

int64_t NumPages(const PagedKv& kv) { return kv.num_rows * kv.layout.pages_per_block(); }

// A copy of host memory in a buffer that is made as large as it must be.
template <typename T>
absl::StatusOr<T*> CopyOf(const T* from, int64_t count, DeviceBuffer& buffer,
                          const CudaStream& stream) {
  KVASIR_ASSIGN_OR_RETURN(T* const to, Reserve<T>(count, buffer));
  KVASIR_RETURN_IF_ERROR(stream.CopyToDevice(to, from, count * static_cast<int64_t>(sizeof(T))));
  return to;
}

}  // namespace

absl::StatusOr<PagedKv> CudaKvTables::Upload(const PagedKv& host, const CudaStream& stream) {
  PagedKv device = host;
  KVASIR_ASSIGN_OR_RETURN(
      device.block_rows,
      CopyOf(host.block_rows, host.num_slots * host.max_blocks_per_slot, block_rows_, stream));
  KVASIR_ASSIGN_OR_RETURN(device.pages, CopyOf(host.pages, NumPages(host), pages_, stream));
  KVASIR_ASSIGN_OR_RETURN(device.bounds, CopyOf(host.bounds, host.num_rows, bounds_, stream));
  if (host.key_codes != nullptr) {
    KVASIR_ASSIGN_OR_RETURN(device.key_codes,
                            CopyOf(host.key_codes, host.num_rows, key_codes_, stream));
  }
  KVASIR_ASSIGN_OR_RETURN(device.accesses.step, CopyOf(host.accesses.step, 1, step_, stream));
  KVASIR_ASSIGN_OR_RETURN(
      device.accesses.last_touched,
      CopyOf(host.accesses.last_touched, NumPages(host), last_touched_, stream));
  KVASIR_ASSIGN_OR_RETURN(
      device.accesses.missed_bytes,
      CopyOf(host.accesses.missed_bytes, NumPages(host), missed_bytes_, stream));
  return device;
}

absl::Status CudaKvTables::FetchAccesses(const PagedKv& host, const CudaStream& stream) const {
  const int64_t bytes = NumPages(host) * static_cast<int64_t>(sizeof(uint32_t));
  KVASIR_RETURN_IF_ERROR(
      stream.CopyToHost(host.accesses.last_touched, last_touched_.data(), bytes));
  return stream.CopyToHost(host.accesses.missed_bytes, missed_bytes_.data(), bytes);
}

}  // namespace kvasir::worker
