#include "kvstore/heads/followed_store.h"

#include <algorithm>
#include <deque>
#include <iterator>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "spdlog/spdlog.h"

#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "kvstore/heads/extent_finder.h"

namespace kvasir::kvstore {
namespace {

using Clock = std::chrono::steady_clock;
using kernels::MutexLock;

class FollowedStore : public Tier {
 public:
  FollowedStore(FollowedStoreOptions options, const ExtentFormat& format)
      : options_(std::move(options)),
        format_(format),
        segments_(absl::StrCat(options_.directory, "/segments")),
        queue_(options_.io->NewQueue()) {}
  ~FollowedStore() override;

  // Finds what is stored, and starts the thread.
  absl::Status Start();

  void Write(std::vector<TierWrite> writes) override;
  void Read(std::vector<TierRead> reads) override;
  bool Erase(TierErase erase) override;
  TierEvents Poll() override;
  void Wait() override;
  bool ExpectsBlocks() const override;
  const ExtentFormat& format() const override { return format_; }
  bool Holds(const PrefixHash& hash) const override;
  std::vector<StoredBlock> Inventory() const override;
  uint64_t first_generation() const override { return first_generation_; }
  TierStats stats() const override;

 private:
  void Run();
  absl::Status Look() EXCLUDES(mu_);
  // Looks; an extent that is refused is a line in the log.
  void LookAgain() EXCLUDES(mu_);
  // Forgets the extents whose segments are gone.
  void ForgetGone() REQUIRES(mu_);
  void Add(const FoundExtent& extent) REQUIRES(mu_);
  void GiveUpExpecting(Clock::time_point now) REQUIRES(mu_);
  void ReadBlock(const TierRead& read) EXCLUDES(mu_);
  std::optional<FoundExtent> Find(const PrefixHash& hash) const EXCLUDES(mu_);
  absl::Status ReadExtent(const FoundExtent& extent, absl::Span<std::byte> memory);
  // Forgets the extent, unless a newer one of the block has been found.
  void Forget(const FoundExtent& extent) EXCLUDES(mu_);

  const FollowedStoreOptions options_;
  const ExtentFormat format_;
  const std::string segments_;
  uint64_t first_generation_ = 0;
  const std::unique_ptr<IoQueue> queue_;  // of the thread
  std::unique_ptr<ExtentFinder> finder_;  // of the thread, after Start

  mutable kernels::Mutex mu_;
  kernels::CondVar wake_;
  kernels::CondVar happened_;
  absl::flat_hash_map<PrefixHash, FoundExtent> table_ GUARDED_BY(mu_);
  absl::flat_hash_map<PrefixHash, Clock::time_point> expected_ GUARDED_BY(mu_);  // until when
  std::deque<TierRead> reads_ GUARDED_BY(mu_);
  int64_t under_way_ GUARDED_BY(mu_) = 0;  // reads without a completion
  TierEvents events_ GUARDED_BY(mu_);
  TierStats stats_ GUARDED_BY(mu_);
  bool stop_ GUARDED_BY(mu_) = false;

