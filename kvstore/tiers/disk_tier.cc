#include "kvstore/tiers/disk_tier.h"

#include <algorithm>
#include <deque>
#include <filesystem>
#include <iterator>
#include <list>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "spdlog/spdlog.h"

#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "kvstore/tiers/segment_files.h"

namespace kvasir::kvstore {
namespace {

using kernels::MutexLock;

// Reads that one round takes: enough to keep a disk busy, few enough to verify soon.
constexpr size_t kReadBatch = 8;

class DiskTier : public Tier {
 public:
  DiskTier(DiskTierOptions options, const ExtentFormat& format, std::unique_ptr<File> lock)
      : options_(std::move(options)),
        format_(format),
        lock_(std::move(lock)),
        segments_(*options_.io, options_.directory + "/segments", format.extent_bytes(),
                  options_.segment_bytes) {}
  ~DiskTier() override;

  // Finds what is there, and starts the threads.
  absl::Status Start();

  void Write(std::vector<TierWrite> writes) override;
  void Read(std::vector<TierRead> reads) override;
  TierEvents Poll() override;
  void Wait() override;
  const ExtentFormat& format() const override { return format_; }
  bool Holds(const PrefixHash& hash) const override;
  std::vector<StoredBlock> Inventory() const override;
  uint64_t first_generation() const override { return first_generation_; }
  TierStats stats() const override;

 private:
  struct Entry {
    BlockIdentity block;
    Place place;
    uint64_t last_use = 0;
    bool touched = false;  // used since its record was written
    int64_t readers = 0;   // reads under way: it must not be evicted
    std::list<PrefixHash>::iterator lru;
  };
  struct Removal {
    PrefixHash hash{};
    Place place;
  };

  absl::Status OpenOrRebuildManifest(std::vector<ManifestRecord>& records);
  void Adopt(std::vector<ManifestRecord> records);

  // The writing thread.
  void WriterMain();
  std::vector<TierWrite> TakeGroup() REQUIRES(mu_);
  void WriteGroup(std::vector<TierWrite> group);
  absl::Status Store(absl::Span<const TierWrite> group);
  absl::Status MakeRoom(int64_t bytes);
  // Returns how many blocks went.
  int64_t EvictOldest(int64_t bytes);
  void Remove(absl::Span<const Removal> removals);
  std::vector<ManifestRecord> TakeTouched() REQUIRES(mu_);
  void TurnReadOnly(const absl::Status& why);
  void TurnWritable();

  // The reading thread.
  void ReaderMain();
  void ReadBatch(absl::Span<const TierRead> reads);
  absl::Status ReadOne(const Entry& entry, absl::Span<std::byte> extent, IoRequest request,
                       absl::Status status);

  double SecondsSince(std::chrono::steady_clock::time_point begin) const {
    return std::chrono::duration<double>(options_.now() - begin).count();
  }
  void Touch(Entry& entry) REQUIRES(mu_);
  // The block is not here any more; its record and its space go soon.
  void Forget(const PrefixHash& hash) REQUIRES(mu_);
  void Complete(TierCompletion completion) REQUIRES(mu_);

  const DiskTierOptions options_;
  const ExtentFormat format_;
  const std::unique_ptr<File> lock_;
  SegmentFiles segments_;
  uint64_t first_generation_ = 0;

  // Owned by the writing thread.
  std::unique_ptr<Manifest> manifest_;
  bool manifest_failed_ = false;
  std::vector<PrefixHash> unrecorded_removals_;  // blocks that are gone and still have a record
  std::unique_ptr<IoQueue> write_queue_;
  // Owned by the reading thread.
  std::unique_ptr<IoQueue> read_queue_;

