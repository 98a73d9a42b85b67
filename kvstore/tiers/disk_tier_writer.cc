#include "kvstore/tiers/disk_tier_writer.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <set>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "spdlog/spdlog.h"

#include "kernels/base/status_macros.h"
#include "kvstore/tiers/recover_extents.h"

namespace kvasir::kvstore {
namespace {

using kernels::MutexLock;

}  // namespace

DiskTierWriter::DiskTierWriter(DiskTierState& state, std::unique_ptr<Manifest> manifest)
    : state_(state), manifest_(std::move(manifest)), queue_(state.options.io->NewQueue()) {}

void DiskTierWriter::Run() {
  state_.mu.Lock();
  for (;;) {
    while (!state_.stop && state_.writes.empty() && state_.removals.empty() &&
           state_.erases.empty()) {
      state_.wake_writer.Wait(state_.mu);
    }
    const bool stopping = state_.stop;
    const std::vector<ExtentTable::Removal> removals = std::exchange(state_.removals, {});
    std::vector<TierWrite> group;
    if (!stopping) group = TakeGroup();
    const std::deque<TierErase> erases = std::exchange(state_.erases, {});
    state_.mu.Unlock();
    Remove(removals);
    if (!group.empty()) WriteGroup(std::move(group));
    for (const TierErase& erase : erases) CarryOut(erase);
    state_.mu.Lock();
    if (stopping) break;
  }
  const std::vector<ManifestRecord> touched = state_.table.TakeTouched();
  state_.mu.Unlock();
  if (!touched.empty() && !manifest_failed_) {
    const absl::Status committed = manifest_->Commit(touched, unrecorded_removals_);
    if (!committed.ok()) {
      spdlog::warn("disk tier {}: {}", state_.options.directory, committed.ToString());
    }
  }
}

size_t DiskTierWriter::MostOfGroup() const {
  const int64_t bytes = std::min(state_.options.group_bytes, state_.options.capacity_bytes);
  return static_cast<size_t>(std::max<int64_t>(1, bytes / state_.format.extent_bytes()));
}

absl::Status DiskTierWriter::TakeMemory() {
  if (!state_.part.has_value()) return absl::OkStatus();
  KVASIR_ASSIGN_OR_RETURN(made_, ExtentMemory::Allocate(static_cast<int64_t>(MostOfGroup()),
                                                        state_.format.extent_bytes()));
  return absl::OkStatus();
}

std::vector<absl::Span<const std::byte>> DiskTierWriter::ExtentsOf(
    absl::Span<const TierWrite> group) const {
  std::vector<absl::Span<const std::byte>> extents;
  for (size_t i = 0; i < group.size(); ++i) {
    if (state_.part.has_value()) {
      state_.part->Gather(group[i].block, group[i].extent, (*made_)[i]);
      extents.push_back((*made_)[i]);
    } else {
      extents.push_back(group[i].extent);
    }
  }
  return extents;
}

std::vector<TierWrite> DiskTierWriter::TakeGroup() {
  const size_t limit = MostOfGroup();
  std::vector<TierWrite> group;
  while (!state_.writes.empty() && group.size() < limit) {
    group.push_back(std::move(state_.writes.front()));
    state_.writes.pop_front();
  }
  return group;
}

void DiskTierWriter::WriteGroup(std::vector<TierWrite> group) {
  std::vector<TierWrite> wanted;
  std::vector<TierWrite> held;  // stored already, or twice in the group
  absl::Status status;
  {
    MutexLock lock(state_.mu);
    absl::flat_hash_set<PrefixHash> seen;
    for (TierWrite& write : group) {
      const bool here = state_.table.Touch(write.block.hash);
      const bool is_new = !here && seen.insert(write.block.hash).second;
      (is_new ? wanted : held).push_back(std::move(write));
    }
    if (!state_.stats.writable && state_.options.now() < state_.retry_at) {
      status = absl::UnavailableError("the disk tier is read-only");
      state_.stats.refused_writes += static_cast<int64_t>(wanted.size());
    }
  }
  if (status.ok() && !wanted.empty()) status = TryStore(wanted);
  MutexLock lock(state_.mu);
  for (const TierWrite& write : wanted) {
    state_.Complete({.ticket = write.ticket, .status = status, .block = {}});
  }
  for (const TierWrite& write : held) {
    const bool here = state_.table.Contains(write.block.hash);
    state_.Complete({.ticket = write.ticket,
                     .status = here ? absl::OkStatus() : absl::UnavailableError("evicted at once"),
                     .block = {}});
  }
}

absl::Status DiskTierWriter::TryStore(absl::Span<const TierWrite> group) {
  const auto begin = state_.options.now();
  absl::Status status = Store(group);
  {
    MutexLock lock(state_.mu);
    state_.stats.write_seconds += state_.SecondsSince(begin);
  }
  if (status.ok()) {
    TurnWritable();
    return status;
  }
  TurnReadOnly(status);
  // The disk is filled by others: the blocks unused for longest make room for the next try.
  const int64_t bytes = static_cast<int64_t>(group.size()) * state_.format.extent_bytes();
  if (absl::IsResourceExhausted(status)) EvictOldest(2 * bytes);
  MutexLock lock(state_.mu);
  state_.stats.failed_writes += static_cast<int64_t>(group.size());
  return status;
}

absl::Status DiskTierWriter::Store(absl::Span<const TierWrite> group) {
  // Without this check bytes would go to files that nobody can open again.
  KVASIR_RETURN_IF_ERROR(
      state_.options.io->CheckLock(*state_.lock, LockPath(state_.options.directory)));
  if (manifest_failed_) KVASIR_RETURN_IF_ERROR(ReopenManifest());
  KVASIR_RETURN_IF_ERROR(
      MakeRoom(static_cast<int64_t>(group.size()) * state_.format.extent_bytes()));
  KVASIR_ASSIGN_OR_RETURN(const std::vector<Place> places,
                          state_.segments.Append(*queue_, ExtentsOf(group)));
  std::vector<ManifestRecord> records;
  {
    MutexLock lock(state_.mu);
    records = state_.table.TakeTouched();
    for (size_t i = 0; i < group.size(); ++i) {
      records.push_back(state_.table.NewRecord(group[i].block, places[i]));
    }
  }
  const absl::Status committed = manifest_->Commit(records, unrecorded_removals_);
  if (!committed.ok()) {
    manifest_failed_ = true;
    for (const Place& place : places) state_.segments.Free(place);
    return committed;
  }
  unrecorded_removals_.clear();
  MutexLock lock(state_.mu);
  const size_t touched = records.size() - group.size();
  for (size_t i = touched; i < records.size(); ++i) state_.table.Add(records[i]);
  state_.stats.written_blocks += static_cast<int64_t>(group.size());
  state_.stats.written_bytes += static_cast<int64_t>(group.size()) * state_.format.extent_bytes();
  return absl::OkStatus();
}

absl::Status DiskTierWriter::ReopenManifest() {
  manifest_.reset();
  KVASIR_ASSIGN_OR_RETURN(OpenedManifest opened,
                          OpenOrRebuildManifest(state_.options, state_.format, state_.segments));
  manifest_ = std::move(opened.manifest);
  manifest_failed_ = false;
  return absl::OkStatus();
}

absl::Status DiskTierWriter::MakeRoom(int64_t bytes) {
  for (;;) {
    const int64_t used = state_.segments.used_bytes();
    const int64_t excess = used + bytes - state_.options.capacity_bytes;
    if (excess <= 0) return absl::OkStatus();
    if (EvictOldest(excess) == 0) {
      return absl::ResourceExhaustedError(absl::StrCat("need ", bytes, " bytes; of a capacity of ",
                                                       state_.options.capacity_bytes, ", ", used,
                                                       " are being read or cannot be given back"));
    }
  }
}

int64_t DiskTierWriter::EvictOldest(int64_t bytes) {
  std::vector<PrefixHash> oldest;
  std::vector<ExtentTable::Removal> removals;
  {
    MutexLock lock(state_.mu);
    const int64_t wanted =
        (bytes + state_.format.extent_bytes() - 1) / state_.format.extent_bytes();
    oldest = state_.table.ToEvict(wanted);
    for (const PrefixHash& hash : oldest) state_.Forget(hash);
    state_.stats.evictions += static_cast<int64_t>(oldest.size());
    removals = std::exchange(state_.removals, {});
  }
  Remove(removals);
  return static_cast<int64_t>(oldest.size());
}

void DiskTierWriter::Remove(absl::Span<const ExtentTable::Removal> removals) {
  if (removals.empty()) return;
  for (const ExtentTable::Removal& removal : removals) unrecorded_removals_.push_back(removal.hash);
  // Records are removed first, so that none is left of a place that is not in use. If that fails,
  // the header of the place shows later that it belongs to no block.
  if (!manifest_failed_) {
    const absl::Status committed = manifest_->Commit({}, unrecorded_removals_);
    if (committed.ok()) {
      unrecorded_removals_.clear();
    } else {
      manifest_failed_ = true;
      TurnReadOnly(committed);
    }
  }
  for (const ExtentTable::Removal& removal : removals) state_.segments.Free(removal.place);
}

// --- erasing ------------------------------------------------------------------------------------

void DiskTierWriter::CarryOut(const TierErase& erase) {
  TierErased erased = {.ticket = erase.ticket, .status = {}};
  erased.status = EraseBlocks(erase, erased);
  if (!erased.status.ok()) {
    spdlog::error("disk tier {}: not erased: {}", state_.options.directory,
                  erased.status.ToString());
  }
  MutexLock lock(state_.mu);
  state_.events.erased.push_back(std::move(erased));
  --state_.under_way;
  state_.happened.NotifyAll();
}

absl::Status DiskTierWriter::EraseBlocks(const TierErase& erase, TierErased& erased) {
  KVASIR_RETURN_IF_ERROR(
      state_.options.io->CheckLock(*state_.lock, LockPath(state_.options.directory)));
  if (manifest_failed_) KVASIR_RETURN_IF_ERROR(ReopenManifest());
  std::vector<ExtentTable::Removal> removals;
  std::vector<Place> places;
  std::set<Place> used;
  const std::vector<ExtentTable::Extent> covered = Covered(erase);
  {
    MutexLock lock(state_.mu);
    for (const ExtentTable::Extent& extent : covered) {
      while (state_.table.HasReader(extent.block.hash)) state_.happened.Wait(state_.mu);
      if (state_.table.IsHeld(extent.block.hash)) continue;  // in use: left where it is
      places.push_back(extent.place);
      state_.Forget(extent.block.hash);
    }
    removals = std::exchange(state_.removals, {});
    for (const ExtentTable::Extent& extent : state_.table.Extents()) used.insert(extent.place);
  }
  const absl::Status overwritten = state_.segments.Overwrite(*queue_, places);
  Remove(removals);
  KVASIR_RETURN_IF_ERROR(overwritten);
  if (manifest_failed_) return absl::UnavailableError("the records of the blocks are not removed");
  KVASIR_RETURN_IF_ERROR(state_.segments.OverwriteAllBut(*queue_, used));
  KVASIR_RETURN_IF_ERROR(manifest_->Purge());
  erased.blocks = std::ssize(places);
  erased.bytes = erased.blocks * state_.format.extent_bytes();
  return absl::OkStatus();
}

std::vector<ExtentTable::Extent> DiskTierWriter::Covered(const TierErase& erase) {
  std::vector<ExtentTable::Extent> all;
  {
    MutexLock lock(state_.mu);
    all = state_.table.Extents();
  }
  if (!erase.owner.has_value()) {
    std::erase_if(all, [&](const auto& extent) { return !erase.Covers(extent.block); });
    return all;
  }
  const absl::StatusOr<ExtentMemory> memory = ExtentMemory::Allocate(1, kExtentHeaderBytes);
  // A header that cannot be read may be anybody's.
  std::erase_if(all, [&](const ExtentTable::Extent& extent) {
    const std::shared_ptr<File> file = state_.segments.file(extent.place.segment);
    if (!memory.ok() || file == nullptr) return false;
    IoRequest request = {.op = IoRequest::Op::kRead,
                         .file = file.get(),
                         .offset = extent.place.offset,
                         .memory = (*memory)[0],
                         .result = 0};
    if (!RunFully(*queue_, absl::MakeSpan(&request, 1))[0].ok()) return false;
    const absl::StatusOr<BlockIdentity> block = state_.format.ReadHeader((*memory)[0]);
    return block.ok() && !erase.Covers(*block);
  });
  return all;
}

// --- failures -----------------------------------------------------------------------------------

void DiskTierWriter::TurnReadOnly(const absl::Status& why) {
  MutexLock lock(state_.mu);
  state_.retry_at = state_.options.now() + state_.options.retry_after;
  if (!state_.stats.writable) return;
  state_.stats.writable = false;
  spdlog::error("disk tier {} is read-only: {}", state_.options.directory, why.ToString());
}

void DiskTierWriter::TurnWritable() {
  MutexLock lock(state_.mu);
  if (state_.stats.writable) return;
  state_.stats.writable = true;
  spdlog::info("disk tier {} takes writes again", state_.options.directory);
}

}  // namespace kvasir::kvstore