  std::thread thread_;
};

FollowedStore::~FollowedStore() {
  {
    MutexLock lock(mu_);
    stop_ = true;
    wake_.NotifyAll();
  }
  if (thread_.joinable()) thread_.join();
}

absl::Status FollowedStore::Start() {
  KVASIR_ASSIGN_OR_RETURN(finder_, ExtentFinder::Create(*options_.io, segments_, format_));
  KVASIR_RETURN_IF_ERROR(Look());
  {
    MutexLock lock(mu_);
    events_ = {};  // what is there at the start is the inventory
    for (const auto& [hash, extent] : table_) {
      const uint64_t next_epoch = (extent.block.generation >> 32) + 1;
      first_generation_ = std::max(first_generation_, next_epoch << 32);
    }
  }
  thread_ = std::thread([this] { Run(); });
  return absl::OkStatus();
}

void FollowedStore::Write(std::vector<TierWrite> writes) {
  MutexLock lock(mu_);
  for (const TierWrite& write : writes) {
    absl::Status status;
    if (!table_.contains(write.block.hash)) {
      expected_[write.block.hash] = Clock::now() + options_.patience;
      status = absl::UnavailableError("another process writes the store");
    }
    events_.completions.push_back({.ticket = write.ticket, .status = status, .block = {}});
  }
  wake_.NotifyAll();
}

void FollowedStore::Read(std::vector<TierRead> reads) {
  MutexLock lock(mu_);
  under_way_ += std::ssize(reads);
  std::move(reads.begin(), reads.end(), std::back_inserter(reads_));
  wake_.NotifyAll();
}

// The owner of the store overwrites them.
bool FollowedStore::Erase(TierErase erase) {
  MutexLock lock(mu_);
  absl::erase_if(table_, [&](const auto& entry) {
    if (!erase.Covers(entry.second.block)) return false;
    events_.forgotten.push_back(entry.first);
    return true;
  });
  events_.erased.push_back({.ticket = erase.ticket, .status = {}});
  happened_.NotifyAll();
  return true;
}

TierEvents FollowedStore::Poll() {
  MutexLock lock(mu_);
  return std::exchange(events_, {});
}

void FollowedStore::Wait() {
  MutexLock lock(mu_);
  while ((under_way_ > 0 || !expected_.empty()) && events_.completions.empty() &&
         events_.forgotten.empty() && events_.found.empty() && events_.erased.empty()) {
    happened_.Wait(mu_);
  }
}

bool FollowedStore::ExpectsBlocks() const {
  MutexLock lock(mu_);
  return !expected_.empty();
}

bool FollowedStore::Holds(const PrefixHash& hash) const {
  MutexLock lock(mu_);
  return table_.contains(hash);
}

std::vector<StoredBlock> FollowedStore::Inventory() const {
  MutexLock lock(mu_);
  std::vector<StoredBlock> blocks;
  for (const auto& [hash, extent] : table_) {
    blocks.push_back({.hash = hash, .tokens = extent.block.tokens});
  }
  return blocks;
}

TierStats FollowedStore::stats() const {
  MutexLock lock(mu_);
  TierStats stats = stats_;
  stats.capacity_blocks = options_.capacity_bytes / format_.extent_bytes();
  // Some may be evicted, which only the owner knows.
  stats.blocks = std::min(static_cast<int64_t>(table_.size()), stats.capacity_blocks);
  stats.writable = true;  // it has no writes that could fail
  return stats;
}

void FollowedStore::Run() {
  mu_.Lock();
  Clock::time_point next_look = Clock::now();
  while (!stop_) {
    if (!reads_.empty()) {
      const TierRead read = reads_.front();
      reads_.pop_front();
      mu_.Unlock();
      ReadBlock(read);
      mu_.Lock();
    } else if (expected_.empty()) {
      wake_.Wait(mu_);
    } else if (Clock::now() < next_look) {
      wake_.WaitUntil(mu_, next_look);
    } else {
      mu_.Unlock();
      LookAgain();
      mu_.Lock();
      next_look = Clock::now() + options_.look_every;
      GiveUpExpecting(Clock::now());
    }
  }
  mu_.Unlock();
}

void FollowedStore::GiveUpExpecting(Clock::time_point now) {
  absl::erase_if(expected_, [&](const auto& entry) { return entry.second <= now; });
  happened_.NotifyAll();
}

absl::Status FollowedStore::Look() {
  const FoundExtents found = finder_->Find();
  MutexLock lock(mu_);
  if (found.segments_gone) ForgetGone();
  for (const FoundExtent& extent : found.extents) Add(extent);
  happened_.NotifyAll();
  return found.status;
}

void FollowedStore::LookAgain() {
  const absl::Status looked = Look();
  if (!looked.ok()) spdlog::warn("disk tier {}: {}", options_.directory, looked.ToString());
}

void FollowedStore::ForgetGone() {
  absl::erase_if(table_, [&](const auto& entry) {
    if (finder_->file(entry.second.place.segment) != nullptr) return false;
    events_.forgotten.push_back(entry.first);
    return true;
  });
}

void FollowedStore::Add(const FoundExtent& extent) {
  const auto [it, is_new] = table_.try_emplace(extent.block.hash, extent);
  // A place is used once, so a later one is newer, whatever the generations say.
  if (!is_new && it->second.place < extent.place) it->second = extent;
  expected_.erase(extent.block.hash);
  if (is_new) {
    events_.found.push_back({.hash = extent.block.hash, .tokens = extent.block.tokens});
  }
}

std::optional<FoundExtent> FollowedStore::Find(const PrefixHash& hash) const {
  MutexLock lock(mu_);
  const auto it = table_.find(hash);
  return it == table_.end() ? std::nullopt : std::optional<FoundExtent>(it->second);
}

void FollowedStore::ReadBlock(const TierRead& read) {
  const auto begin = Clock::now();
  absl::Status status = absl::NotFoundError("the block is not in the followed store");
  BlockIdentity block;
  // The owner may have evicted the block and written it again elsewhere: then it is found there.
  for (int tries = 0; tries < 2 && !status.ok(); ++tries) {
    const std::optional<FoundExtent> extent = Find(read.hash);
    if (!extent.has_value()) break;
    block = extent->block;
    status = ReadExtent(*extent, read.extent);
    if (status.ok()) break;
    Forget(*extent);
    LookAgain();
  }
  MutexLock lock(mu_);
  stats_.read_seconds += std::chrono::duration<double>(Clock::now() - begin).count();
  stats_.read_blocks += status.ok() ? 1 : 0;
  stats_.read_bytes += status.ok() ? format_.extent_bytes() : 0;
  events_.completions.push_back({.ticket = read.ticket, .status = status, .block = block});
  --under_way_;
  happened_.NotifyAll();
}

absl::Status FollowedStore::ReadExtent(const FoundExtent& extent, absl::Span<std::byte> memory) {
  const std::shared_ptr<File> file = finder_->file(extent.place.segment);
  if (file == nullptr) return absl::NotFoundError("the owner has evicted the block");
  IoRequest request = {.op = IoRequest::Op::kRead,
                       .file = file.get(),
                       .offset = extent.place.offset,
                       .memory = memory,
                       .result = 0};
  absl::Status read = RunFully(*queue_, absl::MakeSpan(&request, 1))[0];
  if (!read.ok()) {  // try again: some errors are temporary
    read = RunFully(*queue_, absl::MakeSpan(&request, 1))[0];
    MutexLock lock(mu_);
    ++stats_.failed_reads;
  }
  if (!read.ok()) return absl::DataLossError(absl::StrCat("cannot be read: ", read.message()));
  if (!ExtentFormat::HasHeader(memory)) {
    return absl::NotFoundError("the owner has evicted the block");
  }
  const absl::Status verified = format_.Verify(extent.block, memory);
  if (verified.ok()) return verified;
  MutexLock lock(mu_);
  ++stats_.checksum_failures;
  return absl::DataLossError(verified.message());
}

void FollowedStore::Forget(const FoundExtent& extent) {
  MutexLock lock(mu_);
  const auto it = table_.find(extent.block.hash);
  if (it == table_.end() || it->second.place != extent.place) return;
  table_.erase(it);
  events_.forgotten.push_back(extent.block.hash);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tier>> FollowStore(FollowedStoreOptions options) {
  KVASIR_ASSIGN_OR_RETURN(const ExtentFormat format, ExtentFormat::Create(options.shard));
  auto store = std::make_unique<FollowedStore>(std::move(options), format);
  const absl::Status started = store->Start();
  if (absl::IsFailedPrecondition(started)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "disk tier: ", started.message(), "; choose another kv_disk_path, or empty this one"));
  }
  KVASIR_RETURN_IF_ERROR(started);
  return store;
}

}  // namespace kvasir::kvstore
