#include "kvstore/tiers/disk_tier.h"

#include <iterator>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "kvstore/tiers/disk_tier_reader.h"
#include "kvstore/tiers/disk_tier_state.h"
#include "kvstore/tiers/disk_tier_writer.h"
#include "kvstore/tiers/recover_extents.h"

namespace kvasir::kvstore {
namespace {

using kernels::MutexLock;

// Payload of the error that another process has the store open.
constexpr char kOpenElsewhere[] = "kvasir.kvstore/open-elsewhere";

class HeldDiskExtent : public HeldExtent {
 public:
  HeldDiskExtent(DiskTierState& state, const ExtentTable::Extent& extent,
                 std::shared_ptr<File> file)
      : state_(state), extent_(extent), file_(std::move(file)) {}
  ~HeldDiskExtent() override {
    MutexLock lock(state_.mu);
    state_.table.EndHold(extent_.block);
  }
  Place Find(int64_t page_in_block) const override {
    return {.file = file_.get(),
            .offset = extent_.place.offset + state_.format.page_offset(page_in_block)};
  }
  bool IsOfSealing(uint64_t generation) const override {
    return extent_.block.generation == generation;
  }

 private:
  DiskTierState& state_;
  const ExtentTable::Extent extent_;
  const std::shared_ptr<File> file_;
};

// The queue between the engine's thread and the two threads of the tier.
class DiskTier : public Tier {
 public:
  DiskTier(DiskTierOptions options, const ExtentFormat& format, std::optional<HeadExtent> part,
           std::unique_ptr<File> lock)
      : state_(std::move(options), format, std::move(part), std::move(lock)) {}
  ~DiskTier() override;

  // Finds the existing extents, and starts the threads.
  absl::Status Start();

  void Write(std::vector<TierWrite> writes) override;
  void Read(std::vector<TierRead> reads) override;
  void Pin(absl::Span<const PrefixHash> blocks) override;
  void Unpin(absl::Span<const PrefixHash> blocks) override;
  bool Erase(TierErase erase) override;
  TierEvents Poll() override;
  void Wait() override;
  const ExtentFormat& format() const override {
    return state_.options.memory.has_value() ? *state_.options.memory : state_.format;
  }
  bool Holds(const PrefixHash& hash) const override;
  std::unique_ptr<HeldExtent> Hold(const PrefixHash& hash) override;
  std::unique_ptr<IoQueue> NewReadQueue() override { return state_.options.io->NewQueue(); }
  void ForgetDamaged(const PrefixHash& hash, absl::StatusCode why) override;
  std::vector<StoredBlock> Inventory() const override;
  uint64_t first_generation() const override { return first_generation_; }
  TierStats stats() const override;

