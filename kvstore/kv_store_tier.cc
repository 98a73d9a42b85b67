// The KV store and the tier below it: write-behind and restores.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

#include "kernels/base/status_macros.h"
#include "kvstore/kv_store_impl.h"

namespace kvasir::kvstore {
namespace {

// Fronts of lean blocks in transfer. They need no extents, and are small.
constexpr int64_t kMostFrontReads = 256;

}  // namespace

void KvStoreImpl::Persist(BlockId id, absl::Span<const int32_t> tokens) {
  KVASIR_CHECK(!in_step_ && tokens.size() == static_cast<size_t>(kBlockTokens));
  const auto it = blocks_.find(id);
  if (below_ == nullptr || it == blocks_.end()) return;
  BlockState& block = it->second;
  if (!block.sealed || block.corrupt || block.transfer != Transfer::kNone ||
      below_->Holds(block.hash)) {
    return;
  }
  // Limit: half of the host tier. A block that waits longer is likely to be evicted before its
  // turn.
  if (static_cast<int64_t>(queued_writes_.size()) >= std::max<int64_t>(1, whole_room() / 2)) {
    ++stats_.dropped_writes;
    return;
  }
  QueuedWrite write = {.id = id, .block = block.identity()};
  std::copy(tokens.begin(), tokens.end(), write.block.tokens.begin());
  block.transfer = Transfer::kWriteQueued;
  queued_writes_.push_back(std::move(write));
  StartTransfers();
}

absl::Status KvStoreImpl::Restore(BlockId id, const PrefixHash& hash, const PrefixHash& owner) {
  KVASIR_CHECK(!in_step_);
  if (blocks_.contains(id)) {
    return absl::AlreadyExistsError(absl::StrCat("block ", id.value, " is open or kept already"));
  }
  if (adopted_.Holds(hash)) return RestoreAdopted(id, hash, owner);
  if (below_ == nullptr || !below_->MayRead(hash)) {
    return absl::NotFoundError(absl::StrCat("block ", id.value, " is not stored"));
  }
  if (!TakeLean(id, hash)) KVASIR_RETURN_IF_ERROR(TakeHostExtent(id).status());
  BlockState& block = blocks_.at(id);
  block.hash = hash;
  block.owner = owner;
  block.kept = true;
  block.transfer = Transfer::kReadQueued;
  queued_reads_.push_back(id);
  StartTransfers();
  return absl::OkStatus();
}

void KvStoreImpl::PollTier() {
  KVASIR_CHECK(!in_step_);
  WriteDueHeaders();
  TakeVerified();
  if (below_ != nullptr) {
    CollectCompletions();
    if (lean_ != nullptr) WriteToShed();
    StartTransfers();
  }
  AdvanceExports();
  AdvanceErases();
}

bool KvStoreImpl::TierIsBusy() const {
  return !queued_writes_.empty() || !queued_reads_.empty() || !queued_at_peers_.empty() ||
         !writes_.empty() || !reads_.empty() || !due_headers_.empty() ||
         adopted_.num_verifying() > 0 || !erasing_.empty() || !exports_.empty() ||
         (below_ != nullptr && below_->ExpectsBlocks());
}

void KvStoreImpl::CollectCompletions() {
  TierEvents events = below_->Poll();
  for (const TierCompletion& completion : events.completions) {
    if (const auto read = reads_.extract(completion.ticket)) {
      reads_at_peers_ -= read.mapped().at_peers ? 1 : 0;
      front_reads_ -= read.mapped().is_front ? 1 : 0;
      OnRead(read.mapped().id, completion);
    } else {
      OnWritten(writes_.extract(completion.ticket).mapped(), completion.status);
    }
  }
  // A block that has been stored again since is reported by that write's completion.
  for (const PrefixHash& hash : events.forgotten) {
    ReportIfForgotten(hash);
  }
  for (const TierErased& erased : events.erased) {
    Erasing& erasing = erasing_.front();  // they go one after the other
    erasing.counts.status = erased.status;
    erasing.counts.below_blocks = erased.blocks;
    erasing.counts.below_bytes = erased.bytes;
    erased_.push_back(erasing.counts);
    erasing_.pop_front();
  }
  for (const StoredBlock& block : events.found) {
    if (below_->Holds(block.hash)) changed_[block.hash] = block.tokens;
  }
}

void KvStoreImpl::OnWritten(const QueuedWrite& write, const absl::Status& status) {
  blocks_.at(write.id).transfer = Transfer::kNone;
  // A block that has been forgotten since is reported as forgotten.
  if (status.ok() && below_->Holds(write.block.hash)) {
    changed_[write.block.hash] = write.block.tokens;
  }
  if (!status.ok() && lean_ != nullptr && !gives_up_writes_) unwritten_.push_back(write);
  FreeIfUnused(write.id);
}

void KvStoreImpl::OnRead(BlockId id, const TierCompletion& completion) {
  BlockState& block = blocks_.at(id);
  const bool is_absent = completion.from_peer && absl::IsNotFound(completion.status);
  if (!is_absent) {
    ++(completion.status.ok() ? stats_.restored_blocks : stats_.failed_restores);
  }
  if (completion.status.ok()) {
    block.generation = completion.block.generation;
    block.sealed = true;
    block.restored = true;
    block.from_peer = completion.from_peer;
    if (!IsLean(block)) {
      WriteOwner(block, completion.block);
      host_.MarkWhole(block.extent);
      Lend(block);
      pages_->Restore(block.extent, block.hash);
    }
  }
  if (IsLean(block)) EndLeanRead(block, completion.status);
  EndRead(id, completion.status);
}

void KvStoreImpl::EndRead(BlockId id, const absl::Status& status) {
  BlockState& block = blocks_.at(id);
  block.transfer = Transfer::kNone;
  if (!block.unused) restored_.push_back({.id = id, .status = status});
  if (!status.ok()) block.kept = false;
  FreeIfUnused(id);
}

// The header of an extent in memory is what a later process and peers are told of it.
void KvStoreImpl::WriteOwner(const BlockState& block, BlockIdentity found) {
  if (found.owner == block.owner) return;
  found.owner = block.owner;
  format_.WriteHeader(found, host_.extent(block.extent));
}

void KvStoreImpl::Lend(BlockState& block) {
  if (lent_ == nullptr) return;
  block.lent = true;
  lent_->Add(block.hash, host_.extent(block.extent));
}

void KvStoreImpl::EndLending(BlockState& block) {
  if (std::exchange(block.lent, false)) lent_->Remove(block.hash, host_.extent(block.extent));
}

// Reads go first: a sequence waits for them.
void KvStoreImpl::StartTransfers() {
  StartReads();
  StartWrites();
}

void KvStoreImpl::StartReads() {
  std::vector<TierRead> reads;
  const auto start = [&](BlockId id, BlockState& block, bool at_peers) {
    const absl::StatusOr<absl::Span<std::byte>> place = PlaceOfRead(block);
    if (!place.ok()) {
      EndRead(id, place.status());
      return;
    }
    block.transfer = Transfer::kReading;
    const bool is_front = IsLean(block) && block.staging < 0;
    reads_at_peers_ += at_peers ? 1 : 0;
    front_reads_ += is_front ? 1 : 0;
    reads_[++next_ticket_] = {.id = id, .at_peers = at_peers, .is_front = is_front};
    reads.push_back({.ticket = next_ticket_, .hash = block.hash, .extent = *place});
  };
  const auto is_dropped = [&](BlockId id) {
    const auto it = blocks_.find(id);
    return it == blocks_.end() || it->second.transfer != Transfer::kReadQueued;
  };
  const auto peers_have_room = [&] { return reads_at_peers_ < MostReadsAtPeers(); };
  // A step does not wait for the memory of blocks that it does not compute.
  const auto has_memory = [&](const BlockState& block) {
    return IsLean(block) || IsMemoryThere(block.extent);
  };
  for (; HasRoomForTransfer() && peers_have_room() && !queued_at_peers_.empty();
       queued_at_peers_.pop_front()) {
    const BlockId id = queued_at_peers_.front();
    if (is_dropped(id)) continue;
    if (!has_memory(blocks_.at(id))) break;
    start(id, blocks_.at(id), /*at_peers=*/true);
  }
  for (; !queued_reads_.empty(); queued_reads_.pop_front()) {
    const BlockId id = queued_reads_.front();
    if (is_dropped(id)) continue;
    BlockState& block = blocks_.at(id);
    const bool is_front = IsLean(block) && !keeps_key_codes_;
    if (is_front ? front_reads_ == kMostFrontReads : !HasRoomForTransfer()) break;
    if (!has_memory(block)) break;
    const bool at_peers = !IsLean(block) && !below_->Holds(block.hash);
    if (at_peers && !peers_have_room()) {
      queued_at_peers_.push_back(id);
    } else {
      start(id, block, at_peers);
    }
  }
  if (!reads.empty()) below_->Read(std::move(reads));
}

void KvStoreImpl::StartWrites() {
  std::vector<TierWrite> writes;
  for (; HasRoomForTransfer() && !queued_writes_.empty(); queued_writes_.pop_front()) {
    const QueuedWrite& write = queued_writes_.front();
    BlockState& block = blocks_.at(write.id);
    const absl::StatusOr<bool> is_whole = pages_->IsExtentWhole(block.extent);
    if (is_whole.ok() && !*is_whole) break;  // still being copied, and so are the later ones
    block.transfer = Transfer::kNone;
    if (block.corrupt || !is_whole.ok()) {
      stats_.dropped_writes += is_whole.ok() ? 0 : 1;
      FreeIfUnused(write.id);
      continue;
    }
    const absl::Span<std::byte> extent = host_.extent(block.extent);
    format_.WriteHeader(write.block, extent);
    block.transfer = Transfer::kWriting;
    writes_[++next_ticket_] = write;
    writes.push_back({.ticket = next_ticket_, .block = write.block, .extent = extent});
  }
  if (!writes.empty()) below_->Write(std::move(writes));
}

void KvStoreImpl::CancelOneUnusedWrite() {
  const auto write =
      std::find_if(queued_writes_.begin(), queued_writes_.end(),
                   [&](const QueuedWrite& queued) { return blocks_.at(queued.id).unused; });
  // Fewer blocks are used than there are extents without the spare ones, and no more transfers are
  // in flight than there are spare ones.
  KVASIR_CHECK(write != queued_writes_.end());
  const BlockId id = write->id;
  queued_writes_.erase(write);
  blocks_.at(id).transfer = Transfer::kNone;
  ++stats_.dropped_writes;
  FreeIfUnused(id);
}

StoredChanges KvStoreImpl::TakeStoredChanges() {
  StoredChanges changes;
  for (const auto& [hash, tokens] : std::exchange(changed_, {})) {
    if (tokens.has_value()) {
      changes.stored.push_back({.hash = hash, .tokens = *tokens});
    } else {
      changes.forgotten.push_back(hash);
    }
  }
  return changes;
}

std::vector<StoredBlock> KvStoreImpl::Inventory() const {
  std::vector<StoredBlock> stored = adopted_.Inventory();
  if (below_ == nullptr) return stored;
  for (const StoredBlock& block : below_->Inventory()) {
    if (!adopted_.Holds(block.hash)) stored.push_back(block);
  }
  return stored;
}

absl::Status KvStoreImpl::Flush(absl::Duration most) {
  KVASIR_CHECK(!in_step_);
  int64_t given_up = 0;
  for (const absl::Time end = absl::Now() + most; !queued_writes_.empty() || !writes_.empty();) {
    gives_up_writes_ = absl::Now() >= end;
    if (gives_up_writes_) given_up += GiveUpWrites();
    below_->Wait();
    PollTier();
  }
  gives_up_writes_ = false;
  if (given_up == 0) return absl::OkStatus();
  return absl::DeadlineExceededError(absl::StrCat(
      given_up, " blocks were not written to the tier below within ", absl::FormatDuration(most),
      ", because it is slow; they are computed again when they are needed"));
}

// Returns how many of those that were queued.
int64_t KvStoreImpl::GiveUpWrites() {
  unwritten_.clear();
  const auto given_up = std::exchange(queued_writes_, {});
  for (const QueuedWrite& write : given_up) {
    blocks_.at(write.id).transfer = Transfer::kNone;
    FreeIfUnused(write.id);
  }
  stats_.dropped_writes += std::ssize(given_up);
  return std::ssize(given_up);
}

}  // namespace kvasir::kvstore
