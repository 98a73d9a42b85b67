// Residency decided on the GPU (kernels/residency/residency.h). The page table and the state that
// decides which page moves next lie in device memory; the host tier lies in pinned memory that
// kernels read in place. Requests of the store between two steps (extents opened, sealed, freed,
// restored, bound) are written down and put on the stream when the next step begins, as a list as
// long as the number of changes. In the steady decode loop the list is empty, and nothing here
// waits for the device.
//
//   stream of the steps  | commands, step t | map, plan |   commands, step t+1   | wait, map, plan
//   | stream of fills                                     | copy the planned fills |
//
// Promotions before a step are planned, copied and mapped on the stream of the steps, as the last of
// its commands.
//
// Lean blocks (kvstore/on_demand/) follow the extents in the tables. What the device keeps of them
// are bounds and key codes; their pages come into slots within a step (page_mailbox.h). In a step
// that binds lean blocks, EndStep waits for the device: until then its kernels ask for pages.
//
// A page's bytes are not verified between the two tiers: both memories and the link correct errors.
// Checksums are made on the host, for blocks that the tier below asks for. Counters are those after
// the last step but two, because the last but one may be in flight when the last ends.
// Thread-compatible.
#pragma once

#include <array>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/device_buffer.h"
#include "kernels/paged/kv_tensor_maps.h"
#include "kernels/residency/residency_cuda.h"
#include "kvstore/host/checksum_thread.h"
#include "kvstore/tiers/page_residency.h"
#include "worker/backend/cuda/memory/cuda_memory.h"
#include "worker/backend/cuda/memory/pinned_region.h"
#include "worker/backend/cuda/page_mailbox.h"
#include "worker/backend/cuda/residency_commands.h"

namespace kvasir::worker {

// Memory that holds pages.
struct KvArenas {
  kernels::KvArena device;
  kernels::KvArena host;
};

// How kernels bring pages of lean blocks.
struct PagesOnDisk {
  kernels::ResidencyState state;
  PageMailbox* mailbox = nullptr;  // null: there are no lean blocks
};

class CudaResidency final : public kvstore::PageResidency {
 public:
  // `stream` runs the steps' kernels, and outlives the residency.
  static absl::StatusOr<std::unique_ptr<CudaResidency>> Make(
      const kvstore::ResidencyOptions& options, const CudaStream& stream);
  // Waits for work in flight.
  ~CudaResidency() override;

  KvArenas arenas() const;
  PagesOnDisk pages_on_disk() const { return {.state = state_, .mailbox = mailbox_.get()}; }

  kvstore::HostSlab& host() override { return host_; }
  // Extents are pinned in their order, but for those that are awaited, while the first are used.
  absl::Status AwaitExtent(int64_t extent) override { return extents_->Await(extent); }
  bool IsExtentThere(int64_t extent) override { return extents_->IsThere(extent); }
  absl::Status Open(int64_t extent) override;
  absl::Status Seal(int64_t extent, const kvstore::PrefixHash& hash) override;
  // Checksums are made on a thread once the copy is over; the device makes none.
  absl::StatusOr<bool> IsExtentWhole(int64_t extent) override;
  void Restore(int64_t extent, const kvstore::PrefixHash& hash) override;
  void MakeLean(int64_t lean, const kvstore::PrefixHash& hash,
                std::optional<int64_t> from) override;
  void Free(int64_t extent) override;
  void Bind(int64_t slot, int64_t index, int64_t extent) override;
  int64_t BoundExtent(int64_t slot, int64_t index) const override {
    return block_extents_[static_cast<size_t>(slot * max_blocks_per_slot_ + index)];
  }
  void Promote(int64_t extent) override;
  // Both wait for the device at the first call after a step.
  uint32_t LastRead(int64_t extent) const override { return UseOf(extent).last_read; }
  int64_t PagesInDevice(int64_t extent) const override;
  absl::StatusOr<kernels::PagedKv> BeginStep(uint32_t step, bool binds_lean) override;
  absl::StatusOr<std::vector<kvstore::CorruptExtent>> EndStep() override;
  void EndSteps() override {
    if (mailbox_ != nullptr) mailbox_->Stop();
  }
  int64_t device_pages() const override { return state_.shape.num_slots; }
  int64_t openable_pages() const override { return state_.shape.num_slots - reserved_pages(); }
  int64_t pinned_pages() const override { return open_extents_ * state_.shape.pages_per_extent; }
  kvstore::ResidencyStats stats() const override;
  // Fetches the whole state.
  absl::Status CheckIntegrity() const override;

