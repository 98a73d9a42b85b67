// The implementation of kv_store.h, for its own files only: kv_store.cc (blocks, slots, steps),
// kv_store_tier.cc (the tier below), kv_store_lean.cc (blocks whose pages stay there),
// kv_store_adoption.cc (memory that outlives the store), kv_store_erase.cc (overwriting what is
// forgotten), kv_store_exchange.cc (bytes for elsewhere, and from there), kv_store_check.cc (checks
// of the bookkeeping). A PageResidency knows where pages lie (tiers/page_residency.h).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

#include "kernels/paged/paged_kv.h"
#include "kvstore/format/page_format.h"
#include "kvstore/host/host_slab.h"
#include "kvstore/host/memory_ahead.h"
#include "kvstore/kv_store.h"
#include "kvstore/on_demand/lean_blocks.h"
#include "kvstore/tiers/page_residency.h"
#include "kvstore/tiers/tier.h"

namespace kvasir::kvstore {

class KvStoreImpl : public KvStore, private BlockOwner {
 public:
  struct Parts {
    ExtentFormat format;
    std::unique_ptr<HostMemory> own_memory;  // null: it is lent
    HostMemory& memory;
    std::unique_ptr<PageResidency> pages;
    std::unique_ptr<Tier> below;
    std::unique_ptr<LeanBlocks> lean;
    int64_t spare_extents = 0;  // of the host tier, for transfers
  };

  KvStoreImpl(const KvStoreOptions& options, Parts parts);
  // Releases all bound blocks first, also in the middle of a step: the handles in the slots are the
  // store's own.
  ~KvStoreImpl() override {
    pages_->EndSteps();
    in_step_ = false;
    for (int64_t slot = 0; slot < num_slots_; ++slot) Unbind(slot, 0);
  }

  absl::StatusOr<Block> Open(BlockId id) override;
  absl::StatusOr<Block> Get(BlockId id) override;
  absl::Status Seal(BlockId id, const PrefixHash& hash, absl::Span<const int32_t> tokens,
                    const PrefixHash& owner) override;
  void Drop(BlockId id) override;
  bool Holds(BlockId id) const override;
  BlockResidency Where(BlockId id) const override;
  void Bind(int64_t slot, int64_t index, Block block) override;
  void Unbind(int64_t slot, int64_t first_index) override;
  void Promote(int64_t slot) override;
  bool MayRunAhead(int64_t opened) const override;
  absl::StatusOr<kernels::PagedKv> BeginStep(uint32_t step) override;
  absl::Status EndStep() override;
  std::vector<CorruptBlock> TakeCorrupt() override { return std::exchange(corrupt_, {}); }
  void Persist(BlockId id, absl::Span<const int32_t> tokens) override;
  void PinBelow(absl::Span<const PrefixHash> blocks) override {
    if (below_ != nullptr) below_->Pin(blocks);
  }
  void UnpinBelow(absl::Span<const PrefixHash> blocks) override {
    if (below_ != nullptr) below_->Unpin(blocks);
  }
  void Erase(TierErase erase) override;
  std::vector<ErasedBlocks> TakeErased() override { return std::exchange(erased_, {}); }
  void Export(uint64_t ticket, BlockId id) override;
  std::vector<ExportedBlock> TakeExported() override { return std::exchange(exported_, {}); }
  absl::Status Import(BlockId id, const BlockIdentity& block,
                      absl::Span<const HeadPart> parts) override;
  absl::Status Restore(BlockId id, const PrefixHash& hash, const PrefixHash& owner) override;
  void PollTier() override;
  bool TierIsBusy() const override;
  std::vector<RestoredBlock> TakeRestored() override { return std::exchange(restored_, {}); }
  StoredChanges TakeStoredChanges() override;
  std::vector<StoredBlock> Inventory() const override;
  absl::Status Flush(absl::Duration most) override;
  int64_t device_blocks() const override { return pages_->openable_pages() / pages_per_block_; }
  int64_t host_blocks() const override {
    return whole_room() + (lean_ == nullptr ? 0 : lean_->range().count);
  }
  SlotWaits TakeWaits(int64_t slot) override {
    return lean_ == nullptr ? SlotWaits() : lean_->cache().TakeWaits(slot);
  }
  KvStoreStats stats() const override;
  absl::Status CheckIntegrity() const override;

