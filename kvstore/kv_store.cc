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

static_assert(kBlockTokens == kernels::kPageTokens);

// Blocks in transfer to or from the tier below: enough to keep a disk busy.
constexpr int64_t kMaxTransfers = 64;
// Limit of indices in the residency's tables.
constexpr int64_t kMostBlocks = std::numeric_limits<int32_t>::max() / 2;

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

struct HostParts {
  int64_t num_extents = 0;
  int64_t spare_extents = 0;     // of num_extents
  int64_t page_cache_bytes = 0;  // for single pages of lean blocks
  int64_t num_lean = 0;
};

absl::StatusOr<HostParts> DivideHost(const KvStoreOptions& o, const ExtentFormat& format,
                                     bool has_tier_below, bool has_lean) {
  const KvLayout& layout = o.shard.layout;
  const int64_t codes_bytes = o.key_codes ? layout.block_key_codes_bytes() : 0;
  const int64_t block_bytes = format.extent_bytes() + codes_bytes;
  HostParts parts;
  if (has_lean) {
    parts.page_cache_bytes = o.host_bytes / 2;
    parts.num_lean = std::clamp<int64_t>(o.on_demand_bytes / layout.block_bytes(), 1, kMostBlocks);
  }
  parts.num_extents =
      std::min<int64_t>((o.host_bytes - parts.page_cache_bytes) / block_bytes, kMostBlocks);
  if (has_tier_below) {
    parts.spare_extents =
        std::clamp<int64_t>(parts.num_extents / kBlocksPerTransfer, 1, kMaxTransfers);
  }
  const int64_t least = 2 + parts.spare_extents;
  if (parts.num_extents >= least) return parts;
  return absl::ResourceExhaustedError(
      absl::StrCat("kv store: the host tier needs at least ", least, " blocks, ",
                   least * block_bytes, " bytes; it was given ", o.host_bytes,
                   has_lean ? ", half of them for single pages" : "", "; raise kv_host_size_gb"));
}

}  // namespace

KvStoreImpl::KvStoreImpl(const KvStoreOptions& options, Parts parts)
    : format_(parts.format),
      layout_(options.shard.layout),
      pages_per_block_(options.shard.layout.pages_per_block()),
      num_slots_(options.num_slots),
      max_blocks_per_slot_(options.max_blocks_per_slot),
      spare_extents_(parts.spare_extents),
      keeps_key_codes_(options.key_codes),
      own_memory_(std::move(parts.own_memory)),
      memory_(parts.memory),
      pages_(std::move(parts.pages)),
      host_(pages_->host()),
      ahead_(memory_, host_.num_extents()),
      adopted_(format_, memory_, host_),
      below_(std::move(parts.below)),
      lent_(below_ == nullptr ? nullptr : below_->lent_blocks()),
      lean_(std::move(parts.lean)),
      slots_(static_cast<size_t>(options.num_slots)) {
  if (below_ != nullptr) next_generation_ = below_->first_generation();
  next_generation_ = std::max(next_generation_, adopted_.next_generation());
  extent_blocks_.resize(static_cast<size_t>(host_blocks() + spare_extents_));
}

// ---- blocks

absl::StatusOr<Block> KvStoreImpl::Open(BlockId id) {
  KVASIR_CHECK(!in_step_);
  if (blocks_.contains(id)) {
    return absl::AlreadyExistsError(absl::StrCat("block ", id.value, " is open or kept already"));
  }
  const int64_t takeable = pages_->openable_pages() - pages_->pinned_pages();
  if (takeable < pages_per_block_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("block ", id.value, ": need ", pages_per_block_, " pages in the device tier, ",
                     takeable, " of ", pages_->openable_pages(),
                     " are not of open blocks; seal blocks or raise kv_device_size_gb"));
  }
  KVASIR_ASSIGN_OR_RETURN(const int64_t extent, TakeHostExtent(id));
  absl::Status opened = AwaitMemory(extent);
  if (opened.ok()) opened = pages_->Open(extent);
  if (!opened.ok()) {
    FreeIfUnused(id);
    return opened;
  }
  blocks_.at(id).handles = 1;
  return Block(id, *this);
}

