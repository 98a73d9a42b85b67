#include <algorithm>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kvstore/kv_store_impl.h"

namespace kvasir::kvstore {

absl::Status KvStoreImpl::CheckIntegrity() const {
  KVASIR_RETURN_IF_ERROR(pages_->CheckIntegrity());
  KVASIR_RETURN_IF_ERROR(CheckBlocks());
  if (lean_ != nullptr) KVASIR_RETURN_IF_ERROR(lean_->cache().CheckIntegrity());
  return CheckSlots();
}

absl::Status KvStoreImpl::CheckBlocks() const {
  int64_t pinned = 0;
  int64_t unused = 0;
  int64_t reading = 0;
  int64_t writing = 0;
  int64_t lean = 0;
  int64_t staging = 0;
  for (const auto& [id, block] : blocks_) {
    KVASIR_RETURN_IF_ERROR(CheckBlock(id, block));
    pinned += !block.sealed && !IsRead(block.transfer) ? pages_per_block_ : 0;
    unused += block.unused && !IsLean(block) ? 1 : 0;
    lean += IsLean(block) ? 1 : 0;
    staging += block.staging >= 0 ? 1 : 0;
    reading += block.transfer == Transfer::kReading ? 1 : 0;
    writing += block.transfer == Transfer::kWriting ? 1 : 0;
  }
  const int64_t host_used = host_.num_extents() - host_.num_free() - adopted_.size();
  const int64_t whole = static_cast<int64_t>(blocks_.size()) - lean;
  if (pinned != pages_->pinned_pages() || host_used != whole + staging) {
    return absl::InternalError(
        absl::StrCat("kv store: ", whole, " blocks, ", staging, " on their way, ", host_used,
                     " host extents used; open blocks have ", pinned, " pages, ",
                     pages_->pinned_pages(), " are pinned in the device tier"));
  }
  if (unused != num_unused_ || reading != static_cast<int64_t>(reads_.size()) ||
      writing != static_cast<int64_t>(writes_.size()) ||
      reading + writing - front_reads_ > spare_extents_ || reads_at_peers_ > MostReadsAtPeers() ||
      reads_at_peers_ > reading || whole - unused > whole_room() ||
      lean != (lean_ == nullptr ? 0 : lean_->num_used())) {
    return absl::InternalError(
        absl::StrCat("kv store: ", unused, " unused blocks, counted ", num_unused_, "; ", reading,
                     " reads of ", reads_.size(), ", ", reads_at_peers_, " at peers, and ", writing,
                     " writes of ", writes_.size(), " under way, at most ", spare_extents_, "; ",
                     whole, " blocks, room for ", whole_room(), "; ", lean, " lean blocks"));
  }
  return absl::OkStatus();
}

absl::Status KvStoreImpl::CheckBlock(BlockId id, const BlockState& block) const {
  const auto broken = [&](absl::string_view what) {
    return absl::InternalError(absl::StrCat("kv store: block ", id.value, " ", what));
  };
  if (extent_blocks_[static_cast<size_t>(block.extent)] != id ||
      (!IsLean(block) && !host_.taken(block.extent))) {
    return broken("has an extent that is not its own");
  }
  if (!block.kept && block.handles == 0 && !block.unused && !in_step_) {
    return broken("is unused and not freed");
  }
  if (block.unused && (block.kept || block.handles > 0 || block.transfer == Transfer::kNone)) {
    return broken("is taken for unused");
  }
  return absl::OkStatus();
}

absl::Status KvStoreImpl::CheckSlots() const {
  int64_t lean_bindings = 0;
  for (int64_t slot = 0; slot < num_slots_; ++slot) {
    const std::vector<Block>& bound = slots_[static_cast<size_t>(slot)];
    for (int64_t index = 0; index < max_blocks_per_slot_; ++index) {
      const int64_t extent = pages_->BoundExtent(slot, index);
      const bool is_bound =
          index < static_cast<int64_t>(bound.size()) && bound[static_cast<size_t>(index)];
      const int64_t expected =
          is_bound ? blocks_.at(bound[static_cast<size_t>(index)].id()).extent : -1;
      if (extent != expected) {
        return absl::InternalError(absl::StrCat("kv store: slot ", slot, " block ", index,
                                                " is extent ", extent, ", bound to extent ",
                                                expected));
      }
      lean_bindings += IsLean(extent);
    }
  }
  if (lean_bindings != lean_bindings_) {
    return absl::InternalError(absl::StrCat("kv store: slots name lean blocks ", lean_bindings,
                                            " times, counted were ", lean_bindings_));
  }
  return absl::OkStatus();
}

}  // namespace kvasir::kvstore
