#include "kvstore/kv_store.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kvstore/kv_store_impl.h"

namespace kvasir::kvstore {
namespace {

using kernels::KvLayout;
using kernels::PagedKv;
using kernels::PageRef;
using kernels::PageTier;

static_assert(kBlockTokens == kernels::kPageTokens);

// Promotions of one step end here: with its checksum a page of 32 KiB takes some 6 us on a core, so
// that a step waits at most some 3 ms for them.
constexpr int64_t kPromotedBytesPerStep = int64_t{16} << 20;
// What is left of a page's missed bytes after each step: 7/8, so misses of some ten steps add up.
constexpr uint32_t kDecayShift = 3;
// Blocks on their way to or from the tier below: enough to keep a disk busy.
constexpr int64_t kMaxTransfers = 64;

absl::Status CheckOptions(const KvStoreOptions& o) {
  const KvLayout& layout = o.shard.layout;
  const bool impossible = layout.num_layers <= 0 || layout.num_kv_heads <= 0 ||
                          layout.head_dim <= 0 || o.num_slots <= 0 || o.max_blocks_per_slot <= 0 ||
                          layout.page_bytes() > (int64_t{1} << 28);
  if (impossible) {
    return absl::InvalidArgumentError(absl::StrCat(
        "kv store: ", layout.num_layers, " layers, ", layout.num_kv_heads,
        " KV heads of dimension ", layout.head_dim, ", ", o.num_slots, " slots of ",
        o.max_blocks_per_slot, " blocks: all must be positive, pages at most 256 MiB"));
  }
  const int64_t device_least = 2 * layout.block_bytes();
  if (o.device_bytes < device_least) {
    return absl::ResourceExhaustedError(
        absl::StrCat("kv store: the device tier needs at least two blocks, ", device_least,
                     " bytes; it was given ", o.device_bytes, "; raise kv_device_size_gb"));
  }
  return absl::OkStatus();
}

}  // namespace

KvStoreImpl::KvStoreImpl(const KvStoreOptions& options, Parts parts)
    : format_(parts.format),
      layout_(options.shard.layout),
      pages_per_block_(options.shard.layout.pages_per_block()),
      num_slots_(options.num_slots),
      max_blocks_per_slot_(options.max_blocks_per_slot),
      spare_extents_(parts.spare_extents),
      device_(std::move(parts.device)),
      host_(std::move(parts.host)),
      below_(std::move(parts.below)),
      slots_(static_cast<size_t>(options.num_slots)) {
  const size_t num_rows = static_cast<size_t>(host_.num_extents());
  const size_t num_pages = num_rows * static_cast<size_t>(pages_per_block_);
  row_blocks_.resize(num_rows);
  row_bindings_.resize(num_rows);
  pages_.resize(num_pages);
  last_touched_.resize(num_pages, kNeverTouched);
  missed_bytes_.resize(num_pages);
  for (int64_t row = 0; row < host_.num_extents(); ++row) {
    std::byte* const beside_the_tier = device_.memory().bounds(row);
    bounds_.push_back(beside_the_tier != nullptr ? beside_the_tier : host_.bounds(row));
    if (!options.key_codes) continue;
    key_codes_.push_back(device_.memory().key_codes(row));
  }
  block_rows_.resize(static_cast<size_t>(num_slots_ * max_blocks_per_slot_), -1);
  if (below_ != nullptr) next_generation_ = below_->first_generation();
}

// ---- blocks

absl::StatusOr<Block> KvStoreImpl::Open(BlockId id) {
  KVASIR_CHECK(!in_step_);
  if (blocks_.contains(id)) {
    return absl::AlreadyExistsError(absl::StrCat("block ", id.value, " is open or kept already"));
  }
  const int64_t takeable = device_.num_slots() - device_.num_pinned();
  if (takeable < pages_per_block_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("block ", id.value, ": need ", pages_per_block_, " pages in the device tier, ",
                     takeable, " of ", device_.num_slots(),
                     " are not of open blocks; seal blocks or raise kv_device_size_gb"));
  }
  KVASIR_ASSIGN_OR_RETURN(const int64_t row, TakeHostExtent(id));
  for (int64_t page = first_page(row); page < first_page(row + 1); ++page) {
    const std::optional<int64_t> slot = TakeDeviceSlot(page, std::nullopt);
    KVASIR_CHECK(slot.has_value());
    ref(page) = PageRef(device_.page_memory(*slot), PageTier::kDevice);
  }
  blocks_.at(id).handles = 1;
  return Block(id, *this);
}

