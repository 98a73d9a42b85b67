#include "kvstore/tiers/segment_files.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "spdlog/spdlog.h"

#include "kernels/base/status_macros.h"
#include "kvstore/format/extent_memory.h"

namespace kvasir::kvstore {
namespace {

using kernels::MutexLock;

constexpr char kSuffix[] = ".segment";

}  // namespace

std::optional<uint64_t> SegmentOfFile(absl::string_view name) {
  uint64_t segment = 0;
  const bool is_segment = absl::ConsumeSuffix(&name, kSuffix) && name.size() == 16 &&
                          absl::SimpleHexAtoi(name, &segment) && segment != 0;
  return is_segment ? std::optional<uint64_t>(segment) : std::nullopt;
}

SegmentFiles::SegmentFiles(FileIo& io, std::string directory, int64_t extent_bytes,
                           int64_t segment_bytes)
    : io_(io),
      directory_(std::move(directory)),
      extent_bytes_(extent_bytes),
      segment_bytes_(std::max(segment_bytes, extent_bytes)) {}

std::string SegmentFiles::Path(uint64_t segment) const {
  return absl::StrCat(directory_, "/", absl::Hex(segment, absl::kZeroPad16), kSuffix);
}

absl::Status SegmentFiles::Open() {
  KVASIR_ASSIGN_OR_RETURN(const std::vector<std::string> names, io_.List(directory_));
  MutexLock lock(mu_);
  for (const std::string& name : names) {
    const std::optional<uint64_t> named = SegmentOfFile(name);
    if (!named.has_value()) continue;
    const uint64_t id = *named;
    next_segment_ = std::max(next_segment_, id + 1);
    absl::StatusOr<std::unique_ptr<File>> file = io_.Open(Path(id), FileIo::Mode::kExisting);
    absl::StatusOr<int64_t> size = file.ok() ? io_.Size(**file) : file.status();
    if (!size.ok()) {
      spdlog::warn("disk tier: segment left out: {}", size.status().ToString());
      continue;
    }
    segments_[id] = {.file = *std::move(file),
                     .end = *size / extent_bytes_ * extent_bytes_,
                     .live = 0,
                     .dead_bytes = 0};
  }
  // Where the folder was emptied, those who still read its old files must not take new ones for
  // them.
  if (next_segment_ == 1) next_segment_ = static_cast<uint64_t>(absl::ToUnixMicros(absl::Now()));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<ManifestRecord>> SegmentFiles::Scan(const ExtentFormat& format) {
  KVASIR_ASSIGN_OR_RETURN(const ExtentMemory memory, ExtentMemory::Allocate(1, kExtentHeaderBytes));
  const absl::Span<std::byte> header = memory[0];
  const std::unique_ptr<IoQueue> queue = io_.NewQueue();
  absl::flat_hash_map<PrefixHash, ManifestRecord> latest;
  MutexLock lock(mu_);
  for (const auto& [id, segment] : segments_) {
    // Extents of another shard may be larger than our extents in its file.
    for (int64_t offset = 0; offset < std::max(segment.end, extent_bytes_);
         offset += extent_bytes_) {
      IoRequest request = {.op = IoRequest::Op::kRead,
                           .file = segment.file.get(),
                           .offset = offset,
                           .memory = header,
                           .result = 0};
      if (!RunFully(*queue, absl::MakeSpan(&request, 1))[0].ok()) continue;
      const absl::StatusOr<BlockIdentity> block = format.ReadHeader(header);
      if (absl::IsFailedPrecondition(block.status())) return block.status();
      if (!block.ok() || offset >= segment.end) continue;
      ManifestRecord& record = latest[block->hash];
      if (record.block.generation > block->generation) continue;
      record = {.block = *block, .segment = id, .offset = offset, .last_use = block->generation};
    }
  }
  std::vector<ManifestRecord> records;
  for (const auto& [hash, record] : latest) records.push_back(record);
  return records;
}

bool SegmentFiles::empty() const {
  MutexLock lock(mu_);
  return segments_.empty();
}

bool SegmentFiles::Adopt(Place place) {
  MutexLock lock(mu_);
  const auto it = segments_.find(place.segment);
  if (it == segments_.end() || place.offset < 0 || place.offset % extent_bytes_ != 0 ||
      place.offset + extent_bytes_ > it->second.end) {
    return false;
  }
  ++it->second.live;
  used_bytes_ += extent_bytes_;
  return true;
}

void SegmentFiles::RemoveUnused() {
  MutexLock lock(mu_);
  for (auto it = segments_.begin(); it != segments_.end();) {
    if (it->second.live > 0) {
      ++it;
      continue;
    }
    const absl::Status removed = io_.Remove(Path(it->first));
    if (!removed.ok()) spdlog::warn("disk tier: {}", removed.ToString());
    it = segments_.erase(it);
  }
}

absl::StatusOr<std::vector<Place>> SegmentFiles::Append(
    IoQueue& queue, absl::Span<const absl::Span<const std::byte>> extents) {
  KVASIR_ASSIGN_OR_RETURN(std::vector<Place> places, GivePlaces(extents.size()));
  const absl::Status written = WriteDurably(queue, places, extents);
  if (written.ok()) return places;
  // The result of a failed write or sync is unknown, and repeating the sync may return a wrong
  // answer.
  for (const Place& place : places) StopWritingTo(place.segment);
  for (const Place& place : places) Free(place);
  return written;
}

absl::StatusOr<std::vector<Place>> SegmentFiles::GivePlaces(size_t count) {
  std::vector<Place> places;
  for (;;) {
    AddPlaces(count, places);
    if (places.size() == count) return places;
    const absl::Status started = StartSegment();
    if (started.ok()) continue;
    for (const Place& place : places) Free(place);
    return started;
  }
}

void SegmentFiles::AddPlaces(size_t count, std::vector<Place>& places) {
  MutexLock lock(mu_);
  const auto open = segments_.find(open_segment_);
  if (open == segments_.end()) return;
  Segment& segment = open->second;
  while (places.size() < count && segment.end + extent_bytes_ <= segment_bytes_) {
    places.push_back({.segment = open_segment_, .offset = segment.end});
    segment.end += extent_bytes_;
    ++segment.live;
    used_bytes_ += extent_bytes_;
  }
}

// Without mu_ while the file system works: reads of other segments go on.
absl::Status SegmentFiles::StartSegment() {
  uint64_t id = 0;
  {
    MutexLock lock(mu_);
    id = next_segment_++;
  }
  KVASIR_ASSIGN_OR_RETURN(std::unique_ptr<File> file, io_.Open(Path(id), FileIo::Mode::kCreate));
  KVASIR_RETURN_IF_ERROR(io_.SyncDirectory(directory_));
  MutexLock lock(mu_);
  segments_[id].file = std::move(file);
  open_segment_ = id;
  return absl::OkStatus();
}

absl::Status SegmentFiles::WriteDurably(IoQueue& queue, absl::Span<const Place> places,
                                        absl::Span<const absl::Span<const std::byte>> extents) {
  std::vector<IoRequest> requests;
  std::set<std::shared_ptr<File>> files;
  for (size_t i = 0; i < places.size(); ++i) {
    const std::shared_ptr<File> segment = file(places[i].segment);
    files.insert(segment);
    // Requests have one kind of memory; a write only reads it.
    auto* const memory = const_cast<std::byte*>(extents[i].data());
    requests.push_back({.op = IoRequest::Op::kWrite,
                        .file = segment.get(),
                        .offset = places[i].offset,
                        .memory = {memory, extents[i].size()},
                        .result = 0});
  }
  for (const absl::Status& status : RunMerged(queue, requests)) {
    KVASIR_RETURN_IF_ERROR(status);
  }
  for (const std::shared_ptr<File>& segment : files) KVASIR_RETURN_IF_ERROR(io_.Sync(*segment));
  return absl::OkStatus();
}

absl::Status SegmentFiles::Overwrite(IoQueue& queue, absl::Span<const Place> places) {
  KVASIR_ASSIGN_OR_RETURN(const ExtentMemory memory, ExtentMemory::Allocate(1, extent_bytes_));
  std::memset(memory[0].data(), 0, memory[0].size());
  const std::vector<absl::Span<const std::byte>> zeros(places.size(), memory[0]);
  return WriteDurably(queue, places, zeros);
}

absl::Status SegmentFiles::OverwriteAllBut(IoQueue& queue, const std::set<Place>& used) {
  std::vector<Place> unused;
  {
    MutexLock lock(mu_);
    for (const auto& [id, segment] : segments_) {
      for (int64_t offset = 0; offset < segment.end; offset += extent_bytes_) {
        const Place place = {.segment = id, .offset = offset};
        if (used.contains(place) || io_.PunchHole(*segment.file, offset, extent_bytes_).ok()) {
          continue;
        }
        unused.push_back(place);
      }
    }
  }
  return Overwrite(queue, unused);
}

void SegmentFiles::StopWritingTo(uint64_t segment) {
  MutexLock lock(mu_);
  if (open_segment_ == segment) open_segment_ = 0;
}

void SegmentFiles::Free(Place place) {
  std::shared_ptr<File> segment_file;
  bool unused = false;
  {
    MutexLock lock(mu_);
    Segment& segment = segments_.at(place.segment);
    segment_file = segment.file;
    --segment.live;
    used_bytes_ -= extent_bytes_;
    // The open segment is removed only when it holds space back.
    unused = segment.live == 0 && (place.segment != open_segment_ || segment.dead_bytes > 0);
    if (unused) {
      if (open_segment_ == place.segment) open_segment_ = 0;
      used_bytes_ -= segment.dead_bytes;
      segments_.erase(place.segment);
    }
  }
  if (unused) {
    const absl::Status removed = io_.Remove(Path(place.segment));
    if (!removed.ok()) spdlog::warn("disk tier: {}", removed.ToString());
  } else if (!io_.PunchHole(*segment_file, place.offset, extent_bytes_).ok()) {
    MutexLock lock(mu_);
    const auto it = segments_.find(place.segment);
    if (it == segments_.end()) return;
    it->second.dead_bytes += extent_bytes_;
    used_bytes_ += extent_bytes_;
  }
}

std::shared_ptr<File> SegmentFiles::file(uint64_t segment) const {
  MutexLock lock(mu_);
  const auto it = segments_.find(segment);
  return it == segments_.end() ? nullptr : it->second.file;
}

int64_t SegmentFiles::used_bytes() const {
  MutexLock lock(mu_);
  return used_bytes_;
}

}  // namespace kvasir::kvstore