 private:
  DiskTierState state_;
  uint64_t first_generation_ = 0;
  std::optional<DiskTierWriter> writer_;
  std::optional<DiskTierReader> reader_;
  std::thread writing_;
  std::thread reading_;
};

DiskTier::~DiskTier() {
  {
    MutexLock lock(state_.mu);
    state_.stop = true;
    state_.wake_writer.NotifyAll();
    state_.wake_reader.NotifyAll();
  }
  if (writing_.joinable()) writing_.join();
  if (reading_.joinable()) reading_.join();
}

absl::Status DiskTier::Start() {
  const DiskTierOptions& options = state_.options;
  KVASIR_ASSIGN_OR_RETURN(RecoveredExtents recovered,
                          RecoverExtents(options, state_.format, state_.segments));
  first_generation_ = recovered.first_generation;
  {
    MutexLock lock(state_.mu);
    state_.table = std::move(recovered.table);
    state_.stats.capacity_blocks = options.capacity_bytes / state_.format.extent_bytes();
    state_.stats.writable = true;
  }
  writer_.emplace(state_, std::move(recovered.manifest));
  reader_.emplace(state_);
  KVASIR_RETURN_IF_ERROR(writer_->TakeMemory());
  KVASIR_RETURN_IF_ERROR(reader_->TakeMemory());
  writing_ = std::thread([this] { writer_->Run(); });
  reading_ = std::thread([this] { reader_->Run(); });
  return absl::OkStatus();
}

void DiskTier::Write(std::vector<TierWrite> writes) {
  MutexLock lock(state_.mu);
  state_.under_way += static_cast<int64_t>(writes.size());
  std::move(writes.begin(), writes.end(), std::back_inserter(state_.writes));
  state_.wake_writer.NotifyAll();
}

void DiskTier::Read(std::vector<TierRead> reads) {
  MutexLock lock(state_.mu);
  state_.under_way += static_cast<int64_t>(reads.size());
  std::move(reads.begin(), reads.end(), std::back_inserter(state_.reads));
  state_.wake_reader.NotifyAll();
}

void DiskTier::Pin(absl::Span<const PrefixHash> blocks) {
  MutexLock lock(state_.mu);
  for (const PrefixHash& hash : blocks) state_.table.Pin(hash);
}

void DiskTier::Unpin(absl::Span<const PrefixHash> blocks) {
  MutexLock lock(state_.mu);
  for (const PrefixHash& hash : blocks) state_.table.Unpin(hash);
}

bool DiskTier::Erase(TierErase erase) {
  MutexLock lock(state_.mu);
  ++state_.under_way;
  state_.erases.push_back(std::move(erase));
  state_.wake_writer.NotifyAll();
  return true;
}

TierEvents DiskTier::Poll() {
  MutexLock lock(state_.mu);
  return std::exchange(state_.events, {});
}

void DiskTier::Wait() {
  MutexLock lock(state_.mu);
  while (state_.under_way > 0 && state_.events.completions.empty() &&
         state_.events.forgotten.empty() && state_.events.erased.empty()) {
    state_.happened.Wait(state_.mu);
  }
}

bool DiskTier::Holds(const PrefixHash& hash) const {
  MutexLock lock(state_.mu);
  return state_.table.Contains(hash);
}

std::unique_ptr<HeldExtent> DiskTier::Hold(const PrefixHash& hash) {
  std::optional<ExtentTable::Extent> extent;
  {
    MutexLock lock(state_.mu);
    extent = state_.table.Hold(hash);
    if (!extent.has_value()) return nullptr;
    state_.table.Touch(hash);
  }
  return std::make_unique<HeldDiskExtent>(state_, *extent,
                                          state_.segments.file(extent->place.segment));
}

void DiskTier::ForgetDamaged(const PrefixHash& hash, absl::StatusCode why) {
  MutexLock lock(state_.mu);
  ++(why == absl::StatusCode::kDataLoss ? state_.stats.checksum_failures
                                        : state_.stats.failed_reads);
  state_.Forget(hash);
}

std::vector<StoredBlock> DiskTier::Inventory() const {
  MutexLock lock(state_.mu);
  return state_.table.Inventory();
}

TierStats DiskTier::stats() const {
  MutexLock lock(state_.mu);
  TierStats stats = state_.stats;
  stats.blocks = state_.table.size();
  return stats;
}

}  // namespace

bool IsOpenElsewhere(const absl::Status& status) {
  return status.GetPayload(kOpenElsewhere).has_value();
}

absl::StatusOr<std::unique_ptr<Tier>> OpenDiskTier(DiskTierOptions options) {
  KVASIR_ASSIGN_OR_RETURN(const ExtentFormat format, ExtentFormat::Create(options.shard));
  std::optional<HeadExtent> part;
  if (options.memory.has_value()) {
    KVASIR_ASSIGN_OR_RETURN(part, HeadExtent::Create(*options.memory, HeadsOf(options.shard)));
    if (part->format().Fingerprint() != format.Fingerprint()) {
      return absl::InvalidArgumentError(absl::StrCat("disk tier: a store of ", format.Fingerprint(),
                                                     " for extents of ",
                                                     options.memory->Fingerprint()));
    }
  }
  if (options.capacity_bytes < format.extent_bytes()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "disk tier ", options.directory, ": a block needs ", format.extent_bytes(),
        " bytes, the capacity is ", options.capacity_bytes, "; raise kv_disk_size_gb"));
  }
  KVASIR_RETURN_IF_ERROR(options.io->MakeDirectory(options.directory));
  absl::StatusOr<std::unique_ptr<File>> lock = options.io->Lock(LockPath(options.directory));
  if (!lock.ok()) {
    absl::Status refused(lock.status().code(),
                         absl::StrCat("disk tier: ", lock.status().message(),
                                      "; kv_disk_path must be a folder that this user may write "
                                      "and that no other process has open"));
    if (absl::IsFailedPrecondition(refused)) refused.SetPayload(kOpenElsewhere, absl::Cord());
    return refused;
  }
  auto tier =
      std::make_unique<DiskTier>(std::move(options), format, std::move(part), *std::move(lock));
  const absl::Status started = tier->Start();
  if (absl::IsFailedPrecondition(started)) {
    return absl::FailedPreconditionError(
        absl::StrCat(started.message(), "; choose another kv_disk_path, or empty this one"));
  }
  KVASIR_RETURN_IF_ERROR(started);
  return tier;
}

}  // namespace kvasir::kvstore