absl::StatusOr<int64_t> KvStoreImpl::TakeHostExtent(BlockId id) {
  const int64_t used = static_cast<int64_t>(blocks_.size()) - num_unused_;
  if (used >= host_blocks()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("block ", id.value, ": need 1 block in the host tier, 0 of ", host_blocks(),
                     " free; drop blocks or raise kv_host_size_gb"));
  }
  if (host_.num_free() == 0) CancelOneUnusedWrite();
  const int64_t row = host_.Take();
  for (int64_t page = first_page(row); page < first_page(row + 1); ++page) {
    last_touched_[static_cast<size_t>(page)] = kNeverTouched;
    missed_bytes_[static_cast<size_t>(page)] = 0;
  }
  row_blocks_[static_cast<size_t>(row)] = id;
  blocks_[id].row = row;
  return row;
}

absl::StatusOr<Block> KvStoreImpl::Get(BlockId id) {
  if (!Holds(id)) return absl::NotFoundError(absl::StrCat("block ", id.value, " is not held"));
  ++blocks_.at(id).handles;
  return Block(id, *this);
}

absl::Status KvStoreImpl::Seal(BlockId id, const PrefixHash& hash) {
  KVASIR_CHECK(!in_step_);
  const auto it = blocks_.find(id);
  if (it == blocks_.end()) {
    return absl::NotFoundError(absl::StrCat("block ", id.value, " to be sealed is not open"));
  }
  BlockState& block = it->second;
  if (block.sealed) {
    return absl::FailedPreconditionError(absl::StrCat("block ", id.value, " is sealed already"));
  }
  std::vector<TierMemory::Copy> copies;
  for (int64_t page = first_page(block.row); page < first_page(block.row + 1); ++page) {
    copies.push_back({.to = host_page(page), .from = ref(page).page()});
  }
  KVASIR_RETURN_IF_ERROR(device_.memory().CopyToHost(copies, layout_.page_bytes()));
  block.hash = hash;
  block.generation = next_generation_++;
  block.sealed = true;
  block.kept = true;
  for (int64_t i = 0; i < pages_per_block_; ++i) {
    const int64_t page = first_page(block.row) + i;
    host_.checksums(block.row)[static_cast<size_t>(i)] =
        PageChecksum(Identity(block, i), Bytes(host_page(page)));
    device_.Unpin(device_.slot_of(ref(page).page()));
  }
  stats_.bytes_device_to_host += layout_.block_bytes();
  return absl::OkStatus();
}

void KvStoreImpl::Drop(BlockId id) {
  KVASIR_CHECK(!in_step_);
  const auto it = blocks_.find(id);
  if (it == blocks_.end()) return;
  it->second.kept = false;
  FreeIfUnused(id);
}

bool KvStoreImpl::Holds(BlockId id) const {
  const auto it = blocks_.find(id);
  if (it == blocks_.end()) return false;
  const BlockState& block = it->second;
  return !block.corrupt && !block.unused && block.transfer != Transfer::kReadQueued &&
         block.transfer != Transfer::kReading;
}