 private:
  enum class Transfer : uint8_t {
    kNone,
    kWriteQueued,
    kReadQueued,
    kWriting,
    kReading,
    kVerifying
  };
  struct BlockState {
    int64_t extent = 0;    // in the tables of the residency: of the host tier, or of a lean block
    int64_t staging = -1;  // extent of the host tier through which a lean block is read
    int64_t handles = 0;
    bool sealed = false;
    bool kept = false;
    bool corrupt = false;
    bool restored = false;  // from the tier below, and not bound since
    bool from_peer = false;
    bool adopted = false;  // verified, and not bound since
    // The block is not kept and has no handles: only a transfer holds its extent.
    bool unused = false;
    bool lent = false;
    Transfer transfer = Transfer::kNone;
    PrefixHash hash{};
    PrefixHash owner{};
    uint64_t generation = 0;

    BlockIdentity identity() const {
      return {.hash = hash, .generation = generation, .tokens = {}, .owner = owner};
    }
  };
  struct Erasing {
    TierErase order;
    std::vector<BlockId> ids = {};    // that were there when it was ordered
    std::vector<BlockId> reads = {};  // whose owner is not known until they end
    bool is_below = false;            // the host tier is done
    ErasedBlocks counts = {};
  };
  struct QueuedWrite {
    BlockId id;
    BlockIdentity block;
  };
  struct Read {
    BlockId id;
    bool at_peers = false;
    bool is_front = false;  // of a lean block, without its pages
  };
  // A sealed block whose extent gets its header when it is whole.
  using DueHeader = QueuedWrite;

  // Copies what is whole by now.
  void AdvanceExports();
  // UNAVAILABLE while the block is not whole.
  absl::StatusOr<std::vector<ExportedBlock::Part>> PartsOf(BlockId id) const;
  // Fills an extent, except its header.
  absl::Status PutParts(const PrefixHash& hash, absl::Span<const HeadPart> parts,
                        absl::Span<std::byte> extent) const;

  // Goes on with the first of the orders.
  void AdvanceErases();
  void CancelWritesOf(const TierErase& order);
  bool IsInTransfer(const Erasing& erasing) const;
  // Returns false while there is more to overwrite.
  bool WipeHost(Erasing& erasing);

  static bool IsRead(Transfer transfer) {
    return transfer == Transfer::kReadQueued || transfer == Transfer::kReading ||
           transfer == Transfer::kVerifying;
  }

  void Release(BlockId id) override;
  void FreeIfUnused(BlockId id);
  // Takes an extent of the host tier for block `id`, and returns its index. RESOURCE_EXHAUSTED when
  // there is none. Its memory must be awaited.
  absl::StatusOr<int64_t> TakeHostExtent(BlockId id);
  // Takes an extent of the host tier, of which a block or a transfer has room.
  int64_t TakeExtent();
  // Waits for an extent's memory, which must be there before anyone touches it.
  absl::Status AwaitMemory(int64_t extent);
  // Whether AwaitMemory would not wait for long.
  bool IsMemoryThere(int64_t extent) const;
  void FreeExtent(int64_t extent);
  absl::Status CheckHostRoom(BlockId id) const;
  bool IsLean(int64_t extent) const { return lean_ != nullptr && lean_->range().contains(extent); }
  bool IsLean(const BlockState& block) const { return IsLean(block.extent); }
  // Makes `extent` block `index` of the slot; -1: there is none.
  void BindExtent(int64_t slot, int64_t index, int64_t extent);
  // Blocks that may lie whole in the host tier, and those that do and are used.
  int64_t whole_room() const { return host_.num_extents() - spare_extents_; }
  int64_t num_whole() const {
    return static_cast<int64_t>(blocks_.size()) - num_unused_ -
           (lean_ == nullptr ? 0 : lean_->num_used());
  }

  // Makes room for a stored block that will be lean, if it can be.
  bool TakeLean(BlockId id, const PrefixHash& hash);
  // Where a block's read goes. A lean one's front is enough, unless key codes must be made, which
  // are not stored: then all of it comes through an extent of the host tier.
  absl::StatusOr<absl::Span<std::byte>> PlaceOfRead(BlockState& block);
  void EndLeanRead(BlockState& block, const absl::Status& status);
  void CopyFront(int64_t from, int64_t lean);
  // Where the host tier is full, makes lean blocks of those that were not read for longest. Waits
  // for writes if it must, for a bounded time.
  void ShedBlocks();
  int64_t ShedStored(int64_t most);
  std::vector<BlockId> FindSheddable() const;
  void Shed(BlockId id, std::unique_ptr<HeldExtent> held);
  // Queues writes of sealed blocks, oldest first, where room in the host tier may get short.
  void WriteToShed();

