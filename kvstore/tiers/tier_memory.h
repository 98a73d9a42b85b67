// The memory of the device tier, and how pages cross between it and the host's: plain host memory
// where the worker computes on the CPU (below), device memory where it computes on a GPU (the
// worker's backend has it). The store owns one and never touches its pages otherwise.
// Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/buffer.h"
#include "kernels/base/status_macros.h"

namespace kvasir::kvstore {

// What the tier needs.
struct TierMemorySizes {
  int64_t num_pages = 0;
  int64_t page_bytes = 0;
  // Of the store's tables: digests of so many blocks, which kernels read and write for all pages,
  // wherever those are.
  int64_t num_blocks = 0;
  int64_t block_bounds_bytes = 0;
  int64_t block_key_codes_bytes = 0;  // 0: not kept
};

class TierMemory {
 public:
  struct Copy {
    std::byte* to = nullptr;
    const std::byte* from = nullptr;
  };

  virtual ~TierMemory() = default;
  // Of page slot 0; the others follow without gaps.
  virtual std::byte* pages() const = 0;
  // Of a block's bounds, where kernels are to find them; null: beside the block in the host tier.
  virtual std::byte* bounds(int64_t block) const = 0;
  // Of a block's key codes. REQUIRES: they are kept.
  virtual std::byte* key_codes(int64_t block) const = 0;
  // Whether the host may touch the pages.
  virtual bool in_host() const = 0;
  // Each copies `bytes`; done on return. Errors are the device's.
  virtual absl::Status CopyToHost(std::span<const Copy> copies, int64_t bytes) = 0;
  virtual absl::Status CopyFromHost(std::span<const Copy> copies, int64_t bytes) = 0;
};

// RESOURCE_EXHAUSTED when there is no memory.
using TierMemoryMaker =
    std::function<absl::StatusOr<std::unique_ptr<TierMemory>>(const TierMemorySizes&)>;

class HostTierMemory final : public TierMemory {
 public:
  static absl::StatusOr<std::unique_ptr<TierMemory>> Make(const TierMemorySizes& sizes) {
    std::unique_ptr<HostTierMemory> memory(new HostTierMemory());
    KVASIR_ASSIGN_OR_RETURN(memory->pages_,
                            kernels::HostBuffer::Allocate(sizes.num_pages * sizes.page_bytes));
    KVASIR_ASSIGN_OR_RETURN(
        memory->key_codes_,
        kernels::HostBuffer::Allocate(sizes.num_blocks * sizes.block_key_codes_bytes));
    memory->block_key_codes_bytes_ = sizes.block_key_codes_bytes;
    return memory;
  }

  std::byte* pages() const override { return pages_.data(); }
  std::byte* bounds(int64_t) const override { return nullptr; }
  std::byte* key_codes(int64_t block) const override {
    return key_codes_.data() + block * block_key_codes_bytes_;
  }
  bool in_host() const override { return true; }
  absl::Status CopyToHost(std::span<const Copy> copies, int64_t bytes) override {
    for (const Copy& copy : copies) std::memcpy(copy.to, copy.from, static_cast<size_t>(bytes));
    return absl::OkStatus();
  }
  absl::Status CopyFromHost(std::span<const Copy> copies, int64_t bytes) override {
    return CopyToHost(copies, bytes);
  }

 private:
  HostTierMemory() = default;

  kernels::HostBuffer pages_;
  kernels::HostBuffer key_codes_;
  int64_t block_key_codes_bytes_ = 0;
};

}  // namespace kvasir::kvstore