BlockResidency KvStoreImpl::Where(BlockId id) const {
  BlockResidency where;
  const auto it = blocks_.find(id);
  if (it == blocks_.end()) return where;
  for (int64_t i = 0; i < pages_per_block_; ++i) {
    const PageRef page = ref(first_page(it->second.row) + i);
    where.device_pages += page.tier() == PageTier::kDevice ? 1 : 0;
  }
  where.stored = below_ != nullptr && it->second.sealed && below_->Holds(it->second.hash);
  where.restored = it->second.restored;
  return where;
}

void KvStoreImpl::Release(BlockId id) {
  --blocks_.at(id).handles;
  if (in_step_) {
    released_in_step_.push_back(id);  // the step's kernels may still read it
  } else {
    FreeIfUnused(id);
  }
}

void KvStoreImpl::FreeIfUnused(BlockId id) {
  const auto it = blocks_.find(id);
  if (it == blocks_.end() || it->second.kept || it->second.handles > 0) return;
  BlockState& block = it->second;
  if (block.transfer != Transfer::kNone && block.transfer != Transfer::kReadQueued) {
    num_unused_ += block.unused ? 0 : 1;
    block.unused = true;
    return;  // until the transfer has ended
  }
  num_unused_ -= block.unused ? 1 : 0;
  const int64_t row = block.row;
  KVASIR_CHECK(row_bindings_[static_cast<size_t>(row)] == 0);
  for (int64_t page = first_page(row); page < first_page(row + 1); ++page) {
    if (ref(page).tier() == PageTier::kDevice) device_.Free(device_.slot_of(ref(page).page()));
    ref(page) = PageRef();
  }
  host_.Free(row);
  row_blocks_[static_cast<size_t>(row)] = BlockId();
  blocks_.erase(it);
}

// ---- slots

void KvStoreImpl::Bind(int64_t slot, int64_t index, Block block) {
  KVASIR_CHECK(!in_step_ && block);
  KVASIR_CHECK(slot >= 0 && slot < num_slots_ && index >= 0 && index < max_blocks_per_slot_);
  BlockState& state = blocks_.at(block.id());
  state.restored = false;
  const int64_t row = state.row;
  std::vector<Block>& bound = slots_[static_cast<size_t>(slot)];
  if (static_cast<int64_t>(bound.size()) <= index) bound.resize(static_cast<size_t>(index) + 1);
  int32_t& entry = block_rows_[static_cast<size_t>(slot * max_blocks_per_slot_ + index)];
  if (entry >= 0) --row_bindings_[static_cast<size_t>(entry)];
  ++row_bindings_[static_cast<size_t>(row)];
  entry = static_cast<int32_t>(row);
  bound[static_cast<size_t>(index)] = std::move(block);
}

void KvStoreImpl::Unbind(int64_t slot, int64_t first_index) {
  KVASIR_CHECK(!in_step_);
  KVASIR_CHECK(slot >= 0 && slot < num_slots_ && first_index >= 0);
  std::vector<Block>& bound = slots_[static_cast<size_t>(slot)];
  while (static_cast<int64_t>(bound.size()) > first_index) {
    const int64_t index = static_cast<int64_t>(bound.size()) - 1;
    int32_t& entry = block_rows_[static_cast<size_t>(slot * max_blocks_per_slot_ + index)];
    if (entry >= 0) --row_bindings_[static_cast<size_t>(entry)];
    entry = -1;
    bound.pop_back();
  }
}

// ---- steps

PagedKv KvStoreImpl::BeginStep(uint32_t step) {
  KVASIR_CHECK(!in_step_ && step > step_ && step < kNeverTouched);
  in_step_ = true;
  step_ = step;
  return {.layout = layout_,
          .block_rows = block_rows_.data(),
          .num_slots = num_slots_,
          .max_blocks_per_slot = max_blocks_per_slot_,
          .num_rows = host_.num_extents(),
          .pages = pages_.data(),
          .bounds = bounds_.data(),
          .key_codes = key_codes_.empty() ? nullptr : key_codes_.data(),
          .accesses = {.step = &step_,
                       .last_touched = last_touched_.data(),
                       .missed_bytes = missed_bytes_.data()}};
}

