#include "kvstore/tiers/disk_tier.h"

#include <algorithm>
#include <deque>
#include <iterator>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "spdlog/spdlog.h"

#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "kvstore/tiers/extent_table.h"
#include "kvstore/tiers/recover_extents.h"
#include "kvstore/tiers/segment_files.h"

namespace kvasir::kvstore {
namespace {

using kernels::MutexLock;

// Reads of one round: enough to keep a disk busy, few enough to verify soon.
constexpr size_t kReadBatch = 8;

std::string LockPath(const std::string& directory) { return directory + "/LOCK"; }

class DiskTier : public Tier {
 public:
  DiskTier(DiskTierOptions options, const ExtentFormat& format, std::unique_ptr<File> lock)
      : options_(std::move(options)),
        format_(format),
        lock_(std::move(lock)),
        segments_(*options_.io, options_.directory + "/segments", format.extent_bytes(),
                  options_.segment_bytes) {}
  ~DiskTier() override;

  // Finds the existing extents, and starts the threads.
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
  // The writing thread.
  void WriterMain();
  std::vector<TierWrite> TakeGroup() REQUIRES(mu_);
  void WriteGroup(std::vector<TierWrite> group);
  absl::Status TryStore(absl::Span<const TierWrite> group);
  absl::Status Store(absl::Span<const TierWrite> group);
  absl::Status ReopenManifest();
  absl::Status MakeRoom(int64_t bytes);
  // Returns the number of blocks evicted.
  int64_t EvictOldest(int64_t bytes);
  void Remove(absl::Span<const ExtentTable::Removal> removals);
  void TurnReadOnly(const absl::Status& why);
  void TurnWritable();

  // The reading thread.
  void ReaderMain();
  void ReadBatch(absl::Span<const TierRead> reads);
  void FinishRead(const TierRead& read, const ExtentTable::Extent& found, IoRequest request,
                  absl::Status status);
  absl::Status ReadOne(const BlockIdentity& block, absl::Span<std::byte> extent, IoRequest request,
                       absl::Status status);

  double SecondsSince(std::chrono::steady_clock::time_point begin) const {
    return std::chrono::duration<double>(options_.now() - begin).count();
  }
  // Forgets the block at once; its record and its space are freed soon after.
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
  std::vector<PrefixHash> unrecorded_removals_;  // blocks that are gone but still have a record
  std::unique_ptr<IoQueue> write_queue_;
  // Owned by the reading thread.
  std::unique_ptr<IoQueue> read_queue_;

