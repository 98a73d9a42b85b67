// An AttentionBatch on the GPU: copies its pages, tables, queries and selections to the device,
// runs an implementation there and brings the results back into the batch. Pages of the device tier
// lie in one arena, those of the host tier in pinned memory, both with NaN around them.
// Thread-compatible.
#pragma once

#include <cstring>
#include <cuda_runtime_api.h>
#include <functional>
#include <vector>

#include "kernels/attention/attend_cuda.h"
#include "kernels/base/cuda_status.h"
#include "kernels/base/device_buffer.h"
#include "tests/support/attention_batch.h"
#include "tests/support/device_memory.h"

namespace kvasir::kernels {

class DeviceAttentionBatch {
 public:
  explicit DeviceAttentionBatch(AttentionBatch& batch) : batch_(batch) {}

  using Implementation = std::function<absl::Status(const CudaAttendParams&, const KvTensorMaps&)>;
  // Results as AttentionBatch::Run leaves them; INTERNAL with CUDA's error when the kernel fails.
  absl::Status Run(const Implementation& implementation) {
    absl::Status status;
    batch_.Run([&](const AttendParams& host, Executor&) { status = RunOn(host, implementation); });
    return status;
  }
  // The access record after the run, as the page's index of PagedKv.
  const std::vector<uint32_t>& missed_bytes() const { return missed_bytes_; }
  const std::vector<uint32_t>& last_touched() const { return last_touched_; }

 private:
  absl::Status RunOn(const AttendParams& host, const Implementation& implementation) {
    memory_ = {};
    KVASIR_ASSIGN_OR_RETURN(const KvTensorMaps maps, CopyPages(host.kv));
    CudaAttendParams device = {host};
    KVASIR_ASSIGN_OR_RETURN(device.kv, CopyTables(host.kv));
    KVASIR_ASSIGN_OR_RETURN(device.q, memory_.Copy(host.q));
    KVASIR_ASSIGN_OR_RETURN(device.out, memory_.Copy(host.out));
    KVASIR_ASSIGN_OR_RETURN(device.lse, memory_.Copy(host.lse));
    KVASIR_ASSIGN_OR_RETURN(QueryTile * tiles, memory_.Copy(host.tiles.data(), host.tiles.size()));
    device.tiles = {tiles, host.tiles.size()};
    const size_t rows = static_cast<size_t>(host.selection.num_rows);
    KVASIR_ASSIGN_OR_RETURN(device.selection.headers, memory_.Copy(host.selection.headers, rows));
    KVASIR_ASSIGN_OR_RETURN(
        device.selection.entries,
        memory_.Copy(host.selection.entries, rows * static_cast<size_t>(host.selection.capacity)));
    KVASIR_ASSIGN_OR_RETURN(uint8_t * faults, memory_.Copy(host.faults.data(), host.faults.size()));
    device.faults = {faults, host.faults.size()};
    KVASIR_ASSIGN_OR_RETURN(device.device_rope, memory_.Copy(host.rope));
    KVASIR_RETURN_IF_ERROR(implementation(device, maps));
    KVASIR_RETURN_IF_ERROR(CudaStatus(cudaDeviceSynchronize(), "running the kernel"));
    KVASIR_RETURN_IF_ERROR(DeviceMemory::Fetch(device.out, host.out));
    KVASIR_RETURN_IF_ERROR(DeviceMemory::Fetch(device.lse, host.lse));
    KVASIR_RETURN_IF_ERROR(FetchRecord(device.kv));
    return CudaStatus(
        cudaMemcpy(host.faults.data(), faults, host.faults.size(), cudaMemcpyDeviceToHost),
        "fetching the faults");
  }