absl::Status KvStoreImpl::EndStep() {
  if (!in_step_) return absl::FailedPreconditionError("EndStep: no step has begun");
  in_step_ = false;
  KVASIR_RETURN_IF_ERROR(Promote(CollectAccesses()));
  for (BlockId id : std::exchange(released_in_step_, {})) FreeIfUnused(id);
  PollTier();
  return absl::OkStatus();
}

// Counts hits and misses of the step; returns the pages that missed more than their size.
std::vector<KvStoreImpl::Candidate> KvStoreImpl::CollectAccesses() {
  std::vector<Candidate> candidates;
  const uint32_t page_bytes = static_cast<uint32_t>(layout_.page_bytes());
  for (int64_t row = 0; row < host_.num_extents(); ++row) {
    if (row_bindings_[static_cast<size_t>(row)] == 0) continue;  // kernels cannot reach it
    for (int64_t page = first_page(row); page < first_page(row + 1); ++page) {
      uint32_t& missed = missed_bytes_[static_cast<size_t>(page)];
      const bool in_device = ref(page).tier() == PageTier::kDevice;
      if (last_touched_[static_cast<size_t>(page)] == step_) {
        ++(in_device ? stats_.device_hits : stats_.device_misses);
      }
      if (missed > page_bytes) candidates.push_back({.missed_bytes = missed, .page = page});
      missed -= missed >> kDecayShift;
    }
  }
  return candidates;
}

absl::Status KvStoreImpl::Promote(std::vector<Candidate> candidates) {
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
    if (!VerifyInHost(page)) continue;
    const std::optional<int64_t> slot = TakeDeviceSlot(page, step_);
    // Every page was needed in this step: nothing better to do.
    if (!slot.has_value()) return absl::OkStatus();
    device_.Unpin(*slot);
    const TierMemory::Copy copy = {.to = device_.page_memory(*slot), .from = host_page(page)};
    KVASIR_RETURN_IF_ERROR(
        device_.memory().CopyFromHost(std::span(&copy, 1), layout_.page_bytes()));
    ref(page) = PageRef(copy.to, PageTier::kDevice);
    missed_bytes_[static_cast<size_t>(page)] = 0;
    ++stats_.promotions;
    stats_.bytes_host_to_device += layout_.page_bytes();
  }
  return absl::OkStatus();
}

bool KvStoreImpl::VerifyInHost(int64_t page) {
  const int64_t row = page / pages_per_block_;
  const int64_t page_in_block = page % pages_per_block_;
  const BlockId id = row_blocks_[static_cast<size_t>(row)];
  const BlockState& block = blocks_.at(id);
  const PageIdentity identity = Identity(block, page_in_block);
  const uint64_t expected = host_.checksums(row)[static_cast<size_t>(page_in_block)];
  const uint64_t found = PageChecksum(identity, Bytes(host_page(page)));
  if (found == expected) return true;
  ++stats_.checksum_failures;
  Quarantine(id,
             absl::DataLossError(absl::StrCat(
                 "block ", id.value, ", layer ", identity.layer, ", KV head ", identity.head,
                 ": checksum of the page in the host tier is ", absl::Hex(found), ", sealed as ",
                 absl::Hex(expected), "; the memory of this machine may be failing")));
  return false;
}

void KvStoreImpl::Quarantine(BlockId id, absl::Status status) {
  BlockState& block = blocks_.at(id);
  if (block.corrupt) return;
  block.corrupt = true;
  block.kept = false;
  CorruptBlock report{.id = id, .slots = {}, .status = std::move(status)};
  for (int64_t slot = 0; slot < num_slots_; ++slot) {
    const std::vector<Block>& bound = slots_[static_cast<size_t>(slot)];
    const bool has_it =
        std::any_of(bound.begin(), bound.end(), [&](const Block& b) { return b && b.id() == id; });
    if (has_it) report.slots.push_back(slot);
  }
  corrupt_.push_back(std::move(report));
}

