// CudaResidency's accounts: what it tells of its tables, and the check of the device's state
// against the host's books.
#include <algorithm>
#include <set>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "worker/backend/cuda/cuda_residency.h"

namespace kvasir::worker {

using kernels::DeviceBuffer;
using kernels::ExtentUse;
using kernels::PageRef;
using kernels::PageTier;
using kernels::ResidencyCounters;
using kernels::ResidencyShape;
using kernels::ResidencyState;
using kernels::SlotState;

int64_t CudaResidency::PagesInDevice(int64_t extent) const {
  const ExtentState state = extent_states_[static_cast<size_t>(extent)];
  if (state == ExtentState::kNone) return 0;
  if (state == ExtentState::kOpening || state == ExtentState::kOpen) {
    return state_.shape.pages_per_extent;
  }
  return UseOf(extent).device_pages;
}

ExtentUse CudaResidency::UseOf(int64_t extent) const {
  if (uses_.empty()) {
    absl::StatusOr<std::vector<ExtentUse>> uses = FetchUses();
    if (!uses.ok()) return {};
    uses_ = *std::move(uses);
  }
  return uses_[static_cast<size_t>(extent)];
}

absl::StatusOr<std::vector<ExtentUse>> CudaResidency::FetchUses() const {
  std::vector<ExtentUse> uses(extent_states_.size());
  const int64_t bytes = static_cast<int64_t>(uses.size() * sizeof(ExtentUse));
  KVASIR_ASSIGN_OR_RETURN(const DeviceBuffer buffer, DeviceBuffer::Allocate(bytes));
  KVASIR_RETURN_IF_ERROR(
      SurveyExtents(state_, {buffer.As<ExtentUse>(), uses.size()}, stream_.get()));
  KVASIR_RETURN_IF_ERROR(stream_.CopyToHost(uses.data(), buffer.data(), bytes));
  KVASIR_RETURN_IF_ERROR(stream_.Wait());
  // The device still has what these extents were before.
  for (const int32_t extent : commands_.restored) uses[static_cast<size_t>(extent)] = {};
  return uses;
}

kvstore::ResidencyStats CudaResidency::stats() const {
  const int64_t page_bytes = layout_.page_bytes();
  return {.device_pages_used = state_.shape.num_slots - seen_.free_slots,
          .promotions = seen_.promotions,
          .evictions = seen_.evictions,
          .bytes_host_to_device = (seen_.promotions + seen_.given_up) * page_bytes,
          .bytes_device_to_host = sealed_blocks_ * layout_.block_bytes(),
          .device_hits = seen_.hits,
          .device_misses = seen_.misses};
}

absl::Status CudaResidency::CheckIntegrity() const {
  if (!commands_.empty()) return absl::OkStatus();  // the device lags the host's books
  std::vector<std::byte> image(static_cast<size_t>(state_.bytes));
  KVASIR_RETURN_IF_ERROR(stream_.CopyToHost(image.data(), state_memory_.data(), state_.bytes));
  KVASIR_RETURN_IF_ERROR(stream_.Wait());
  const ResidencyState found = LayOutResidency(state_.shape, image.data());
  KVASIR_RETURN_IF_ERROR(CheckExtents(found));
  return CheckSlots(found);
}

absl::Status CudaResidency::CheckExtents(const ResidencyState& found) const {
  const ResidencyShape& shape = state_.shape;
  const std::set<int64_t> being_copied(being_copied_.begin(), being_copied_.end());
  const auto is_held = [&](int64_t page) {
    return being_copied.contains(page / shape.pages_per_extent);
  };
  for (int64_t page = 0; page < shape.num_pages(); ++page) {
    const ExtentState state = extent_states_[static_cast<size_t>(page / shape.pages_per_extent)];
    const PageRef ref = found.pages[page];
    const int64_t slot = ref.tier() == PageTier::kDevice ? shape.slot_of(ref.page()) : -1;
    const bool is_well =
        state == ExtentState::kNone ? ref.tier() == PageTier::kAbsent
        : slot >= 0                 ? found.slot_pages[slot] == page &&
                          found.slot_states[slot] == (state == ExtentState::kOpen || is_held(page)
                                                          ? SlotState::kPinned
                                                          : SlotState::kCached)
        : state == ExtentState::kLean
            ? ref.tier() == PageTier::kAbsent
            : state == ExtentState::kSealed && ref.page() == shape.host_page(page);
    if (is_well) continue;
    return absl::InternalError(absl::StrCat("residency: page ", page % shape.pages_per_extent,
                                            " of extent ", page / shape.pages_per_extent,
                                            " in state ", static_cast<int>(state), " is in tier ",
                                            static_cast<int>(ref.tier()), ", slot ", slot));
  }
  return absl::OkStatus();
}

absl::Status CudaResidency::CheckSlots(const ResidencyState& found) const {
  const ResidencyShape& shape = state_.shape;
  const auto count = [&](SlotState state) {
    return std::count(found.slot_states, found.slot_states + shape.num_slots, state);
  };
  const int64_t in_slots =
      std::count_if(found.pages, found.pages + shape.num_pages(),
                    [](const PageRef& page) { return page.tier() == PageTier::kDevice; });
  const ResidencyCounters& counters = *found.counters;
  if (count(SlotState::kFree) == counters.free_slots &&
      count(SlotState::kPinned) + count(SlotState::kCached) == in_slots &&
      count(SlotState::kFilling) == counters.num_fills &&
      count(SlotState::kPinned) == held_pages() && counters.without_room == 0) {
    return absl::OkStatus();
  }
  return absl::InternalError(absl::StrCat(
      "residency: of ", shape.num_slots, " slots ", count(SlotState::kFree), " are free, counted ",
      counters.free_slots, "; ", count(SlotState::kFilling), " being filled, counted ",
      counters.num_fills, "; ", count(SlotState::kPinned), " pinned, open extents have ",
      pinned_pages(), "; ", count(SlotState::kCached), " cached, ", in_slots, " pages in slots; ",
      counters.without_room, " pages found no slot"));
}

}  // namespace kvasir::worker