  mutable kernels::Mutex mu_;
  kernels::CondVar wake_writer_;
  kernels::CondVar wake_reader_;
  kernels::CondVar happened_;
  absl::flat_hash_map<PrefixHash, Entry> entries_ GUARDED_BY(mu_);
  std::list<PrefixHash> lru_ GUARDED_BY(mu_);  // least recently used first
  uint64_t next_use_ GUARDED_BY(mu_) = 1;
  std::vector<PrefixHash> touched_ GUARDED_BY(mu_);
  std::deque<TierWrite> writes_ GUARDED_BY(mu_);
  std::deque<TierRead> reads_ GUARDED_BY(mu_);
  std::vector<Removal> removals_ GUARDED_BY(mu_);
  int64_t under_way_ GUARDED_BY(mu_) = 0;  // requests without a completion
  TierEvents events_ GUARDED_BY(mu_);
  TierStats stats_ GUARDED_BY(mu_);
  std::chrono::steady_clock::time_point retry_at_ GUARDED_BY(mu_);
  bool stop_ GUARDED_BY(mu_) = false;

  std::thread writer_;
  std::thread reader_;
};

DiskTier::~DiskTier() {
  {
    MutexLock lock(mu_);
    stop_ = true;
    wake_writer_.NotifyAll();
    wake_reader_.NotifyAll();
  }
  if (writer_.joinable()) writer_.join();
  if (reader_.joinable()) reader_.join();
}

// ---- opening

absl::Status DiskTier::Start() {
  KVASIR_RETURN_IF_ERROR(options_.io->MakeDirectory(options_.directory + "/segments"));
  KVASIR_RETURN_IF_ERROR(segments_.Open());
  std::vector<ManifestRecord> records;
  KVASIR_RETURN_IF_ERROR(OpenOrRebuildManifest(records));
  Adopt(std::move(records));
  segments_.RemoveUnused();
  write_queue_ = options_.io->NewQueue();
  read_queue_ = options_.io->NewQueue();
  writer_ = std::thread([this] { WriterMain(); });
  reader_ = std::thread([this] { ReaderMain(); });
  return absl::OkStatus();
}

absl::Status DiskTier::OpenOrRebuildManifest(std::vector<ManifestRecord>& records) {
  const std::string path = options_.directory + "/manifest";
  absl::StatusOr<std::unique_ptr<Manifest>> opened =
      options_.open_manifest(path, format_.Fingerprint());
  absl::Status status = opened.status();
  if (opened.ok()) {
    manifest_ = *std::move(opened);
    absl::StatusOr<std::vector<ManifestRecord>> loaded = manifest_->Load();
    if (loaded.ok()) {
      records = *std::move(loaded);
      return absl::OkStatus();
    }
    status = loaded.status();
  }
  if (!absl::IsDataLoss(status)) {
    return absl::Status(status.code(),
                        absl::StrCat("disk tier ", options_.directory, ": ", status.message()));
  }
  spdlog::warn("disk tier {}: {}; making the manifest anew from the segments", options_.directory,
               status.ToString());
  manifest_.reset();
  KVASIR_ASSIGN_OR_RETURN(records, segments_.Scan(format_));
  std::error_code ignored;  // if anything is left, opening says so
  std::filesystem::remove_all(path, ignored);
  KVASIR_ASSIGN_OR_RETURN(manifest_, options_.open_manifest(path, format_.Fingerprint()));
  return manifest_->Commit(records, {});
}

void DiskTier::Adopt(std::vector<ManifestRecord> records) {
  std::sort(records.begin(), records.end(), [](const ManifestRecord& a, const ManifestRecord& b) {
    return a.last_use < b.last_use;
  });
  uint64_t epoch = manifest_->epoch();
  MutexLock lock(mu_);
  for (const ManifestRecord& record : records) {
    const Place place = {.segment = record.segment, .offset = record.offset};
    epoch = std::max(epoch, (record.block.generation >> 32) + 1);
    next_use_ = std::max(next_use_, record.last_use + 1);
    if (!segments_.Adopt(place)) {
      spdlog::warn("disk tier {}: a block is recorded in segment {}, which does not hold it",
                   options_.directory, record.segment);
      continue;
    }
    Entry& entry = entries_[record.block.hash];
    entry.block = record.block;
    entry.place = place;
    entry.last_use = record.last_use;
    entry.lru = lru_.insert(lru_.end(), record.block.hash);
  }
  first_generation_ = epoch << 32;
  stats_.capacity_blocks = options_.capacity_bytes / format_.extent_bytes();
  stats_.writable = true;
}

// ---- the engine's side

void DiskTier::Write(std::vector<TierWrite> writes) {
  MutexLock lock(mu_);
  under_way_ += static_cast<int64_t>(writes.size());
  std::move(writes.begin(), writes.end(), std::back_inserter(writes_));
  wake_writer_.NotifyAll();
}

void DiskTier::Read(std::vector<TierRead> reads) {
  MutexLock lock(mu_);
  under_way_ += static_cast<int64_t>(reads.size());
  std::move(reads.begin(), reads.end(), std::back_inserter(reads_));
  wake_reader_.NotifyAll();
}

TierEvents DiskTier::Poll() {
  MutexLock lock(mu_);
  return std::exchange(events_, {});
}

void DiskTier::Wait() {
  MutexLock lock(mu_);
  while (under_way_ > 0 && events_.completions.empty() && events_.forgotten.empty()) {
    happened_.Wait(mu_);
  }
}

bool DiskTier::Holds(const PrefixHash& hash) const {
  MutexLock lock(mu_);
  return entries_.contains(hash);
}

std::vector<StoredBlock> DiskTier::Inventory() const {
  MutexLock lock(mu_);
  std::vector<StoredBlock> blocks;
  blocks.reserve(entries_.size());
  for (const auto& [hash, entry] : entries_) {
    blocks.push_back({.hash = hash, .tokens = entry.block.tokens});
  }
  return blocks;
}

TierStats DiskTier::stats() const {
  MutexLock lock(mu_);
  TierStats stats = stats_;
  stats.blocks = static_cast<int64_t>(entries_.size());
  return stats;
}

void DiskTier::Complete(TierCompletion completion) {
  events_.completions.push_back(std::move(completion));
  --under_way_;
  happened_.NotifyAll();
}

void DiskTier::Touch(Entry& entry) {
  entry.last_use = next_use_++;
  if (!std::exchange(entry.touched, true)) touched_.push_back(entry.block.hash);
  lru_.splice(lru_.end(), lru_, entry.lru);
}

void DiskTier::Forget(const PrefixHash& hash) {
  const auto it = entries_.find(hash);
  if (it == entries_.end()) return;
  removals_.push_back({.hash = hash, .place = it->second.place});
  events_.forgotten.push_back(hash);
  lru_.erase(it->second.lru);
  entries_.erase(it);
  happened_.NotifyAll();
  wake_writer_.NotifyAll();
}

// ---- writing

void DiskTier::WriterMain() {
  mu_.Lock();
  for (;;) {
    while (!stop_ && writes_.empty() && removals_.empty()) wake_writer_.Wait(mu_);
    const bool stopping = stop_;
    const std::vector<Removal> removals = std::exchange(removals_, {});
    std::vector<TierWrite> group;
    if (!stopping) group = TakeGroup();
    mu_.Unlock();
    Remove(removals);
    if (!group.empty()) WriteGroup(std::move(group));
    mu_.Lock();
    if (stopping) break;
  }
  const std::vector<ManifestRecord> touched = TakeTouched();
  mu_.Unlock();
  if (!touched.empty() && !manifest_failed_) {
    const absl::Status committed = manifest_->Commit(touched, unrecorded_removals_);
    if (!committed.ok()) spdlog::warn("disk tier {}: {}", options_.directory, committed.ToString());
  }
}

std::vector<TierWrite> DiskTier::TakeGroup() {
  const int64_t bytes = std::min(options_.group_bytes, options_.capacity_bytes);
  const size_t limit = static_cast<size_t>(std::max<int64_t>(1, bytes / format_.extent_bytes()));
  std::vector<TierWrite> group;
  while (!writes_.empty() && group.size() < limit) {
    group.push_back(std::move(writes_.front()));
    writes_.pop_front();
  }
  return group;
}

void DiskTier::WriteGroup(std::vector<TierWrite> group) {
  std::vector<TierWrite> wanted;
  std::vector<TierWrite> held;  // here already, or twice in the group
  absl::Status status;
  {
    MutexLock lock(mu_);
    absl::flat_hash_set<PrefixHash> seen;
    for (TierWrite& write : group) {
      const auto it = entries_.find(write.block.hash);
      if (it != entries_.end()) Touch(it->second);
      const bool is_new = it == entries_.end() && seen.insert(write.block.hash).second;
      (is_new ? wanted : held).push_back(std::move(write));
    }
    if (!stats_.writable && options_.now() < retry_at_) {
      status = absl::UnavailableError("the disk tier is read-only");
      stats_.refused_writes += static_cast<int64_t>(wanted.size());
    }
  }
  if (status.ok() && !wanted.empty()) {
    const auto begin = options_.now();
    status = Store(wanted);
    {
      MutexLock lock(mu_);
      stats_.write_seconds += SecondsSince(begin);
    }
    if (status.ok()) {
      TurnWritable();
    } else {
      TurnReadOnly(status);
      // A disk that others fill: what was not read for longest makes room for the next try.
      const int64_t bytes = static_cast<int64_t>(wanted.size()) * format_.extent_bytes();
      if (absl::IsResourceExhausted(status)) EvictOldest(2 * bytes);
      MutexLock lock(mu_);
      stats_.failed_writes += static_cast<int64_t>(wanted.size());
    }
  }
  MutexLock lock(mu_);
  for (const TierWrite& write : wanted) {
    Complete({.ticket = write.ticket, .status = status, .block = {}});
  }
  for (const TierWrite& write : held) {
    const bool here = entries_.contains(write.block.hash);
    Complete({.ticket = write.ticket,
              .status = here ? absl::OkStatus() : absl::UnavailableError("evicted at once"),
              .block = {}});
  }
}

absl::Status DiskTier::Store(absl::Span<const TierWrite> group) {
  if (manifest_failed_) {
    manifest_.reset();
    KVASIR_ASSIGN_OR_RETURN(
        manifest_, options_.open_manifest(options_.directory + "/manifest", format_.Fingerprint()));
    manifest_failed_ = false;
  }
  KVASIR_RETURN_IF_ERROR(MakeRoom(static_cast<int64_t>(group.size()) * format_.extent_bytes()));
  std::vector<absl::Span<const std::byte>> extents;
  for (const TierWrite& write : group) extents.push_back(write.extent);
  KVASIR_ASSIGN_OR_RETURN(const std::vector<Place> places,
                          segments_.Append(*write_queue_, extents));
  std::vector<ManifestRecord> records;
  {
    MutexLock lock(mu_);
    records = TakeTouched();
    for (size_t i = 0; i < group.size(); ++i) {
      records.push_back({.block = group[i].block,
                         .segment = places[i].segment,
                         .offset = places[i].offset,
                         .last_use = next_use_++});
    }
  }
  const absl::Status committed = manifest_->Commit(records, unrecorded_removals_);
  if (!committed.ok()) {
    manifest_failed_ = true;
    for (const Place& place : places) segments_.Free(place);
    return committed;
  }
  unrecorded_removals_.clear();
  MutexLock lock(mu_);
  for (size_t i = 0; i < group.size(); ++i) {
    const ManifestRecord& record = records[records.size() - group.size() + i];
    Entry& entry = entries_[record.block.hash];
    entry.block = record.block;
    entry.place = places[i];
    entry.last_use = record.last_use;
    entry.lru = lru_.insert(lru_.end(), record.block.hash);
  }
  stats_.written_blocks += static_cast<int64_t>(group.size());
  stats_.written_bytes += static_cast<int64_t>(group.size()) * format_.extent_bytes();
  return absl::OkStatus();
}

std::vector<ManifestRecord> DiskTier::TakeTouched() {
  std::vector<ManifestRecord> records;
  for (const PrefixHash& hash : std::exchange(touched_, {})) {
    const auto it = entries_.find(hash);
    if (it == entries_.end() || !std::exchange(it->second.touched, false)) continue;
    const Entry& entry = it->second;
    records.push_back({.block = entry.block,
                       .segment = entry.place.segment,
                       .offset = entry.place.offset,
                       .last_use = entry.last_use});
  }
  return records;
}

absl::Status DiskTier::MakeRoom(int64_t bytes) {
  for (;;) {
    const int64_t used = segments_.used_bytes();
    const int64_t excess = used + bytes - options_.capacity_bytes;
    if (excess <= 0) return absl::OkStatus();
    if (EvictOldest(excess) == 0) {
      return absl::ResourceExhaustedError(absl::StrCat("need ", bytes, " bytes; of a capacity of ",
                                                       options_.capacity_bytes, ", ", used,
                                                       " are being read or cannot be given back"));
    }
  }
}

int64_t DiskTier::EvictOldest(int64_t bytes) {
  int64_t evicted = 0;
  std::vector<Removal> removals;
  {
    MutexLock lock(mu_);
    const int64_t wanted = (bytes + format_.extent_bytes() - 1) / format_.extent_bytes();
    for (auto it = lru_.begin(); it != lru_.end() && evicted < wanted;) {
      const PrefixHash hash = *it++;
      if (entries_.at(hash).readers > 0) continue;
      Forget(hash);
      ++evicted;
    }
    stats_.evictions += evicted;
    removals = std::exchange(removals_, {});
  }
  Remove(removals);
  return evicted;
}

void DiskTier::Remove(absl::Span<const Removal> removals) {
  if (removals.empty()) return;
  for (const Removal& removal : removals) unrecorded_removals_.push_back(removal.hash);
  // Records go first, so that none is left of a place that is not in use. Should that fail, the
  // header of the place says later that it is nobody's.
  if (!manifest_failed_) {
    const absl::Status committed = manifest_->Commit({}, unrecorded_removals_);
    if (committed.ok()) {
      unrecorded_removals_.clear();
    } else {
      manifest_failed_ = true;
      TurnReadOnly(committed);
    }
  }
  for (const Removal& removal : removals) segments_.Free(removal.place);
}

void DiskTier::TurnReadOnly(const absl::Status& why) {
  MutexLock lock(mu_);
  retry_at_ = options_.now() + options_.retry_after;
  if (!stats_.writable) return;
  stats_.writable = false;
  spdlog::error("disk tier {} is read-only: {}", options_.directory, why.ToString());
}

void DiskTier::TurnWritable() {
  MutexLock lock(mu_);
  if (stats_.writable) return;
  stats_.writable = true;
  spdlog::info("disk tier {} takes writes again", options_.directory);
}

// ---- reading

void DiskTier::ReaderMain() {
  mu_.Lock();
  for (;;) {
    while (!stop_ && reads_.empty()) wake_reader_.Wait(mu_);
    if (stop_) break;
    std::vector<TierRead> batch;
    while (!reads_.empty() && batch.size() < kReadBatch) {
      batch.push_back(reads_.front());
      reads_.pop_front();
    }
    mu_.Unlock();
    ReadBatch(batch);
    mu_.Lock();
  }
  mu_.Unlock();
}

void DiskTier::ReadBatch(absl::Span<const TierRead> reads) {
  std::vector<const TierRead*> found;
  std::vector<Entry> entries;
  std::vector<std::shared_ptr<File>> files;
  std::vector<IoRequest> requests;
  {
    MutexLock lock(mu_);
    for (const TierRead& read : reads) {
      const auto it = entries_.find(read.hash);
      if (it == entries_.end()) {
        Complete({.ticket = read.ticket,
                  .status = absl::NotFoundError("the block is not in the disk tier"),
                  .block = {}});
        continue;
      }
      ++it->second.readers;
      found.push_back(&read);
      entries.push_back(it->second);
      files.push_back(segments_.file(it->second.place.segment));
      requests.push_back({.op = IoRequest::Op::kRead,
                          .file = files.back().get(),
                          .offset = it->second.place.offset,
                          .memory = read.extent,
                          .result = 0});
    }
  }
  const auto begin = options_.now();
  std::vector<absl::Status> statuses = RunFully(*read_queue_, absl::MakeSpan(requests));
  for (size_t i = 0; i < found.size(); ++i) {
    absl::Status status =
        ReadOne(entries[i], found[i]->extent, requests[i], std::move(statuses[i]));
    MutexLock lock(mu_);
    // Another read of it may have found it damaged.
    const auto it = entries_.find(found[i]->hash);
    const bool is_here =
        it != entries_.end() && it->second.block.generation == entries[i].block.generation;
    if (is_here) --it->second.readers;
    if (status.ok()) {
      if (is_here) Touch(it->second);
      ++stats_.read_blocks;
      stats_.read_bytes += format_.extent_bytes();
    } else {
      spdlog::error("disk tier {}: block forgotten: {}", options_.directory, status.ToString());
      if (is_here) Forget(found[i]->hash);
    }
    Complete({.ticket = found[i]->ticket, .status = std::move(status), .block = entries[i].block});
  }
  MutexLock lock(mu_);
  stats_.read_seconds += SecondsSince(begin);
}

absl::Status DiskTier::ReadOne(const Entry& entry, absl::Span<std::byte> extent, IoRequest request,
                               absl::Status status) {
  if (!status.ok()) {  // once more: some errors pass
    status = RunFully(*read_queue_, absl::MakeSpan(&request, 1))[0];
    MutexLock lock(mu_);
    ++stats_.failed_reads;
  }
  if (!status.ok()) {
    return absl::DataLossError(absl::StrCat("cannot be read: ", status.message()));
  }
  const absl::Status verified = format_.Verify(entry.block, extent);
  if (verified.ok()) return verified;
  MutexLock lock(mu_);
  ++stats_.checksum_failures;
  return absl::DataLossError(verified.message());
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tier>> OpenDiskTier(DiskTierOptions options) {
  KVASIR_ASSIGN_OR_RETURN(const ExtentFormat format, ExtentFormat::Create(options.shard));
  if (options.capacity_bytes < format.extent_bytes()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "disk tier ", options.directory, ": a block needs ", format.extent_bytes(),
        " bytes, the capacity is ", options.capacity_bytes, "; raise kv_disk_size_gb"));
  }
  KVASIR_RETURN_IF_ERROR(options.io->MakeDirectory(options.directory));
  absl::StatusOr<std::unique_ptr<File>> lock = options.io->Lock(options.directory + "/LOCK");
  if (!lock.ok()) {
    return absl::Status(lock.status().code(),
                        absl::StrCat("disk tier: ", lock.status().message(),
                                     "; give each worker a kv_disk_path of its own"));
  }
  auto tier = std::make_unique<DiskTier>(std::move(options), format, *std::move(lock));
  const absl::Status started = tier->Start();
  if (absl::IsFailedPrecondition(started)) {
    return absl::FailedPreconditionError(
        absl::StrCat(started.message(), "; choose another kv_disk_path, or empty this one"));
  }
  KVASIR_RETURN_IF_ERROR(started);
  return tier;
}

}  // namespace kvasir::kvstore