  // Pages in the order of their index, each in the arena of its tier.
  absl::StatusOr<KvTensorMaps> CopyPages(const PagedKv& kv) {
    const int64_t count = kv.num_slots * kv.max_blocks_per_slot * kv.layout.pages_per_block();
    const int64_t bytes = count * kv.layout.page_bytes();
    KVASIR_ASSIGN_OR_RETURN(device_pages_, DeviceBuffer::Allocate(bytes));
    KVASIR_ASSIGN_OR_RETURN(host_pages_, PinnedBuffer::Allocate(bytes));
    std::vector<std::byte> image(static_cast<size_t>(bytes), std::byte{0xff});
    std::memset(host_pages_.data(), 0xff, static_cast<size_t>(bytes));
    pages_.assign(static_cast<size_t>(count), PageRef());
    for (int64_t i = 0; i < count; ++i) {
      const PageRef page = kv.pages[i];
      if (page.tier() == PageTier::kAbsent) continue;
      const bool in_host = page.tier() == PageTier::kHost;
      const int64_t offset = i * kv.layout.page_bytes();
      std::memcpy((in_host ? host_pages_.data() : image.data()) + offset, page.page(),
                  static_cast<size_t>(kv.layout.page_bytes()));
      pages_[static_cast<size_t>(i)] =
          PageRef((in_host ? host_pages_.data() : device_pages_.data()) + offset, page.tier());
    }
    KVASIR_RETURN_IF_ERROR(CudaStatus(
        cudaMemcpy(device_pages_.data(), image.data(), image.size(), cudaMemcpyHostToDevice),
        "copying pages to the device"));
    return MakeKvTensorMaps(kv.layout, {.base = device_pages_.data(), .bytes = bytes},
                            {.base = host_pages_.data(), .bytes = bytes});
  }

  absl::StatusOr<PagedKv> CopyTables(const PagedKv& kv) {
    PagedKv device = kv;
    KVASIR_ASSIGN_OR_RETURN(
        device.block_extents,
        memory_.Copy(kv.block_extents, static_cast<size_t>(kv.num_slots * kv.max_blocks_per_slot)));
    KVASIR_ASSIGN_OR_RETURN(device.pages, memory_.Copy(pages_.data(), pages_.size()));
    device.key_codes = nullptr;
    KVASIR_ASSIGN_OR_RETURN(device.bounds, CopyBounds(kv));
    last_touched_.assign(pages_.size(), 0);
    missed_bytes_.assign(pages_.size(), 0);
    KVASIR_ASSIGN_OR_RETURN(device.accesses.step, memory_.Copy(kv.accesses.step, 1));
    KVASIR_ASSIGN_OR_RETURN(device.accesses.last_touched,
                            memory_.Copy(last_touched_.data(), last_touched_.size()));
    KVASIR_ASSIGN_OR_RETURN(device.accesses.missed_bytes,
                            memory_.Copy(missed_bytes_.data(), missed_bytes_.size()));
    return device;
  }

  // Those of the blocks that there are.
  absl::StatusOr<std::byte**> CopyBounds(const PagedKv& kv) {
    const int64_t rows = kv.num_slots * kv.max_blocks_per_slot;
    std::vector<std::byte*> bounds(static_cast<size_t>(rows), nullptr);
    for (size_t row = 0; row < bounds.size(); ++row) {
      if (kv.bounds[row] == nullptr) continue;
      KVASIR_ASSIGN_OR_RETURN(
          bounds[row],
          memory_.Copy(kv.bounds[row], static_cast<size_t>(kv.layout.block_bounds_bytes())));
    }
    return memory_.Copy(bounds.data(), bounds.size());
  }

  absl::Status FetchRecord(const PagedKv& device) {
    const size_t bytes = pages_.size() * sizeof(uint32_t);
    KVASIR_RETURN_IF_ERROR(CudaStatus(cudaMemcpy(last_touched_.data(), device.accesses.last_touched,
                                                 bytes, cudaMemcpyDeviceToHost),
                                      "fetching the access record"));
    return CudaStatus(cudaMemcpy(missed_bytes_.data(), device.accesses.missed_bytes, bytes,
                                 cudaMemcpyDeviceToHost),
                      "fetching the access record");
  }

  AttentionBatch& batch_;
  DeviceBuffer device_pages_;
  PinnedBuffer host_pages_;
  std::vector<PageRef> pages_;
  std::vector<uint32_t> last_touched_;
  std::vector<uint32_t> missed_bytes_;
  DeviceMemory memory_;
};

}  // namespace kvasir::kernels
