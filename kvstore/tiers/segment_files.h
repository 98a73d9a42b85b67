// The segment files of the disk tier: places for extents of one size, given out in the order of
// writing and never written twice. Counts the space in use and gives it back. Called by the disk
// tier: Append only by its writing thread, the rest by any. Thread-safe.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "kernels/base/mutex.h"
#include "kvstore/format/page_format.h"
#include "kvstore/tiers/file_io.h"
#include "kvstore/tiers/manifest.h"

namespace kvasir::kvstore {

// In the order of writing.
struct Place {
  auto operator<=>(const Place&) const = default;

  uint64_t segment = 0;
  int64_t offset = 0;
};

// Returns the number of the segment that a file is called after; none: it is no segment.
std::optional<uint64_t> SegmentOfFile(absl::string_view name);

class SegmentFiles {
 public:
  SegmentFiles(FileIo& io, std::string directory, int64_t extent_bytes, int64_t segment_bytes);

  // --- while the store is opened

  // Opens the existing segments. One that cannot be opened is left alone.
  absl::Status Open();
  // Returns records made from the headers of all extents, with the latest generation of each block.
  // Used when there is no manifest. FAILED_PRECONDITION when an extent is of another shard or
  // version.
  absl::StatusOr<std::vector<ManifestRecord>> Scan(const ExtentFormat& format);
  bool empty() const;
  // Marks the place as used. False when there is no such place.
  bool Adopt(Place place);
  void RemoveUnused();

  // --- later

  // Writes the extents one after the other and makes them durable. After an error none of them is
  // in use, and the segment takes no more.
  absl::StatusOr<std::vector<Place>> Append(IoQueue& queue,
                                            absl::Span<const absl::Span<const std::byte>> extents);
  void Free(Place place);
  // Overwrites the places with zeros, durably; they stay in use.
  absl::Status Overwrite(IoQueue& queue, absl::Span<const Place> places);
  // Makes all places that are not among `used` read as zeros: those that were freed where the file
  // system has no holes, and those that a crash left without a record.
  absl::Status OverwriteAllBut(IoQueue& queue, const std::set<Place>& used);
  // Null when the segment is gone.
  std::shared_ptr<File> file(uint64_t segment) const;
  // Bytes that cannot be given to others.
  int64_t used_bytes() const;

 private:
  struct Segment {
    std::shared_ptr<File> file;
    int64_t end = 0;         // after the last place given out
    int64_t live = 0;        // places in use
    int64_t dead_bytes = 0;  // of places not in use whose space could not be given back
  };

  std::string Path(uint64_t segment) const;
  absl::Status StartSegment() EXCLUDES(mu_);
  absl::StatusOr<std::vector<Place>> GivePlaces(size_t count) EXCLUDES(mu_);
  // Adds places of the open segment until there are `count`, or it is full.
  void AddPlaces(size_t count, std::vector<Place>& places) EXCLUDES(mu_);
  absl::Status WriteDurably(IoQueue& queue, absl::Span<const Place> places,
                            absl::Span<const absl::Span<const std::byte>> extents);
  void StopWritingTo(uint64_t segment);

  FileIo& io_;
  const std::string directory_;
  const int64_t extent_bytes_;
  const int64_t segment_bytes_;

  mutable kernels::Mutex mu_;
  std::map<uint64_t, Segment> segments_ GUARDED_BY(mu_);
  uint64_t open_segment_ GUARDED_BY(mu_) = 0;  // segment that Append continues; 0: none
  uint64_t next_segment_ GUARDED_BY(mu_) = 1;  // higher than any before
  int64_t used_bytes_ GUARDED_BY(mu_) = 0;
};

}  // namespace kvasir::kvstore
