// The KV store and the host memory that outlives it: headers by which sealed blocks are adopted,
// and adopted blocks.
#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

#include "kernels/base/status_macros.h"
#include "kvstore/kv_store_impl.h"

namespace kvasir::kvstore {

// A header is written last: an extent with one holds a whole block.
void KvStoreImpl::WriteDueHeaders() {
  for (; !due_headers_.empty(); due_headers_.pop_front()) {
    const DueHeader& due = due_headers_.front();
    const auto it = blocks_.find(due.id);
    if (it == blocks_.end() || it->second.generation != due.block.generation) continue;  // freed
    if (it->second.corrupt || IsLean(it->second)) continue;
    const absl::StatusOr<bool> is_whole = pages_->IsExtentWhole(it->second.extent);
    if (!is_whole.ok()) continue;  // an error of the device: the next step reports it
    if (!*is_whole) return;        // nor are the later ones
    format_.WriteHeader(due.block, host_.extent(it->second.extent));
    host_.MarkWhole(it->second.extent);
    Lend(it->second);
  }
}

absl::Status KvStoreImpl::RestoreAdopted(BlockId id, const PrefixHash& hash,
                                         const PrefixHash& owner) {
  KVASIR_RETURN_IF_ERROR(CheckHostRoom(id));
  const int64_t extent = adopted_.BeginVerify(hash);
  extent_blocks_[static_cast<size_t>(extent)] = id;
  blocks_[id] = {.extent = extent,
                 .kept = true,
                 .transfer = Transfer::kVerifying,
                 .hash = hash,
                 .owner = owner};
  ReportIfForgotten(hash);
  return absl::OkStatus();
}

void KvStoreImpl::TakeVerified() {
  for (const AdoptedBlocks::Verified& verified : adopted_.TakeVerified()) OnVerified(verified);
}

void KvStoreImpl::OnVerified(const AdoptedBlocks::Verified& verified) {
  const BlockId id = extent_blocks_[static_cast<size_t>(verified.extent)];
  BlockState& block = blocks_.at(id);
  block.transfer = Transfer::kNone;
  absl::Status status = verified.status;
  if (status.ok()) status = pages_->AwaitExtent(verified.extent);
  if (status.ok()) {
    block.generation = verified.block.generation;
    WriteOwner(block, verified.block);
    host_.MarkWhole(block.extent);
    block.sealed = true;
    block.adopted = true;
    Lend(block);
    pages_->Restore(block.extent, block.hash);
  } else if (below_ != nullptr && below_->MayRead(block.hash) && !block.unused) {
    block.transfer = Transfer::kReadQueued;  // over what is there
    queued_reads_.push_back(id);
    return;
  } else {
    block.kept = false;
  }
  if (!block.unused) restored_.push_back({.id = id, .status = status});
  FreeIfUnused(id);
}

void KvStoreImpl::MakeRoom() {
  if (adopted_.size() == 0 && adopted_.num_verifying() > 0) {  // some may be dropped already
    adopted_.AwaitVerified();
    TakeVerified();
    if (host_.num_free() > 0) return;
  }
  if (const std::optional<PrefixHash> evicted = adopted_.EvictOne()) {
    ReportIfForgotten(*evicted);
    return;
  }
  CancelOneUnusedWrite();
}

void KvStoreImpl::ReportIfForgotten(const PrefixHash& hash) {
  if (adopted_.Holds(hash) || (below_ != nullptr && below_->Holds(hash))) return;
  changed_[hash] = std::nullopt;
}

}  // namespace kvasir::kvstore