absl::StatusOr<int64_t> KvStoreImpl::TakeHostExtent(BlockId id) {
  if (lean_ != nullptr && num_whole() >= whole_room()) ShedBlocks();
  KVASIR_RETURN_IF_ERROR(CheckHostRoom(id));
  const int64_t extent = TakeExtent();
  extent_blocks_[static_cast<size_t>(extent)] = id;
  blocks_[id].extent = extent;
  return extent;
}

int64_t KvStoreImpl::TakeExtent() {
  if (host_.num_free() == 0) MakeRoom();
  const int64_t extent = host_.Take();
  ahead_.OnTaken(extent);
  return extent;
}

absl::Status KvStoreImpl::AwaitMemory(int64_t extent) {
  KVASIR_RETURN_IF_ERROR(pages_->AwaitExtent(extent));
  return memory_.Reserve(extent);
}

bool KvStoreImpl::IsMemoryThere(int64_t extent) const {
  return (memory_.MayTouch(extent) || ahead_.has_failed()) && pages_->IsExtentThere(extent);
}

void KvStoreImpl::FreeExtent(int64_t extent) {
  if (memory_.MayTouch(extent)) {
    host_.Free(extent);
  } else {
    host_.FreeUntouched(extent);
  }
}

absl::Status KvStoreImpl::CheckHostRoom(BlockId id) const {
  if (num_whole() < whole_room()) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "block ", id.value, ": need 1 block in the host tier, 0 of ", whole_room(), " free",
      lean_ == nullptr ? "; drop blocks or raise kv_host_size_gb"
                       : ", and none of them can go to disk; raise kv_host_size_gb, "
                         "kv_on_demand_size_gb or kv_disk_size_gb"));
}

absl::StatusOr<Block> KvStoreImpl::Get(BlockId id) {
  if (!Holds(id)) return absl::NotFoundError(absl::StrCat("block ", id.value, " is not held"));
  ++blocks_.at(id).handles;
  return Block(id, *this);
}

absl::Status KvStoreImpl::Seal(BlockId id, const PrefixHash& hash, absl::Span<const int32_t> tokens,
                               const PrefixHash& owner) {
  KVASIR_CHECK(!in_step_ && tokens.size() == static_cast<size_t>(kBlockTokens));
  const auto it = blocks_.find(id);
  if (it == blocks_.end()) {
    return absl::NotFoundError(absl::StrCat("block ", id.value, " to be sealed is not open"));
  }
  BlockState& block = it->second;
  if (block.sealed) {
    return absl::FailedPreconditionError(absl::StrCat("block ", id.value, " is sealed already"));
  }
  const uint64_t generation = next_generation_++;
  KVASIR_RETURN_IF_ERROR(pages_->Seal(block.extent, hash));
  block.hash = hash;
  block.owner = owner;
  block.generation = generation;
  block.sealed = true;
  block.kept = true;
  DueHeader due = {.id = id, .block = block.identity()};
  std::copy(tokens.begin(), tokens.end(), due.block.tokens.begin());
  DueHeader write = due;
  due_headers_.push_back(std::move(due));
  if (pages_->SealsAtOnce()) WriteDueHeaders();
  if (lean_ != nullptr) unwritten_.push_back(std::move(write));
  if (adopted_.Drop(hash)) ReportIfForgotten(hash);  // it was computed again
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
  return !block.corrupt && !block.unused && !IsRead(block.transfer);
}

BlockResidency KvStoreImpl::Where(BlockId id) const {
  BlockResidency where;
  const auto it = blocks_.find(id);
  if (it == blocks_.end()) return where;
  where.device_pages = pages_->PagesInDevice(it->second.extent);
  where.stored = below_ != nullptr && it->second.sealed && below_->Holds(it->second.hash);
  where.restored = it->second.restored;
  where.from_peer = it->second.from_peer;
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
    num_unused_ += block.unused || IsLean(block) ? 0 : 1;
    block.unused = true;
    return;  // until the transfer has ended
  }
  num_unused_ -= block.unused && !IsLean(block) ? 1 : 0;
  EndLending(block);
  const int64_t extent = block.extent;
  const bool is_lean = IsLean(block);
  const bool goes_back = block.adopted && !block.corrupt;
  pages_->Free(extent);
  extent_blocks_[static_cast<size_t>(extent)] = BlockId();
  blocks_.erase(it);
  if (is_lean) {
    lean_->Free(extent);
  } else if (!goes_back) {
    FreeExtent(extent);
  } else if (const std::optional<BlockIdentity> back = adopted_.TakeBack(extent)) {
    changed_[back->hash] = back->tokens;
  }
}

