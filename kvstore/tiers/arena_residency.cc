#include "kvstore/tiers/arena_residency.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/append/key_codes.h"
#include "kernels/base/status_macros.h"

namespace kvasir::kvstore {

using kernels::PagedKv;
using kernels::PageRef;
using kernels::PageTier;

namespace {

// Limit of the bytes promoted in one step: a page of 32 KiB with its checksum takes some 6 us on a
// core, so a step waits at most some 3 ms for promotions.
constexpr int64_t kPromotedBytesPerStep = int64_t{16} << 20;
// Decay of a page's missed bytes after each step: 7/8 remain, so misses of some ten steps add up.
constexpr uint32_t kDecayShift = 3;

}  // namespace

absl::StatusOr<std::unique_ptr<PageResidency>> ArenaResidency::Make(
    const ResidencyOptions& options) {
  const kernels::KvLayout& layout = options.format.shard().layout;
  KVASIR_ASSIGN_OR_RETURN(
      kernels::HostBuffer pages,
      kernels::HostBuffer::Allocate(options.device_pages * layout.page_bytes()));
  const int64_t codes_bytes =
      options.key_codes
          ? (options.num_extents + std::ssize(options.lean_bounds)) * layout.block_key_codes_bytes()
          : 0;
  KVASIR_ASSIGN_OR_RETURN(kernels::HostBuffer codes, kernels::HostBuffer::Allocate(codes_bytes));
  DeviceArena device(std::move(pages), options.device_pages, layout.page_bytes(),
                     options.freed_memory);
  HostSlab host(options.format, options.num_extents, options.freed_memory,
                options.memory.extents());
  return std::unique_ptr<PageResidency>(
      new ArenaResidency(options, std::move(device), std::move(host), std::move(codes)));
}

ArenaResidency::ArenaResidency(const ResidencyOptions& options, DeviceArena device, HostSlab host,
                               kernels::HostBuffer codes)
    : format_(options.format),
      layout_(format_.shard().layout),
      pages_per_block_(layout_.pages_per_block()),
      num_slots_(options.num_slots),
      max_blocks_per_slot_(options.max_blocks_per_slot),
      device_(std::move(device)),
      host_(std::move(host)),
      codes_(std::move(codes)),
      extent_states_(static_cast<size_t>(options.num_extents) + options.lean_bounds.size()) {
  const size_t num_pages = extent_states_.size() * static_cast<size_t>(pages_per_block_);
  pages_.resize(num_pages);
  last_touched_.resize(num_pages, kNeverTouched);
  missed_bytes_.resize(num_pages);
  for (int64_t extent = 0; extent < options.num_extents; ++extent) {
    bounds_.push_back(host_.bounds(extent));
  }
  bounds_.insert(bounds_.end(), options.lean_bounds.begin(), options.lean_bounds.end());
  for (int64_t extent = 0; options.key_codes && extent < std::ssize(extent_states_); ++extent) {
    key_codes_.push_back(codes_.data() + extent * layout_.block_key_codes_bytes());
  }
  block_extents_.resize(static_cast<size_t>(num_slots_ * max_blocks_per_slot_), -1);
}

// ---- extents

absl::Status ArenaResidency::Open(int64_t extent) {
  KVASIR_CHECK(at(extent).state == ExtentState::kNone);
  ForgetAccesses(extent);
  for (int64_t page = first_page(extent); page < first_page(extent + 1); ++page) {
    const std::optional<int64_t> slot = TakeDeviceSlot(page, std::nullopt);
    KVASIR_CHECK(slot.has_value());
    ref(page) = PageRef(device_.page_memory(*slot), PageTier::kDevice);
  }
  at(extent).state = ExtentState::kOpen;
  return absl::OkStatus();
}

void ArenaResidency::ForgetAccesses(int64_t extent) {
  const auto begin = static_cast<std::ptrdiff_t>(first_page(extent));
  std::fill_n(last_touched_.begin() + begin, pages_per_block_, kNeverTouched);
  std::fill_n(missed_bytes_.begin() + begin, pages_per_block_, 0);
}

absl::Status ArenaResidency::Seal(int64_t extent, const PrefixHash& hash) {
  KVASIR_CHECK(at(extent).state == ExtentState::kOpen);
  for (int64_t i = 0; i < pages_per_block_; ++i) {
    const int64_t page = first_page(extent) + i;
    std::memcpy(host_page(page), ref(page).page(), static_cast<size_t>(layout_.page_bytes()));
    host_.checksums(extent)[static_cast<size_t>(i)] =
        PageChecksum(format_.identity(hash, i), Bytes(host_page(page)));
    device_.Unpin(device_.slot_of(ref(page).page()));
  }
  at(extent).state = ExtentState::kSealed;
  at(extent).hash = hash;
  stats_.bytes_device_to_host += layout_.block_bytes();
  return absl::OkStatus();
}

void ArenaResidency::Restore(int64_t extent, const PrefixHash& hash) {
  KVASIR_CHECK(at(extent).state == ExtentState::kNone);
  ForgetAccesses(extent);
  for (int64_t page = first_page(extent); page < first_page(extent + 1); ++page) {
    ref(page) = PageRef(host_page(page), PageTier::kHost);
    if (key_codes_.empty()) continue;
    std::byte* const codes = key_codes_[static_cast<size_t>(extent)] +
                             (page - first_page(extent)) * layout_.page_key_codes_bytes();
    kernels::EncodePage(layout_, host_page(page), kBlockTokens, codes);
  }
  at(extent).state = ExtentState::kSealed;
  at(extent).hash = hash;
}

void ArenaResidency::MakeLean(int64_t lean, const PrefixHash& hash, std::optional<int64_t> from) {
  KVASIR_CHECK(at(lean).state == ExtentState::kNone && lean >= host_.num_extents());
  ForgetAccesses(lean);
  if (from.has_value() && !key_codes_.empty()) {
    std::memcpy(key_codes_[static_cast<size_t>(lean)], key_codes_[static_cast<size_t>(*from)],
                static_cast<size_t>(layout_.block_key_codes_bytes()));
  }
  at(lean).state = ExtentState::kLean;
  at(lean).hash = hash;
}

uint32_t ArenaResidency::LastRead(int64_t extent) const {
  uint32_t last = 0;
  for (int64_t page = first_page(extent); page < first_page(extent + 1); ++page) {
    const uint32_t touched = last_touched_[static_cast<size_t>(page)];
    if (touched != kNeverTouched) last = std::max(last, touched);
  }
  return last;
}

void ArenaResidency::Free(int64_t extent) {
  KVASIR_CHECK(at(extent).bindings == 0);
  for (int64_t page = first_page(extent); page < first_page(extent + 1); ++page) {
    if (ref(page).tier() == PageTier::kDevice) device_.Free(device_.slot_of(ref(page).page()));
    ref(page) = PageRef();
  }
  at(extent) = Extent();
}

void ArenaResidency::Bind(int64_t slot, int64_t index, int64_t extent) {
  int32_t& entry = block_extents_[static_cast<size_t>(slot * max_blocks_per_slot_ + index)];
  if (entry >= 0) --at(entry).bindings;
  if (extent >= 0) ++at(extent).bindings;
  entry = static_cast<int32_t>(extent);
}

int64_t ArenaResidency::PagesInDevice(int64_t extent) const {
  return std::count_if(pages_.begin() + static_cast<std::ptrdiff_t>(first_page(extent)),
                       pages_.begin() + static_cast<std::ptrdiff_t>(first_page(extent + 1)),
                       [](const PageRef& page) { return page.tier() == PageTier::kDevice; });
}

// ---- steps

absl::StatusOr<PagedKv> ArenaResidency::BeginStep(uint32_t step, bool /*binds_lean*/) {
  step_ = step;
  return PagedKv{.layout = layout_,
                 .block_extents = block_extents_.data(),
                 .num_slots = num_slots_,
                 .max_blocks_per_slot = max_blocks_per_slot_,
                 .num_extents = std::ssize(extent_states_),
                 .pages = pages_.data(),
                 .bounds = bounds_.data(),
                 .key_codes = key_codes_.empty() ? nullptr : key_codes_.data(),
                 .accesses = {.step = &step_,
                              .last_touched = last_touched_.data(),
                              .missed_bytes = missed_bytes_.data()}};
}

absl::StatusOr<std::vector<CorruptExtent>> ArenaResidency::EndStep() {
  std::vector<CorruptExtent> corrupt;
  Promote(CollectAccesses(), corrupt);
  return corrupt;
}

// Counts hits and misses of the step. Returns the pages that missed as much as their size.
std::vector<ArenaResidency::Candidate> ArenaResidency::CollectAccesses() {
  std::vector<Candidate> candidates;
  const uint32_t page_bytes = static_cast<uint32_t>(layout_.page_bytes());
  for (int64_t extent = 0; extent < std::ssize(extent_states_); ++extent) {
    if (at(extent).bindings == 0) continue;  // kernels cannot reach it
    for (int64_t page = first_page(extent); page < first_page(extent + 1); ++page) {
      uint32_t& missed = missed_bytes_[static_cast<size_t>(page)];
      const bool in_device = ref(page).tier() == PageTier::kDevice;
      if (last_touched_[static_cast<size_t>(page)] == step_) {
        ++(in_device ? stats_.device_hits : stats_.device_misses);
      }
      if (missed >= page_bytes) candidates.push_back({.missed_bytes = missed, .page = page});
      missed -= missed >> kDecayShift;
    }
  }
  return candidates;
}

void ArenaResidency::Promote(std::vector<Candidate> candidates,
                             std::vector<CorruptExtent>& corrupt) {
  const size_t limit =
      static_cast<size_t>(std::max<int64_t>(1, kPromotedBytesPerStep / layout_.page_bytes()));
  if (candidates.size() > limit) {
    std::nth_element(
        candidates.begin(), candidates.begin() + static_cast<int64_t>(limit), candidates.end(),
        [](const Candidate& a, const Candidate& b) { return a.missed_bytes > b.missed_bytes; });
    candidates.resize(limit);
  }
  for (const Candidate& candidate : candidates) {
    const int64_t page = candidate.page;
    if (!VerifyInHost(page, corrupt)) continue;
    const std::optional<int64_t> slot = TakeDeviceSlot(page, step_);
    // Every page was needed in this step: nothing can be improved.
    if (!slot.has_value()) return;
    device_.Unpin(*slot);
    std::byte* const to = device_.page_memory(*slot);
    std::memcpy(to, host_page(page), static_cast<size_t>(layout_.page_bytes()));
    ref(page) = PageRef(to, PageTier::kDevice);
    missed_bytes_[static_cast<size_t>(page)] = 0;
    ++stats_.promotions;
    stats_.bytes_host_to_device += layout_.page_bytes();
  }
}

bool ArenaResidency::VerifyInHost(int64_t page, std::vector<CorruptExtent>& corrupt) {
  const int64_t extent = page / pages_per_block_;
  const int64_t page_in_block = page % pages_per_block_;
  const PageIdentity identity = format_.identity(at(extent).hash, page_in_block);
  const uint64_t expected = host_.checksums(extent)[static_cast<size_t>(page_in_block)];
  const uint64_t found = PageChecksum(identity, Bytes(host_page(page)));
  if (found == expected) return true;
  ++stats_.checksum_failures;
  if (std::exchange(at(extent).corrupt, true)) return false;
  corrupt.push_back(
      {.extent = extent,
       .status = absl::DataLossError(absl::StrCat(
           "layer ", identity.layer, ", KV head ", identity.head,
           ": checksum of the page in the host tier is ", absl::Hex(found), ", sealed as ",
           absl::Hex(expected), "; the memory of this machine may be failing"))});
  return false;
}

std::optional<int64_t> ArenaResidency::TakeDeviceSlot(int64_t page,
                                                      std::optional<uint32_t> spared) {
  if (device_.num_free() == 0) {
    const std::optional<int64_t> victim = device_.FindVictim(last_touched_.data(), spared);
    if (!victim.has_value()) return std::nullopt;
    const int64_t evicted = device_.page(*victim);
    ref(evicted) = PageRef(host_page(evicted), PageTier::kHost);
    device_.Free(*victim);
    ++stats_.evictions;
  }
  return device_.Take(page);
}

// ---- accounting

ResidencyStats ArenaResidency::stats() const {
  ResidencyStats stats = stats_;
  stats.device_pages_used = device_.num_slots() - device_.num_free();
  return stats;
}

absl::Status ArenaResidency::CheckIntegrity() const {
  KVASIR_RETURN_IF_ERROR(device_.CheckIntegrity());
  int64_t in_device = 0;
  int64_t open = 0;
  for (int64_t extent = 0; extent < std::ssize(extent_states_); ++extent) {
    KVASIR_RETURN_IF_ERROR(CheckExtent(extent, in_device));
    open += at(extent).state == ExtentState::kOpen ? pages_per_block_ : 0;
  }
  const int64_t used = device_.num_slots() - device_.num_free();
  if (in_device != used || open != device_.num_pinned()) {
    return absl::InternalError(absl::StrCat("residency: ", in_device, " pages map to the device, ",
                                            used, " slots used; open extents have ", open,
                                            " pages, ", device_.num_pinned(), " slots pinned"));
  }
  return CheckBindings();
}

absl::Status ArenaResidency::CheckExtent(int64_t extent, int64_t& in_device) const {
  const auto broken = [&](absl::string_view what) {
    return absl::InternalError(absl::StrCat("residency: extent ", extent, " ", what));
  };
  const ExtentState state = at(extent).state;
  for (int64_t page = first_page(extent); page < first_page(extent + 1); ++page) {
    const PageRef page_ref = ref(page);
    if (state == ExtentState::kNone || state == ExtentState::kLean) {
      if (page_ref.tier() != PageTier::kAbsent)
        return broken("has a page in memory and no room for it");
    } else if (page_ref.tier() == PageTier::kDevice) {
      ++in_device;
      if (device_.page(device_.slot_of(page_ref.page())) != page) {
        return broken("has a page in a device slot of another");
      }
    } else if (state == ExtentState::kOpen || page_ref.page() != host_page(page)) {
      return broken("has a page that is nowhere");
    }
  }
  return absl::OkStatus();
}

absl::Status ArenaResidency::CheckBindings() const {
  std::vector<int64_t> bindings(extent_states_.size());
  for (const int32_t extent : block_extents_) {
    if (extent >= 0) ++bindings[static_cast<size_t>(extent)];
  }
  for (size_t extent = 0; extent < extent_states_.size(); ++extent) {
    if (bindings[extent] == extent_states_[extent].bindings) continue;
    return absl::InternalError(absl::StrCat("residency: extent ", extent, " is bound ",
                                            bindings[extent], " times, counted ",
                                            extent_states_[extent].bindings));
  }
  return absl::OkStatus();
}

}  // namespace kvasir::kvstore
