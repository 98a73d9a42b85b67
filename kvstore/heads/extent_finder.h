// Finds the extents in segment files that another process appends to, by their headers. It hides
// which places were looked at: those of the newest segments are looked at again until they have a
// header, since a group of extents is written in any order. Called by the followed store.
// Thread-compatible.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kvstore/format/extent_memory.h"
#include "kvstore/format/page_format.h"
#include "kvstore/tiers/file_io.h"
#include "kvstore/tiers/segment_files.h"

namespace kvasir::kvstore {

struct FoundExtent {
  BlockIdentity block;
  Place place;
};

struct FoundExtents {
  std::vector<FoundExtent> extents;  // that were not found before
  bool segments_gone = false;        // some since the last time
  // FAILED_PRECONDITION when an extent is of another shard or version; it hides no other.
  absl::Status status;
};

class ExtentFinder {
 public:
  static constexpr int64_t kMostFailedLooks = 64;

  // The arguments outlive the finder. RESOURCE_EXHAUSTED when there is no memory.
  static absl::StatusOr<std::unique_ptr<ExtentFinder>> Create(FileIo& io,
                                                              const std::string& directory,
                                                              const ExtentFormat& format);

  // Files and headers that cannot be opened or read are left for the next time; headers for
  // kMostFailedLooks times.
  FoundExtents Find();
  // Null when the segment is gone: its owner has evicted all of it.
  std::shared_ptr<File> file(uint64_t segment) const;

 private:
  struct Segment {
    std::shared_ptr<File> file;
    int64_t places = 0;          // that were looked at
    std::vector<int64_t> blank;  // of these, without a header: offsets
    bool unread = false;         // its size or a header could not be read the last time
    int64_t failed_looks = 0;    // how often in a row that was so
    bool is_over = false;        // nothing more is found in it
  };

  ExtentFinder(FileIo& io, const std::string& directory, const ExtentFormat& format,
               ExtentMemory headers);
  // Opens new segments, and forgets those that are gone. Returns whether some are.
  bool List();
  void LookAt(uint64_t id, Segment& segment, FoundExtents& found);
  // Reads headers at these places of a segment, as many as there is memory for.
  void ReadHeaders(uint64_t id, Segment& segment, absl::Span<const int64_t> offsets,
                   FoundExtents& found);

  FileIo& io_;
  const std::string& directory_;
  const ExtentFormat& format_;
  ExtentMemory headers_;
  std::unique_ptr<IoQueue> queue_;
  std::map<uint64_t, Segment> segments_;
};

}  // namespace kvasir::kvstore