// ---- slots

void KvStoreImpl::Bind(int64_t slot, int64_t index, Block block) {
  KVASIR_CHECK(!in_step_ && block);
  KVASIR_CHECK(slot >= 0 && slot < num_slots_ && index >= 0 && index < max_blocks_per_slot_);
  BlockState& state = blocks_.at(block.id());
  state.restored = false;
  if (std::exchange(state.adopted, false)) adopted_.CountUse();
  std::vector<Block>& bound = slots_[static_cast<size_t>(slot)];
  if (static_cast<int64_t>(bound.size()) <= index) bound.resize(static_cast<size_t>(index) + 1);
  BindExtent(slot, index, state.extent);
  bound[static_cast<size_t>(index)] = std::move(block);
}

void KvStoreImpl::BindExtent(int64_t slot, int64_t index, int64_t extent) {
  lean_bindings_ += IsLean(extent) - IsLean(pages_->BoundExtent(slot, index));
  pages_->Bind(slot, index, extent);
}

void KvStoreImpl::Unbind(int64_t slot, int64_t first_index) {
  KVASIR_CHECK(!in_step_);
  KVASIR_CHECK(slot >= 0 && slot < num_slots_ && first_index >= 0);
  std::vector<Block>& bound = slots_[static_cast<size_t>(slot)];
  while (static_cast<int64_t>(bound.size()) > first_index) {
    BindExtent(slot, std::ssize(bound) - 1, -1);
    bound.pop_back();
  }
}

void KvStoreImpl::Promote(int64_t slot) {
  KVASIR_CHECK(!in_step_ && slot >= 0 && slot < num_slots_);
  for (const Block& block : slots_[static_cast<size_t>(slot)]) {
    if (block) pages_->Promote(blocks_.at(block.id()).extent);
  }
}

// ---- steps

bool KvStoreImpl::MayRunAhead(int64_t opened) const {
  if (lean_ == nullptr) return true;
  return lean_bindings_ == 0 && num_whole() + opened <= whole_room();
}

absl::StatusOr<PagedKv> KvStoreImpl::BeginStep(uint32_t step) {
  KVASIR_CHECK(!in_step_ && step > step_ && step < kNeverTouched);
  const bool binds_lean = lean_bindings_ > 0;
  KVASIR_ASSIGN_OR_RETURN(PagedKv kv, pages_->BeginStep(step, binds_lean));
  if (binds_lean) kv.on_disk = &lean_->cache();
  in_step_ = true;
  step_ = step;
  return kv;
}

absl::Status KvStoreImpl::EndStep() {
  if (!in_step_) return absl::FailedPreconditionError("EndStep: no step has begun");
  in_step_ = false;
  KVASIR_ASSIGN_OR_RETURN(std::vector<CorruptExtent> corrupt, pages_->EndStep());
  for (CorruptExtent& extent : corrupt) Quarantine(std::move(extent));
  if (lean_ != nullptr) {
    for (CorruptExtent& extent : lean_->cache().EndStep()) {
      const BlockId id = extent_blocks_[static_cast<size_t>(extent.extent)];
      below_->ForgetDamaged(blocks_.at(id).hash, extent.status.code());
      Quarantine(std::move(extent));
    }
  }
  for (BlockId id : std::exchange(released_in_step_, {})) FreeIfUnused(id);
  PollTier();
  return absl::OkStatus();
}