 private:
  enum class ExtentState : uint8_t { kNone, kOpening, kOpen, kSealed, kLean };
  // The copy of a sealed extent to the host tier.
  struct ExtentCopy {
    kvstore::PrefixHash hash{};
    int64_t number = 0;  // of the batch of copies that it was put on the stream with
    bool is_whole = false;
  };
  CudaResidency(const kvstore::ResidencyOptions& options, const CudaStream& stream,
                std::unique_ptr<PinnedRegion> extents);

  absl::Status TakeMemory(const kvstore::ResidencyOptions& options);
  absl::Status MakeTables();
  // Copies the digests of a lean block to their places on the device.
  absl::Status CopyDigests(int64_t lean, std::optional<int64_t> from);

  // Puts the commands on the stream, and the number of the step that follows them.
  absl::Status CarryOut(uint32_t step);
  // Begins copies of sealed extents to the host tier, which run beside the steps. The extents'
  // pages stay in place until the copies are known to be over, or until slots are scarce: then the
  // stream waits.
  absl::Status BeginCopies();
  // Has checksums made of the extents whose copies have ended.
  absl::Status BeginChecksums();
  absl::Status SealCopied();
  void TakeCopied();
  absl::Status TakeRestored(std::span<int32_t> device_extents);
  // Makes the stream wait for the copies of the planned fills, then maps them in the tables.
  absl::Status EndFills();
  // Writes down what is promoted before the step that begins: of blocks that a slot has.
  void PreparePromotion();
  // Brings pages into the device tier on the stream, before step `step`.
  absl::Status PromoteAsked(const DeviceCommands& device, uint32_t step);
  // As it was after the last step. After an error of the device, which the next step reports, it
  // says nothing.
  kernels::ExtentUse UseOf(int64_t extent) const;
  absl::StatusOr<std::vector<kernels::ExtentUse>> FetchUses() const;
  absl::Status CheckExtents(const kernels::ResidencyState& found) const;
  absl::Status CheckSlots(const kernels::ResidencyState& found) const;

  ExtentState& state_of(int64_t extent) { return extent_states_[static_cast<size_t>(extent)]; }
  // A layer may need its pages of all lean blocks at a time.
  int64_t reserved_pages() const { return state_.shape.num_lean * layout_.num_kv_heads; }
  // Pages of extents that are open or being copied.
  int64_t held_pages() const {
    return (open_extents_ + std::ssize(being_copied_)) * state_.shape.pages_per_extent;
  }

  // Constant after Make.
  const kvstore::ExtentFormat format_;
  const kernels::KvLayout layout_;
  const int64_t num_slots_;
  const int64_t max_blocks_per_slot_;
  const CudaStream& stream_;
  CudaStream fill_stream_, copy_stream_;
  CudaEvent planned_, filled_, written_, copied_;
  std::array<CudaEvent, 2> counted_;  // of odd and of even steps
  const std::unique_ptr<PinnedRegion> extents_;
  kvstore::HostSlab host_;
  kvstore::ChecksumThread checksums_;
  kernels::DeviceBuffer gathered_;  // pages on the way to extents
  kernels::DeviceBuffer arena_, bounds_, key_codes_, bounds_table_, key_codes_table_, state_memory_,
      block_extents_table_, step_number_;
  kernels::ResidencyState state_;  // in state_memory_

  const std::vector<std::byte*> lean_bounds_;  // [lean block], in host memory
  std::unique_ptr<PageMailbox> mailbox_;       // null: there are no lean blocks

  // The host's own books. Lean blocks follow the extents.
  std::vector<ExtentState> extent_states_;
  std::vector<ExtentCopy> copies_;     // [extent]
  std::vector<int32_t> being_copied_;  // extents not yet sealed on the device
  std::deque<int32_t> unsummed_;       // sealed extents, in order, whose copies may not have ended
  int64_t begun_copies_ = 0;
  int64_t ended_copies_ = 0;            // known to have ended
  std::vector<int32_t> bindings_;       // [extent], number of slots bound to it
  std::vector<int32_t> block_extents_;  // [slot, index]
  std::vector<bool> is_rebound_;        // [slot, index], whether it is among commands_.bound
  int64_t open_extents_ = 0;
  int64_t sealed_blocks_ = 0;
  ResidencyCommands commands_;
  std::vector<int32_t> asked_promotions_;  // extents, before the next step
  uint32_t step_ = 0;
  bool binds_lean_ = false;  // the step
  absl::Status digests_;     // the first error of CopyDigests

  CommandUpload upload_;
  kernels::PinnedBuffer counters_;  // [2], written by the device when counted_ is recorded
  kernels::ResidencyCounters seen_;
  mutable std::vector<kernels::ExtentUse> uses_;  // [extent]; empty: not fetched
};

}  // namespace kvasir::worker
