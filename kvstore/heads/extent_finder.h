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

class ExtentFinder {
 public:
  // The arguments outlive the finder. RESOURCE_EXHAUSTED when there is no memory.
  static absl::StatusOr<std::unique_ptr<ExtentFinder>> Create(FileIo& io,
                                                              const std::string& directory,
                                                              const ExtentFormat& format);

  // Returns the extents that were not found before. FAILED_PRECONDITION when one is of another
  // shard or version. Files that cannot be opened or read are left for the next time.
  absl::StatusOr<std::vector<FoundExtent>> Find();
  // Null when the segment is gone: its owner has evicted all of it.
  std::shared_ptr<File> file(uint64_t segment) const;

 private:
  struct Segment {
    std::shared_ptr<File> file;
    int64_t places = 0;          // that were looked at
    std::vector<int64_t> blank;  // of these, without a header: offsets
    bool is_over = false;        // nothing more is found in it
  };

  ExtentFinder(FileIo& io, const std::string& directory, const ExtentFormat& format,
               ExtentMemory headers);
  // Opens new segments, and forgets those that are gone.
  void List();
  absl::Status LookAt(uint64_t id, Segment& segment, std::vector<FoundExtent>& found);
  // Reads headers at these places of a segment, as many as there is memory for.
  absl::Status ReadHeaders(uint64_t id, Segment& segment, absl::Span<const int64_t> offsets,
                           std::vector<FoundExtent>& found);

  FileIo& io_;
  const std::string& directory_;
  const ExtentFormat& format_;
  ExtentMemory headers_;
  std::unique_ptr<IoQueue> queue_;
  std::map<uint64_t, Segment> segments_;
};

}  // namespace kvasir::kvstore
