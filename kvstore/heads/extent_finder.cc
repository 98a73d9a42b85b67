#include "kvstore/heads/extent_finder.h"

#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace kvasir::kvstore {
namespace {

// Headers read together.
constexpr size_t kHeadersAtOnce = 64;

// Newest segments that the owner may still write to: a group begins in one and ends in the next.
constexpr int64_t kOpenSegments = 2;

}  // namespace

absl::StatusOr<std::unique_ptr<ExtentFinder>> ExtentFinder::Create(FileIo& io,
                                                                   const std::string& directory,
                                                                   const ExtentFormat& format) {
  KVASIR_ASSIGN_OR_RETURN(ExtentMemory headers,
                          ExtentMemory::Allocate(kHeadersAtOnce, kExtentHeaderBytes));
  return std::unique_ptr<ExtentFinder>(new ExtentFinder(io, directory, format, std::move(headers)));
}

ExtentFinder::ExtentFinder(FileIo& io, const std::string& directory, const ExtentFormat& format,
                           ExtentMemory headers)
    : io_(io),
      directory_(directory),
      format_(format),
      headers_(std::move(headers)),
      queue_(io.NewQueue()) {}

bool ExtentFinder::List() {
  const absl::StatusOr<std::vector<std::string>> names = io_.List(directory_);
  if (!names.ok()) return false;  // the owner has not made the folder yet, or it is being removed
  std::set<uint64_t> listed;
  for (const std::string& name : *names) {
    const std::optional<uint64_t> id = SegmentOfFile(name);
    if (!id.has_value()) continue;
    listed.insert(*id);
    if (segments_.contains(*id)) continue;
    absl::StatusOr<std::unique_ptr<File>> file =
        io_.Open(absl::StrCat(directory_, "/", name), FileIo::Mode::kExisting);
    if (file.ok()) segments_[*id].file = *std::move(file);
  }
  return std::erase_if(segments_,
                       [&](const auto& segment) { return !listed.contains(segment.first); }) > 0;
}

std::shared_ptr<File> ExtentFinder::file(uint64_t segment) const {
  const auto it = segments_.find(segment);
  return it == segments_.end() ? nullptr : it->second.file;
}

FoundExtents ExtentFinder::Find() {
  FoundExtents found;
  found.segments_gone = List();
  auto newer = std::ssize(segments_);
  for (auto& [id, segment] : segments_) {
    --newer;
    if (segment.is_over) continue;
    LookAt(id, segment, found);
    segment.failed_looks = segment.unread ? segment.failed_looks + 1 : 0;
    segment.is_over = newer >= kOpenSegments &&
                      (!segment.unread || segment.failed_looks >= kMostFailedLooks);
    if (segment.is_over) segment.blank.clear();
  }
  return found;
}

void ExtentFinder::LookAt(uint64_t id, Segment& segment, FoundExtents& found) {
  const absl::StatusOr<int64_t> size = io_.Size(*segment.file);
  segment.unread = !size.ok();
  if (!size.ok()) return;
  const int64_t extent_bytes = format_.extent_bytes();
  std::vector<int64_t> offsets = std::exchange(segment.blank, {});
  for (; (segment.places + 1) * extent_bytes <= *size; ++segment.places) {
    offsets.push_back(segment.places * extent_bytes);
  }
  for (size_t begin = 0; begin < offsets.size(); begin += kHeadersAtOnce) {
    const auto part = absl::MakeConstSpan(offsets).subspan(begin, kHeadersAtOnce);
    ReadHeaders(id, segment, part, found);
  }
}

void ExtentFinder::ReadHeaders(uint64_t id, Segment& segment, absl::Span<const int64_t> offsets,
                               FoundExtents& found) {
  std::vector<IoRequest> requests;
  for (size_t i = 0; i < offsets.size(); ++i) {
    requests.push_back({.op = IoRequest::Op::kRead,
                        .file = segment.file.get(),
                        .offset = offsets[i],
                        .memory = headers_[i],
                        .result = 0});
  }
  const std::vector<absl::Status> read = RunFully(*queue_, absl::MakeSpan(requests));
  for (size_t i = 0; i < offsets.size(); ++i) {
    if (!read[i].ok()) {
      segment.unread = true;
      if (segment.failed_looks + 1 < kMostFailedLooks) segment.blank.push_back(offsets[i]);
      continue;
    }
    const absl::StatusOr<BlockIdentity> block = format_.ReadHeader(headers_[i]);
    if (block.ok()) {
      found.extents.push_back({.block = *block, .place = {.segment = id, .offset = offsets[i]}});
    } else if (absl::IsFailedPrecondition(block.status())) {
      found.status.Update(block.status());
    } else {
      segment.blank.push_back(offsets[i]);
    }
  }
}

}  // namespace kvasir::kvstore
