// The KV store and what it forgets for good: blocks are overwritten in host memory, then in the
// tier below. A part at a time, since steps go on.
#include <algorithm>
#include <utility>

#include "kvstore/kv_store_impl.h"

namespace kvasir::kvstore {
namespace {

// Bytes of host memory that are overwritten at once: some 30 ms of a core.
constexpr int64_t kWipedAtOnce = int64_t{256} << 20;

}  // namespace

void KvStoreImpl::Erase(TierErase erase) {
  KVASIR_CHECK(!in_step_);
  Erasing erasing = {.order = std::move(erase)};
  erasing.counts.ticket = erasing.order.ticket;
  for (const auto& [id, block] : blocks_) {
    if (block.sealed && erasing.order.Covers(block.identity())) erasing.ids.push_back(id);
    if (IsRead(block.transfer)) erasing.reads.push_back(id);
  }
  const std::vector<PrefixHash> adopted = adopted_.DropCovered(erasing.order);
  for (const PrefixHash& hash : adopted) ReportIfForgotten(hash);
  erasing.counts.host_blocks = std::ssize(adopted);
  erasing_.push_back(std::move(erasing));
}

void KvStoreImpl::AdvanceErases() {
  if (erasing_.empty() || erasing_.front().is_below) return;
  Erasing& erasing = erasing_.front();
  CancelWritesOf(erasing.order);
  if (IsInTransfer(erasing) || !WipeHost(erasing)) return;
  for (const BlockId id : erasing.ids) {
    ++(blocks_.contains(id) ? erasing.counts.blocks_in_use : erasing.counts.host_blocks);
  }
  erasing.is_below = below_ != nullptr && below_->Erase(erasing.order);
  if (erasing.is_below) return;
  erased_.push_back(erasing.counts);
  erasing_.pop_front();
}

void KvStoreImpl::CancelWritesOf(const TierErase& order) {
  std::vector<BlockId> cancelled;
  std::erase_if(queued_writes_, [&](const QueuedWrite& write) {
    if (!order.Covers(write.block)) return false;
    cancelled.push_back(write.id);
    return true;
  });
  std::erase_if(unwritten_, [&](const QueuedWrite& write) { return order.Covers(write.block); });
  for (const BlockId id : cancelled) {
    blocks_.at(id).transfer = Transfer::kNone;
    FreeIfUnused(id);
  }
}

bool KvStoreImpl::IsInTransfer(const Erasing& erasing) const {
  const auto is_in_transfer = [this](BlockId id) {
    const auto it = blocks_.find(id);
    return it != blocks_.end() && it->second.transfer != Transfer::kNone;
  };
  return std::any_of(erasing.ids.begin(), erasing.ids.end(), is_in_transfer) ||
         std::any_of(erasing.reads.begin(), erasing.reads.end(), is_in_transfer);
}

// A block that is written or read now has its extent from an earlier one.
bool KvStoreImpl::WipeHost(Erasing& erasing) {
  const int64_t bytes = host_.WipeFree(kWipedAtOnce);
  erasing.counts.host_bytes += bytes;
  if (bytes > 0) return false;
  for (const auto& [id, block] : blocks_) {
    if (IsLean(block) || !host_.is_stale(block.extent)) continue;
    if (block.sealed || block.transfer != Transfer::kNone) {
      host_.WipeWhenFreed(block.extent);
    } else {
      erasing.counts.host_bytes += host_.WipeTaken(block.extent);
    }
  }
  return true;
}

}  // namespace kvasir::kvstore
