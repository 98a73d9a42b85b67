#include <algorithm>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kvstore/kv_store_impl.h"

namespace kvasir::kvstore {

using kernels::PageRef;
using kernels::PageTier;

absl::Status KvStoreImpl::CheckIntegrity() const {
  KVASIR_RETURN_IF_ERROR(device_.CheckIntegrity());
  KVASIR_RETURN_IF_ERROR(CheckBlocks());
  return CheckSlots();
}

absl::Status KvStoreImpl::CheckBlocks() const {
  int64_t in_device = 0;
  int64_t pinned = 0;
  int64_t unused = 0;
  int64_t reading = 0;
  int64_t writing = 0;
  for (const auto& [id, block] : blocks_) {
    KVASIR_RETURN_IF_ERROR(CheckBlock(id, block, in_device));
    pinned += !block.sealed && !IsRead(block.transfer) ? pages_per_block_ : 0;
    unused += block.unused ? 1 : 0;
    reading += block.transfer == Transfer::kReading ? 1 : 0;
    writing += block.transfer == Transfer::kWriting ? 1 : 0;
  }
  const int64_t device_used = device_.num_slots() - device_.num_free();
  const int64_t host_used = host_.num_extents() - host_.num_free();
  if (in_device != device_used || pinned != device_.num_pinned() ||
      host_used != static_cast<int64_t>(blocks_.size())) {
    return absl::InternalError(absl::StrCat(
        "kv store: ", blocks_.size(), " blocks, ", host_used, " host extents used; ", in_device,
        " pages map to the device, ", device_used, " slots used; open blocks have ", pinned,
        " pages, ", device_.num_pinned(), " slots pinned"));
  }
  if (unused != num_unused_ || reading != static_cast<int64_t>(reads_.size()) ||
      writing != static_cast<int64_t>(writes_.size()) || reading + writing > spare_extents_ ||
      static_cast<int64_t>(blocks_.size()) - unused > host_blocks()) {
    return absl::InternalError(absl::StrCat(
        "kv store: ", unused, " unused blocks, counted ", num_unused_, "; ", reading, " reads of ",
        reads_.size(), " and ", writing, " writes of ", writes_.size(), " under way, at most ",
        spare_extents_, "; ", blocks_.size(), " blocks, room for ", host_blocks()));
  }
  return absl::OkStatus();
}

absl::Status KvStoreImpl::CheckBlock(BlockId id, const BlockState& block,
                                     int64_t& in_device) const {
  const auto broken = [&](absl::string_view what) {
    return absl::InternalError(absl::StrCat("kv store: block ", id.value, " ", what));
  };
  if (row_blocks_[static_cast<size_t>(block.row)] != id || !host_.taken(block.row)) {
    return broken("has a row that is not its own");
  }
  if (!block.kept && block.handles == 0 && !block.unused && !in_step_) {
    return broken("is unused and not freed");
  }
  if (block.unused && (block.kept || block.handles > 0 || block.transfer == Transfer::kNone)) {
    return broken("is taken for unused");
  }
  for (int64_t page = first_page(block.row); page < first_page(block.row + 1); ++page) {
    const PageRef page_ref = ref(page);
    if (IsRead(block.transfer)) {
      if (page_ref.tier() != PageTier::kAbsent) return broken("can be read before it is there");
    } else if (page_ref.tier() == PageTier::kDevice) {
      ++in_device;
      if (device_.page(device_.slot_of(page_ref.page())) != page) {
        return broken("has a page in a device slot of another");
      }
    } else if (!block.sealed || page_ref.page() != host_page(page)) {
      return broken("has a page that is nowhere");
    }
  }
  return absl::OkStatus();
}

absl::Status KvStoreImpl::CheckSlots() const {
  std::vector<int64_t> bindings(row_bindings_.size());
  for (int64_t slot = 0; slot < num_slots_; ++slot) {
    const std::vector<Block>& bound = slots_[static_cast<size_t>(slot)];
    for (int64_t index = 0; index < max_blocks_per_slot_; ++index) {
      const int64_t row = block_rows_[static_cast<size_t>(slot * max_blocks_per_slot_ + index)];
      const bool is_bound =
          index < static_cast<int64_t>(bound.size()) && bound[static_cast<size_t>(index)];
      const int64_t expected =
          is_bound ? blocks_.at(bound[static_cast<size_t>(index)].id()).row : -1;
      if (row != expected) {
        return absl::InternalError(absl::StrCat("kv store: slot ", slot, " block ", index,
                                                " is row ", row, ", bound to row ", expected));
      }
      if (row >= 0) ++bindings[static_cast<size_t>(row)];
    }
  }
  if (bindings != row_bindings_) return absl::InternalError("kv store: bindings are miscounted");
  return absl::OkStatus();
}

}  // namespace kvasir::kvstore
