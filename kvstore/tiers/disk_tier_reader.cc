#include "kvstore/tiers/disk_tier_reader.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "spdlog/spdlog.h"

namespace kvasir::kvstore {
namespace {

using kernels::MutexLock;

// Reads of one round: enough to keep a disk busy, few enough to verify soon.
constexpr int64_t kLeastBatch = 8;
constexpr int64_t kMostBatch = 64;

}  // namespace

DiskTierReader::DiskTierReader(DiskTierState& state)
    : state_(state),
      batch_(std::clamp(state.options.group_bytes / state.format.extent_bytes(), kLeastBatch,
                        kMostBatch)),
      queue_(state.options.io->NewQueue()) {}

absl::Status DiskTierReader::TakeMemory() {
  if (!state_.part.has_value()) return absl::OkStatus();
  KVASIR_ASSIGN_OR_RETURN(read_, ExtentMemory::Allocate(batch_, state_.format.extent_bytes()));
  return absl::OkStatus();
}

void DiskTierReader::Run() {
  state_.mu.Lock();
  for (;;) {
    while (!state_.stop && state_.reads.empty()) state_.wake_reader.Wait(state_.mu);
    if (state_.stop) break;
    std::vector<TierRead> batch;
    while (!state_.reads.empty() && std::ssize(batch) < batch_) {
      batch.push_back(state_.reads.front());
      state_.reads.pop_front();
    }
    state_.mu.Unlock();
    ReadBatch(batch);
    state_.mu.Lock();
  }
  state_.mu.Unlock();
}

void DiskTierReader::ReadBatch(absl::Span<const TierRead> reads) {
  std::vector<const TierRead*> wanted;
  std::vector<ExtentTable::Extent> found;
  std::vector<std::shared_ptr<File>> files;
  std::vector<IoRequest> requests;
  {
    MutexLock lock(state_.mu);
    for (const TierRead& read : reads) {
      const std::optional<ExtentTable::Extent> extent = state_.table.BeginRead(read.hash);
      if (!extent.has_value()) {
        state_.Complete({.ticket = read.ticket,
                         .status = absl::NotFoundError("the block is not in the disk tier"),
                         .block = {}});
        continue;
      }
      wanted.push_back(&read);
      found.push_back(*extent);
    }
  }
  // The mutex of the segments is held over I/O. A block that is being read keeps its segment.
  for (size_t i = 0; i < found.size(); ++i) {
    files.push_back(state_.segments.file(found[i].place.segment));
    absl::Span<std::byte> memory = read_.has_value() ? (*read_)[i] : wanted[i]->extent;
    if (IsFront(*wanted[i])) {
      memory = memory.first(static_cast<size_t>(state_.format.pages_offset()));
    }
    requests.push_back({.op = IoRequest::Op::kRead,
                        .file = files.back().get(),
                        .offset = found[i].place.offset,
                        .memory = memory,
                        .result = 0});
  }
  const auto begin = state_.options.now();
  std::vector<absl::Status> statuses = RunMerged(*queue_, requests);
  for (size_t i = 0; i < found.size(); ++i) {
    FinishRead(*wanted[i], found[i], requests[i], std::move(statuses[i]));
  }
  MutexLock lock(state_.mu);
  state_.stats.read_seconds += state_.SecondsSince(begin);
}

bool DiskTierReader::IsFront(const TierRead& read) const {
  const ExtentFormat& format =
      state_.options.memory.has_value() ? *state_.options.memory : state_.format;
  return std::ssize(read.extent) < format.extent_bytes();
}

void DiskTierReader::FinishRead(const TierRead& read, const ExtentTable::Extent& found,
                                IoRequest request, absl::Status status) {
  status = ReadOne(found.block, request, std::move(status));
  BlockIdentity block = found.block;
  if (status.ok()) block.owner = ExtentFormat::OwnerOf(request.memory);  // manifests do not say it
  if (status.ok() && state_.part.has_value()) {
    if (IsFront(read)) {
      state_.part->ScatterFront(request.memory, read.extent);
    } else {
      state_.part->Scatter(request.memory, read.extent);
    }
  }
  MutexLock lock(state_.mu);
  // Another read of the block may have found it damaged.
  const bool is_here = state_.table.EndRead(found.block);
  if (status.ok()) {
    if (is_here) state_.table.Touch(read.hash);
    ++state_.stats.read_blocks;
    state_.stats.read_bytes += std::ssize(request.memory);
  } else {
    spdlog::error("disk tier {}: block forgotten: {}", state_.options.directory, status.ToString());
    if (is_here) state_.Forget(read.hash);
  }
  state_.Complete({.ticket = read.ticket, .status = std::move(status), .block = block});
}

absl::Status DiskTierReader::ReadOne(const BlockIdentity& block, IoRequest request,
                                     absl::Status status) {
  if (!status.ok()) {  // try again: some errors are temporary
    status = RunFully(*queue_, absl::MakeSpan(&request, 1))[0];
    MutexLock lock(state_.mu);
    ++state_.stats.failed_reads;
  }
  if (!status.ok()) {
    return absl::DataLossError(absl::StrCat("cannot be read: ", status.message()));
  }
  const bool is_whole = std::ssize(request.memory) == state_.format.extent_bytes();
  const absl::Status verified = is_whole ? state_.format.Verify(block, request.memory)
                                         : state_.format.VerifyFront(block, request.memory);
  if (verified.ok()) return verified;
  MutexLock lock(state_.mu);
  ++state_.stats.checksum_failures;
  return absl::DataLossError(verified.message());
}

}  // namespace kvasir::kvstore