  void Quarantine(CorruptExtent corrupt);
  // Lets peers read a block whose extent is whole, with its header; and no longer.
  void Lend(BlockState& block);
  void EndLending(BlockState& block);

  absl::Status RestoreAdopted(BlockId id, const PrefixHash& hash, const PrefixHash& owner);
  // Puts the block's owner into the header of what was found, in place of the one it claims.
  void WriteOwner(const BlockState& block, BlockIdentity found);
  // Frees an extent of the host tier, of which none is free.
  void MakeRoom();
  void CancelOneUnusedWrite();
  int64_t GiveUpWrites();
  // Whether the block is neither in the tier below nor adopted any more: then that is reported.
  void ReportIfForgotten(const PrefixHash& hash);
  void WriteDueHeaders();
  void TakeVerified();
  void OnVerified(const AdoptedBlocks::Verified& verified);
  void CollectCompletions();
  void OnWritten(const QueuedWrite& write, const absl::Status& status);
  void OnRead(BlockId id, const TierCompletion& completion);
  void EndRead(BlockId id, const absl::Status& status);
  void StartTransfers();
  void StartReads();
  void StartWrites();
  bool HasRoomForTransfer() const {
    return static_cast<int64_t>(reads_.size() + writes_.size()) - front_reads_ < spare_extents_;
  }
  // A peer that is slow or has stopped keeps its reads for seconds: the disk goes on beside them.
  int64_t MostReadsAtPeers() const { return std::max<int64_t>(1, spare_extents_ / 2); }

  absl::Status CheckBlocks() const;
  absl::Status CheckBlock(BlockId id, const BlockState& block) const;
  absl::Status CheckSlots() const;

  const ExtentFormat format_;
  const kernels::KvLayout layout_;
  const int64_t pages_per_block_;
  const int64_t num_slots_;
  const int64_t max_blocks_per_slot_;

  const int64_t spare_extents_;
  const bool keeps_key_codes_;

  const std::unique_ptr<HostMemory> own_memory_;
  HostMemory& memory_;
  const std::unique_ptr<PageResidency> pages_;
  HostSlab& host_;  // of pages_
  MemoryAhead ahead_;
  AdoptedBlocks adopted_;
  std::deque<DueHeader> due_headers_;  // in the order of sealing
  absl::flat_hash_map<BlockId, BlockState> blocks_;
  int64_t num_unused_ = 0;              // of blocks that are not lean
  std::vector<BlockId> extent_blocks_;  // [extent or lean block], no id while it is free
  int64_t lean_bindings_ = 0;           // entries of slots that name lean blocks
  bool in_step_ = false;
  uint32_t step_ = 0;
  uint64_t next_generation_ = 1;
  std::vector<BlockId> released_in_step_;
  std::vector<CorruptBlock> corrupt_;
  KvStoreStats stats_;  // except those that pages_ counts

  // Transfers in flight: each holds its block's extent, or one to stage it; there are at most
  // spare_extents_, and at most MostReadsAtPeers() of blocks that below_ did not hold itself. Reads
  // of fronts come on top.
  std::deque<QueuedWrite> queued_writes_;
  std::deque<BlockId> queued_reads_;
  std::deque<BlockId> queued_at_peers_;  // reads that wait for room among those at peers
  uint64_t next_ticket_ = 0;
  absl::flat_hash_map<uint64_t, QueuedWrite> writes_;  // in flight, by ticket
  absl::flat_hash_map<uint64_t, Read> reads_;
  int64_t reads_at_peers_ = 0;  // of reads_
  int64_t front_reads_ = 0;     // likewise; they do not count for spare_extents_
  std::vector<RestoredBlock> restored_;
  std::deque<std::pair<uint64_t, BlockId>> exports_;  // by ticket, in order
  std::vector<ExportedBlock> exported_;
  std::deque<Erasing> erasing_;
  std::vector<ErasedBlocks> erased_;
  // Changes since the last report. Without tokens: forgotten.
  absl::flat_hash_map<PrefixHash, std::optional<std::array<int32_t, kBlockTokens>>> changed_;

  std::deque<DueHeader> unwritten_;  // sealed, not known to be stored; used with lean blocks only
  bool gives_up_writes_ = false;     // at the end of a flush

  const std::unique_ptr<Tier> below_;       // null: none. Destroyed before the memory it works on
  LentBlocks* const lent_;                  // of below_; null: peers read nothing
  const std::unique_ptr<LeanBlocks> lean_;  // null: none
  std::vector<std::vector<Block>> slots_;   // destroyed first: its handles call Release
};

}  // namespace kvasir::kvstore