void KvStoreImpl::Quarantine(CorruptExtent corrupt) {
  const BlockId id = extent_blocks_[static_cast<size_t>(corrupt.extent)];
  BlockState& block = blocks_.at(id);
  EndLending(block);
  block.corrupt = true;
  block.kept = false;
  CorruptBlock report{.id = id,
                      .slots = {},
                      .status = absl::DataLossError(
                          absl::StrCat("block ", id.value, ", ", corrupt.status.message()))};
  for (int64_t slot = 0; slot < num_slots_; ++slot) {
    const std::vector<Block>& bound = slots_[static_cast<size_t>(slot)];
    const bool has_it =
        std::any_of(bound.begin(), bound.end(), [&](const Block& b) { return b && b.id() == id; });
    if (has_it) report.slots.push_back(slot);
  }
  corrupt_.push_back(std::move(report));
}

// ---- accounting

KvStoreStats KvStoreImpl::stats() const {
  KvStoreStats stats = stats_;
  static_cast<ResidencyStats&>(stats) = pages_->stats();
  stats.device_pages_total = pages_->device_pages();
  stats.host_blocks_total = whole_room();
  stats.host_blocks_used = num_whole();
  if (lean_ != nullptr) {
    stats.lean_blocks = lean_->num_used();
    stats.lean_blocks_total = lean_->range().count;
    stats.pages = lean_->cache().stats();
  }
  stats.adoption = adopted_.stats();
  stats.queued_writes = static_cast<int64_t>(queued_writes_.size() + writes_.size());
  if (below_ != nullptr) stats.tier = below_->stats();
  return stats;
}

absl::StatusOr<std::unique_ptr<KvStore>> KvStore::Create(const KvStoreOptions& options,
                                                         std::unique_ptr<Tier> below,
                                                         const ResidencyMaker& make_pages) {
  KVASIR_RETURN_IF_ERROR(CheckOptions(options));
  KVASIR_ASSIGN_OR_RETURN(const ExtentFormat format, ExtentFormat::Create(options.shard));
  if (below != nullptr && below->format().Fingerprint() != format.Fingerprint()) {
    return absl::InvalidArgumentError(absl::StrCat("kv store: the tier below is for ",
                                                   below->format().Fingerprint(),
                                                   ", the store for ", format.Fingerprint()));
  }
  const bool has_lean =
      options.on_demand_bytes > 0 && below != nullptr && below->NewReadQueue() != nullptr;
  KVASIR_ASSIGN_OR_RETURN(const HostParts parts,
                          DivideHost(options, format, below != nullptr, has_lean));
  std::unique_ptr<HostMemory> own_memory;
  if (options.memory == nullptr) {
    KVASIR_ASSIGN_OR_RETURN(own_memory, HostMemory::Open(""));
  }
  HostMemory& memory = options.memory != nullptr ? *options.memory : *own_memory;
  KVASIR_RETURN_IF_ERROR(memory.Fit(format, options.owner, parts.num_extents));
  std::unique_ptr<LeanBlocks> lean;
  if (has_lean) {
    KVASIR_ASSIGN_OR_RETURN(lean, LeanBlocks::Create({.format = format,
                                                      .first_extent = parts.num_extents,
                                                      .num_blocks = parts.num_lean,
                                                      .num_slots = options.num_slots,
                                                      .bytes = parts.page_cache_bytes,
                                                      .num_threads = options.num_threads},
                                                     *below));
  }
  const KvLayout& layout = options.shard.layout;
  KVASIR_ASSIGN_OR_RETURN(
      std::unique_ptr<PageResidency> pages,
      make_pages({.format = format,
                  .memory = memory,
                  .num_extents = parts.num_extents,
                  .device_pages = options.device_bytes / layout.page_bytes(),
                  .num_slots = options.num_slots,
                  .max_blocks_per_slot = options.max_blocks_per_slot,
                  .key_codes = options.key_codes,
                  .freed_memory = options.freed_memory,
                  .lean_bounds = lean == nullptr ? std::vector<std::byte*>() : lean->all_bounds(),
                  .page_cache_bytes = parts.page_cache_bytes}));
  return std::make_unique<KvStoreImpl>(options,
                                       KvStoreImpl::Parts{.format = format,
                                                          .own_memory = std::move(own_memory),
                                                          .memory = memory,
                                                          .pages = std::move(pages),
                                                          .below = std::move(below),
                                                          .lean = std::move(lean),
                                                          .spare_extents = parts.spare_extents});
}

}  // namespace kvasir::kvstore
