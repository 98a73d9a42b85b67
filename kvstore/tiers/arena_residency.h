// Residency decided on the host: tables in host memory, the device tier a bounded arena there. A
// page moves when a step ends. Every page that enters the device tier is verified against the
// checksum made when its block was sealed. Pages that are read in place rely on the memory's own
// error correction between two promotions. Thread-compatible.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/base/buffer.h"
#include "kvstore/tiers/device_arena.h"
#include "kvstore/tiers/page_residency.h"

namespace kvasir::kvstore {

class ArenaResidency final : public PageResidency {
 public:
  static absl::StatusOr<std::unique_ptr<PageResidency>> Make(const ResidencyOptions& options);

  HostSlab& host() override { return host_; }
  absl::Status Open(int64_t extent) override;
  absl::Status Seal(int64_t extent, const PrefixHash& hash) override;
  bool SealsAtOnce() const override { return true; }
  absl::StatusOr<bool> IsExtentWhole(int64_t) override { return true; }
  void Restore(int64_t extent, const PrefixHash& hash) override;
  void MakeLean(int64_t lean, const PrefixHash& hash, std::optional<int64_t> from) override;
  uint32_t LastRead(int64_t extent) const override;
  void Free(int64_t extent) override;
  void Bind(int64_t slot, int64_t index, int64_t extent) override;
  int64_t BoundExtent(int64_t slot, int64_t index) const override {
    return block_extents_[static_cast<size_t>(slot * max_blocks_per_slot_ + index)];
  }
  int64_t PagesInDevice(int64_t extent) const override;
  absl::StatusOr<kernels::PagedKv> BeginStep(uint32_t step, bool binds_lean) override;
  absl::StatusOr<std::vector<CorruptExtent>> EndStep() override;
  int64_t device_pages() const override { return device_.num_slots(); }
  int64_t pinned_pages() const override { return device_.num_pinned(); }
  ResidencyStats stats() const override;
  absl::Status CheckIntegrity() const override;

 private:
  enum class ExtentState : uint8_t { kNone, kOpen, kSealed, kLean };
  struct Extent {
    ExtentState state = ExtentState::kNone;
    bool corrupt = false;
    PrefixHash hash{};     // of a sealed or lean block
    int64_t bindings = 0;  // number of slots bound to it
  };
  // A page read in place, as a candidate for the device tier.
  struct Candidate {
    uint32_t missed_bytes = 0;
    int64_t page = 0;
  };

  ArenaResidency(const ResidencyOptions& options, DeviceArena device, HostSlab host,
                 kernels::HostBuffer codes);

  void ForgetAccesses(int64_t extent);
  std::vector<Candidate> CollectAccesses();
  void Promote(std::vector<Candidate> candidates, std::vector<CorruptExtent>& corrupt);
  bool VerifyInHost(int64_t page, std::vector<CorruptExtent>& corrupt);
  // Returns a free device slot, evicting a page if needed; pages read in step `spared` stay.
  std::optional<int64_t> TakeDeviceSlot(int64_t page, std::optional<uint32_t> spared);

  absl::Status CheckExtent(int64_t extent, int64_t& in_device) const;
  absl::Status CheckBindings() const;

  int64_t first_page(int64_t extent) const { return extent * pages_per_block_; }
  Extent& at(int64_t extent) { return extent_states_[static_cast<size_t>(extent)]; }
  const Extent& at(int64_t extent) const { return extent_states_[static_cast<size_t>(extent)]; }
  kernels::PageRef& ref(int64_t page) { return pages_[static_cast<size_t>(page)]; }
  const kernels::PageRef& ref(int64_t page) const { return pages_[static_cast<size_t>(page)]; }
  std::byte* host_page(int64_t page) const {
    return host_.page(page / pages_per_block_, page % pages_per_block_);
  }
  absl::Span<const std::byte> Bytes(const std::byte* page) const {
    return {page, static_cast<size_t>(layout_.page_bytes())};
  }

  const ExtentFormat format_;
  const kernels::KvLayout layout_;
  const int64_t pages_per_block_;
  const int64_t num_slots_;
  const int64_t max_blocks_per_slot_;

  DeviceArena device_;
  HostSlab host_;
  const kernels::HostBuffer codes_;  // key codes of all extents, where they are kept
  std::vector<Extent> extent_states_;
  // Tables. Lean blocks follow the extents of the host tier.
  std::vector<kernels::PageRef> pages_;  // [extent, page in block]
  std::vector<std::byte*> bounds_;       // [extent]
  std::vector<std::byte*> key_codes_;    // [extent], none when they are not kept
  std::vector<uint32_t> last_touched_;   // [extent, page in block]
  std::vector<uint32_t> missed_bytes_;   // [extent, page in block]
  std::vector<int32_t> block_extents_;   // [slot, index]
  uint32_t step_ = 0;
  ResidencyStats stats_;
};

}  // namespace kvasir::kvstore