  mutable kernels::Mutex mu_;
  kernels::CondVar wake_writer_;
  kernels::CondVar wake_reader_;
  kernels::CondVar happened_;
  ExtentTable table_ GUARDED_BY(mu_);
  std::deque<TierWrite> writes_ GUARDED_BY(mu_);
  std::deque<TierRead> reads_ GUARDED_BY(mu_);
  std::vector<ExtentTable::Removal> removals_ GUARDED_BY(mu_);
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

absl::Status DiskTier::Start() {
  KVASIR_ASSIGN_OR_RETURN(RecoveredExtents recovered, RecoverExtents(options_, format_, segments_));
  manifest_ = std::move(recovered.manifest);
  first_generation_ = recovered.first_generation;
  {
    MutexLock lock(mu_);
    table_ = std::move(recovered.table);
    stats_.capacity_blocks = options_.capacity_bytes / format_.extent_bytes();
    stats_.writable = true;
  }
  write_queue_ = options_.io->NewQueue();
  read_queue_ = options_.io->NewQueue();
  writer_ = std::thread([this] { WriterMain(); });
  reader_ = std::thread([this] { ReaderMain(); });
  return absl::OkStatus();
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
  return table_.Contains(hash);
}

std::vector<StoredBlock> DiskTier::Inventory() const {
  MutexLock lock(mu_);
  return table_.Inventory();
}

TierStats DiskTier::stats() const {
  MutexLock lock(mu_);
  TierStats stats = stats_;
  stats.blocks = table_.size();
  return stats;
}

void DiskTier::Complete(TierCompletion completion) {
  events_.completions.push_back(std::move(completion));
  --under_way_;
  happened_.NotifyAll();
}

void DiskTier::Forget(const PrefixHash& hash) {
  const std::optional<ExtentTable::Removal> removal = table_.Remove(hash);
  if (!removal.has_value()) return;
  removals_.push_back(*removal);
  events_.forgotten.push_back(hash);
  happened_.NotifyAll();
  wake_writer_.NotifyAll();
}

// ---- writing

void DiskTier::WriterMain() {
  mu_.Lock();
  for (;;) {
    while (!stop_ && writes_.empty() && removals_.empty()) wake_writer_.Wait(mu_);
    const bool stopping = stop_;
    const std::vector<ExtentTable::Removal> removals = std::exchange(removals_, {});
    std::vector<TierWrite> group;
    if (!stopping) group = TakeGroup();
    mu_.Unlock();
    Remove(removals);
    if (!group.empty()) WriteGroup(std::move(group));
    mu_.Lock();
    if (stopping) break;
  }
  const std::vector<ManifestRecord> touched = table_.TakeTouched();
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
  std::vector<TierWrite> held;  // stored already, or twice in the group
  absl::Status status;
  {
    MutexLock lock(mu_);
    absl::flat_hash_set<PrefixHash> seen;
    for (TierWrite& write : group) {
      const bool here = table_.Touch(write.block.hash);
      const bool is_new = !here && seen.insert(write.block.hash).second;
      (is_new ? wanted : held).push_back(std::move(write));
    }
    if (!stats_.writable && options_.now() < retry_at_) {
      status = absl::UnavailableError("the disk tier is read-only");
      stats_.refused_writes += static_cast<int64_t>(wanted.size());
    }
  }
  if (status.ok() && !wanted.empty()) status = TryStore(wanted);
  MutexLock lock(mu_);
  for (const TierWrite& write : wanted) {
    Complete({.ticket = write.ticket, .status = status, .block = {}});
  }
  for (const TierWrite& write : held) {
    const bool here = table_.Contains(write.block.hash);
    Complete({.ticket = write.ticket,
              .status = here ? absl::OkStatus() : absl::UnavailableError("evicted at once"),
              .block = {}});
  }
}

absl::Status DiskTier::TryStore(absl::Span<const TierWrite> group) {
  const auto begin = options_.now();
  absl::Status status = Store(group);
  {
    MutexLock lock(mu_);
    stats_.write_seconds += SecondsSince(begin);
  }
  if (status.ok()) {
    TurnWritable();
    return status;
  }
  TurnReadOnly(status);
  // The disk is filled by others: the blocks unused for longest make room for the next try.
  const int64_t bytes = static_cast<int64_t>(group.size()) * format_.extent_bytes();
  if (absl::IsResourceExhausted(status)) EvictOldest(2 * bytes);
  MutexLock lock(mu_);
  stats_.failed_writes += static_cast<int64_t>(group.size());
  return status;
}

absl::Status DiskTier::Store(absl::Span<const TierWrite> group) {
  // Without this check bytes would go to files that nobody can open again.
  KVASIR_RETURN_IF_ERROR(options_.io->CheckLock(*lock_, LockPath(options_.directory)));
  if (manifest_failed_) KVASIR_RETURN_IF_ERROR(ReopenManifest());
  KVASIR_RETURN_IF_ERROR(MakeRoom(static_cast<int64_t>(group.size()) * format_.extent_bytes()));
  std::vector<absl::Span<const std::byte>> extents;
  for (const TierWrite& write : group) extents.push_back(write.extent);
  KVASIR_ASSIGN_OR_RETURN(const std::vector<Place> places,
                          segments_.Append(*write_queue_, extents));
  std::vector<ManifestRecord> records;
  {
    MutexLock lock(mu_);
    records = table_.TakeTouched();
    for (size_t i = 0; i < group.size(); ++i) {
      records.push_back(table_.NewRecord(group[i].block, places[i]));
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
  const size_t touched = records.size() - group.size();
  for (size_t i = touched; i < records.size(); ++i) table_.Add(records[i]);
  stats_.written_blocks += static_cast<int64_t>(group.size());
  stats_.written_bytes += static_cast<int64_t>(group.size()) * format_.extent_bytes();
  return absl::OkStatus();
}

absl::Status DiskTier::ReopenManifest() {
  manifest_.reset();
  KVASIR_ASSIGN_OR_RETURN(OpenedManifest opened,
                          OpenOrRebuildManifest(options_, format_, segments_));
  manifest_ = std::move(opened.manifest);
  manifest_failed_ = false;
  return absl::OkStatus();
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
  std::vector<PrefixHash> oldest;
  std::vector<ExtentTable::Removal> removals;
  {
    MutexLock lock(mu_);
    const int64_t wanted = (bytes + format_.extent_bytes() - 1) / format_.extent_bytes();
    oldest = table_.ToEvict(wanted);
    for (const PrefixHash& hash : oldest) Forget(hash);
    stats_.evictions += static_cast<int64_t>(oldest.size());
    removals = std::exchange(removals_, {});
  }
  Remove(removals);
  return static_cast<int64_t>(oldest.size());
}

void DiskTier::Remove(absl::Span<const ExtentTable::Removal> removals) {
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
  for (const ExtentTable::Removal& removal : removals) segments_.Free(removal.place);
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
  std::vector<const TierRead*> wanted;
  std::vector<ExtentTable::Extent> found;
  std::vector<std::shared_ptr<File>> files;
  std::vector<IoRequest> requests;
  {
    MutexLock lock(mu_);
    for (const TierRead& read : reads) {
      const std::optional<ExtentTable::Extent> extent = table_.BeginRead(read.hash);
      if (!extent.has_value()) {
        Complete({.ticket = read.ticket,
                  .status = absl::NotFoundError("the block is not in the disk tier"),
                  .block = {}});
        continue;
      }
      wanted.push_back(&read);
      found.push_back(*extent);
      files.push_back(segments_.file(extent->place.segment));
      requests.push_back({.op = IoRequest::Op::kRead,
                          .file = files.back().get(),
                          .offset = extent->place.offset,
                          .memory = read.extent,
                          .result = 0});
    }
  }
  const auto begin = options_.now();
  std::vector<absl::Status> statuses = RunFully(*read_queue_, absl::MakeSpan(requests));
  for (size_t i = 0; i < found.size(); ++i) {
    FinishRead(*wanted[i], found[i], requests[i], std::move(statuses[i]));
  }
  MutexLock lock(mu_);
  stats_.read_seconds += SecondsSince(begin);
}

void DiskTier::FinishRead(const TierRead& read, const ExtentTable::Extent& found, IoRequest request,
                          absl::Status status) {
  status = ReadOne(found.block, read.extent, request, std::move(status));
  MutexLock lock(mu_);
  // Another read of the block may have found it damaged.
  const bool is_here = table_.EndRead(found.block);
  if (status.ok()) {
    if (is_here) table_.Touch(read.hash);
    ++stats_.read_blocks;
    stats_.read_bytes += format_.extent_bytes();
  } else {
    spdlog::error("disk tier {}: block forgotten: {}", options_.directory, status.ToString());
    if (is_here) Forget(read.hash);
  }
  Complete({.ticket = read.ticket, .status = std::move(status), .block = found.block});
}

absl::Status DiskTier::ReadOne(const BlockIdentity& block, absl::Span<std::byte> extent,
                               IoRequest request, absl::Status status) {
  if (!status.ok()) {  // try again: some errors are temporary
    status = RunFully(*read_queue_, absl::MakeSpan(&request, 1))[0];
    MutexLock lock(mu_);
    ++stats_.failed_reads;
  }
  if (!status.ok()) {
    return absl::DataLossError(absl::StrCat("cannot be read: ", status.message()));
  }
  const absl::Status verified = format_.Verify(block, extent);
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
  absl::StatusOr<std::unique_ptr<File>> lock = options.io->Lock(LockPath(options.directory));
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
