// A PagedKv on the device: a copy of a host one's pages, tables and digests, with NaN where there
// is nothing, and the way back. Pages keep their tiers, but all lie in device memory.
// Thread-compatible.
#pragma once

#include <cstring>
#include <vector>

#include "kernels/paged/paged_kv.h"
#include "tests/support/device_memory.h"

namespace kvasir::kernels {

class DevicePagedKv {
 public:
  explicit DevicePagedKv(const PagedKv& host) : host_(host) {}

  absl::StatusOr<PagedKv> Copy() {
    std::vector<std::byte> image;
    ForEachPart([&](std::byte* part, int64_t bytes) {
      const size_t at = image.size();
      image.resize(at + static_cast<size_t>(bytes), std::byte{0xff});
      if (part != nullptr) std::memcpy(&image[at], part, static_cast<size_t>(bytes));
    });
    KVASIR_ASSIGN_OR_RETURN(image_, memory_.Copy(image.data(), image.size()));
    image_bytes_ = image.size();
    std::vector<PageRef> pages;
    std::vector<std::byte*> bounds, key_codes;
    std::byte* at = image_;
    for (int64_t i = 0; i < num_pages(); ++i, at += host_.layout.page_bytes()) {
      const PageTier tier = host_.pages[i].tier();
      pages.push_back(tier == PageTier::kAbsent ? PageRef() : PageRef(at, tier));
    }
    for (int64_t i = 0; i < num_rows(); ++i, at += host_.layout.block_bounds_bytes()) {
      bounds.push_back(at);
    }
    for (int64_t i = 0; i < num_rows(); ++i, at += host_.layout.block_key_codes_bytes()) {
      key_codes.push_back(at);
    }
    PagedKv device = host_;
    device.accesses = {};
    KVASIR_ASSIGN_OR_RETURN(device.block_extents,
                            memory_.Copy(host_.block_extents, static_cast<size_t>(num_rows())));
    KVASIR_ASSIGN_OR_RETURN(device.pages, memory_.Copy(pages.data(), pages.size()));
    KVASIR_ASSIGN_OR_RETURN(device.bounds, memory_.Copy(bounds.data(), bounds.size()));
    KVASIR_ASSIGN_OR_RETURN(device.key_codes, memory_.Copy(key_codes.data(), key_codes.size()));
    return device;
  }

  // Pages, bounds and codes back to where they were copied from.
  absl::Status Fetch() {
    std::vector<std::byte> image(image_bytes_);
    KVASIR_RETURN_IF_ERROR(DeviceMemory::Fetch(image_, image.data(), image.size()));
    size_t at = 0;
    ForEachPart([&](std::byte* part, int64_t bytes) {
      if (part != nullptr) std::memcpy(part, &image[at], static_cast<size_t>(bytes));
      at += static_cast<size_t>(bytes);
    });
    return absl::OkStatus();
  }

  // Everything the tables lead to: use(where, bytes); null where there is nothing.
  template <typename Use>
  void ForEachPart(const Use& use) const {
    for (int64_t i = 0; i < num_pages(); ++i) {
      use(host_.pages[i].page(), host_.layout.page_bytes());
    }
    for (int64_t i = 0; i < num_rows(); ++i) {
      use(host_.bounds[i], host_.layout.block_bounds_bytes());
    }
    for (int64_t i = 0; i < num_rows(); ++i) {
      use(host_.key_codes[i], host_.layout.block_key_codes_bytes());
    }
  }

 private:
  int64_t num_rows() const { return host_.num_slots * host_.max_blocks_per_slot; }
  int64_t num_pages() const { return num_rows() * host_.layout.pages_per_block(); }

  const PagedKv host_;
  DeviceMemory memory_;
  std::byte* image_ = nullptr;  // pages, bounds, codes
  size_t image_bytes_ = 0;
};

}  // namespace kvasir::kernels
