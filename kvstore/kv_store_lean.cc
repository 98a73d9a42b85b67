// The KV store and its lean blocks: restoring digests alone, and blocks that leave the host tier
// while they are in use.
#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"

#include "kernels/base/status_macros.h"
#include "kvstore/kv_store_impl.h"

namespace kvasir::kvstore {
namespace {

// A step waits so long for blocks to reach the disk, where no other room is left. A disk that is
// slower fails the row that needs the room.
constexpr absl::Duration kMostWait = absl::Seconds(10);
constexpr absl::Duration kPollInterval = absl::Milliseconds(1);
// Blocks are shed together, one in so many, because finding them reads the tables of all.
constexpr int64_t kShedPart = 16;

}  // namespace

bool KvStoreImpl::TakeLean(BlockId id, const PrefixHash& hash) {
  if (lean_ == nullptr || lean_->num_used() == lean_->range().count) return false;
  std::unique_ptr<HeldExtent> held = below_->Hold(hash);
  if (held == nullptr) return false;
  const int64_t extent = lean_->Take(std::move(held));
  extent_blocks_[static_cast<size_t>(extent)] = id;
  blocks_[id].extent = extent;
  return true;
}

absl::StatusOr<absl::Span<std::byte>> KvStoreImpl::PlaceOfRead(BlockState& block) {
  if (!IsLean(block)) {
    KVASIR_RETURN_IF_ERROR(AwaitMemory(block.extent));
    return host_.extent(block.extent);
  }
  if (!keeps_key_codes_) return lean_->front(block.extent);
  const int64_t staging = TakeExtent();
  const absl::Status there = AwaitMemory(staging);
  if (!there.ok()) {
    FreeExtent(staging);
    return there;
  }
  block.staging = staging;
  return host_.extent(staging);
}

void KvStoreImpl::EndLeanRead(BlockState& block, const absl::Status& status) {
  const int64_t staging = std::exchange(block.staging, -1);
  if (staging >= 0 && status.ok()) {
    CopyFront(staging, block.extent);
    pages_->Restore(staging, block.hash);  // makes key codes
    pages_->MakeLean(block.extent, block.hash, staging);
    pages_->Free(staging);
  } else if (status.ok()) {
    pages_->MakeLean(block.extent, block.hash, /*from=*/std::nullopt);
  }
  if (staging >= 0) host_.Free(staging);
  if (status.ok()) lean_->Show(block.extent, block.hash);
}

void KvStoreImpl::CopyFront(int64_t from, int64_t lean) {
  const absl::Span<std::byte> front = lean_->front(lean);
  std::copy_n(host_.extent(from).begin(), front.size(), front.begin());
}

void KvStoreImpl::ShedBlocks() {
  const int64_t most = std::max<int64_t>(1, whole_room() / kShedPart);
  for (const absl::Time end = absl::Now() + kMostWait; ShedStored(most) == 0;) {
    const bool writes = !unwritten_.empty() || !queued_writes_.empty() || !writes_.empty();
    if (!writes || lean_->num_used() == lean_->range().count || absl::Now() > end) return;
    if (writes_.empty() && !below_->stats().writable) return;
    absl::SleepFor(kPollInterval);
    PollTier();
  }
}

// Returns how many blocks it shed.
int64_t KvStoreImpl::ShedStored(int64_t most) {
  int64_t shed = 0;
  for (const BlockId id : FindSheddable()) {
    if (shed == most || lean_->num_used() == lean_->range().count) break;
    const BlockState& block = blocks_.at(id);
    std::unique_ptr<HeldExtent> held = below_->Hold(block.hash);
    // The pages of another sealing may differ in rounding from those that were read so far.
    if (held == nullptr || !held->IsOfSealing(block.generation)) continue;
    Shed(id, std::move(held));
    ++shed;
  }
  return shed;
}

// In the order in which they should leave.
std::vector<BlockId> KvStoreImpl::FindSheddable() const {
  std::vector<std::pair<uint32_t, BlockId>> found;
  for (const auto& [id, block] : blocks_) {
    const bool may_leave = block.sealed && !block.corrupt && !block.unused && !IsLean(block) &&
                           block.transfer == Transfer::kNone && below_->Holds(block.hash);
    if (may_leave) found.emplace_back(pages_->LastRead(block.extent), id);
  }
  std::sort(found.begin(), found.end());
  std::vector<BlockId> ids;
  for (const auto& [last_read, id] : found) ids.push_back(id);
  return ids;
}

void KvStoreImpl::Shed(BlockId id, std::unique_ptr<HeldExtent> held) {
  BlockState& block = blocks_.at(id);
  EndLending(block);
  const int64_t from = block.extent;
  const int64_t lean = lean_->Take(std::move(held));
  CopyFront(from, lean);
  pages_->MakeLean(lean, block.hash, from);
  lean_->Show(lean, block.hash);
  for (int64_t slot = 0; slot < num_slots_; ++slot) {
    const std::vector<Block>& bound = slots_[static_cast<size_t>(slot)];
    for (int64_t index = 0; index < std::ssize(bound); ++index) {
      if (pages_->BoundExtent(slot, index) == from) BindExtent(slot, index, lean);
    }
  }
  pages_->Free(from);
  host_.Free(from);
  extent_blocks_[static_cast<size_t>(from)] = BlockId();
  extent_blocks_[static_cast<size_t>(lean)] = id;
  block.extent = lean;
  block.adopted = false;
  ++stats_.shed_blocks;
}

void KvStoreImpl::WriteToShed() {
  const auto is_gone = [&](const QueuedWrite& write) {
    const auto it = blocks_.find(write.id);
    return it == blocks_.end() || it->second.generation != write.block.generation;
  };
  // Most blocks may go before anything is short.
  if (std::ssize(unwritten_) > 2 * whole_room()) std::erase_if(unwritten_, is_gone);
  const int64_t most_queued = std::max<int64_t>(1, whole_room() / 2);
  const bool is_needed = num_whole() >= whole_room() / 2 && !gives_up_writes_;
  if (!is_needed || unwritten_.empty() || !below_->stats().writable) return;
  for (; !unwritten_.empty() && std::ssize(queued_writes_) < most_queued; unwritten_.pop_front()) {
    const QueuedWrite& write = unwritten_.front();
    if (!is_gone(write)) Persist(write.id, write.block.tokens);
  }
}

}  // namespace kvasir::kvstore