std::optional<int64_t> KvStoreImpl::TakeDeviceSlot(int64_t page, std::optional<uint32_t> spared) {
  if (device_.num_free() == 0) {
    const std::optional<int64_t> victim = device_.FindVictim(last_touched_.data(), spared);
    if (!victim.has_value()) return std::nullopt;
    Unmap(device_.page(*victim));
    device_.Free(*victim);
    ++stats_.evictions;
  }
  return device_.Take(page);
}

void KvStoreImpl::Unmap(int64_t page) { ref(page) = PageRef(host_page(page), PageTier::kHost); }

// ---- accounting

KvStoreStats KvStoreImpl::stats() const {
  KvStoreStats stats = stats_;
  stats.device_pages_total = device_.num_slots();
  stats.device_pages_used = device_.num_slots() - device_.num_free();
  stats.host_blocks_total = host_blocks();
  stats.host_blocks_used = static_cast<int64_t>(blocks_.size()) - num_unused_;
  stats.queued_writes = static_cast<int64_t>(queued_writes_.size() + writes_.size());
  if (below_ != nullptr) stats.tier = below_->stats();
  return stats;
}

absl::StatusOr<std::unique_ptr<KvStore>> KvStore::Create(const KvStoreOptions& options,
                                                         std::unique_ptr<Tier> below,
                                                         const TierMemoryMaker& device_memory) {
  KVASIR_RETURN_IF_ERROR(CheckOptions(options));
  KVASIR_ASSIGN_OR_RETURN(const ExtentFormat format, ExtentFormat::Create(options.shard));
  if (below != nullptr && below->format().Fingerprint() != format.Fingerprint()) {
    return absl::InvalidArgumentError(absl::StrCat("kv store: the tier below is for ",
                                                   below->format().Fingerprint(),
                                                   ", the store for ", format.Fingerprint()));
  }
  const KvLayout& layout = options.shard.layout;
  const int64_t key_codes_bytes = options.key_codes ? layout.block_key_codes_bytes() : 0;
  const int64_t block_bytes = format.extent_bytes() + key_codes_bytes;
  const int64_t num_extents =
      std::min<int64_t>(options.host_bytes / block_bytes, std::numeric_limits<int32_t>::max() - 1);
  const int64_t spare_extents =
      below == nullptr ? 0
                       : std::clamp<int64_t>(num_extents / kBlocksPerTransfer, 1, kMaxTransfers);
  if (num_extents < 2 + spare_extents) {
    return absl::ResourceExhaustedError(
        absl::StrCat("kv store: the host tier needs at least ", 2 + spare_extents, " blocks, ",
                     (2 + spare_extents) * block_bytes, " bytes; it was given ", options.host_bytes,
                     "; raise kv_host_size_gb"));
  }
  const int64_t num_pages = options.device_bytes / layout.page_bytes();
  KVASIR_ASSIGN_OR_RETURN(std::unique_ptr<TierMemory> memory,
                          device_memory({.num_pages = num_pages,
                                         .page_bytes = layout.page_bytes(),
                                         .num_blocks = num_extents,
                                         .block_bounds_bytes = layout.block_bounds_bytes(),
                                         .block_key_codes_bytes = key_codes_bytes}));
  DeviceArena device(std::move(memory), num_pages, layout.page_bytes(), options.freed_memory);
  KVASIR_ASSIGN_OR_RETURN(HostSlab host,
                          HostSlab::Create(format, num_extents, options.freed_memory));
  return std::make_unique<KvStoreImpl>(options, KvStoreImpl::Parts{.format = format,
                                                                   .device = std::move(device),
                                                                   .host = std::move(host),
                                                                   .below = std::move(below),
                                                                   .spare_extents = spare_extents});
}

}  // namespace kvasir::kvstore
