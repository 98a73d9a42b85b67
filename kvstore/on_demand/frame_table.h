// Frames: places in memory for single pages of blocks that lie on disk, and the CLOCK that picks
// the page that leaves. It hides how a page is found, and which frames may not be taken: those in
// use by a thread, and, where others will do, those that were asked for and not read yet. Called by
// the page cache, under its mutex. Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"

#include "kernels/paged/absent_pages.h"
#include "kvstore/format/extent_memory.h"

namespace kvasir::kvstore {

struct Frame {
  enum class State : uint8_t { kFree, kReading, kReady, kFailed };

  State state = State::kFree;
  bool used = false;        // the page was brought since it is here
  bool recent = false;      // likewise, since the hand last passed
  bool prefetched = false;  // it is here for a guess, and was not used yet
  int64_t page = -1;
  int64_t pins = 0;
  uint64_t wanted = 0;           // number of the last Want that named it
  std::byte* memory = nullptr;   // of the frame, aligned to kExtentAlignment
  std::byte* address = nullptr;  // of the page in it
};

struct FrameCounts {
  int64_t evictions = 0;
  int64_t wasted_prefetches = 0;  // pages that left before they were used
};

class FrameTable {
 public:
  enum class Manner { kSparing, kAnyFrame };

  FrameTable(ExtentMemory memory, int64_t num_frames);

  // Returns the page's frame; null: it has none.
  Frame* Find(int64_t page);
  const Frame* Find(int64_t page) const;
  // Gives the page a frame, in state kReading. REQUIRES: it has none. Null when no frame may be
  // taken; kSparing leaves alone what the last Want named and nobody read.
  Frame* Take(int64_t page, Manner manner);
  // Frees the page's frame. REQUIRES: it has one, which is neither being read nor pinned.
  void Free(Frame& frame);
  // The same, and overwrites the page.
  void Wipe(Frame& frame);

  // Keeps the frame until the thread has pinned kPagesInUse others for the same use. Returns
  // whether another frame was let go.
  bool Pin(Frame& frame, kernels::PageUse use);
  // Lets all frames go. REQUIRES: no thread is using a page.
  void UnpinAll();

  void BeginWant() { ++want_; }
  void MarkWanted(Frame& frame) { frame.wanted = want_; }

  int64_t num_frames() const { return static_cast<int64_t>(frames_.size()); }
  int64_t num_pinned() const;
  const FrameCounts& counts() const { return counts_; }

 private:
  // The frames that one thread uses, oldest first from `next` on.
  struct Ring {
    std::vector<Frame*> frames;
    size_t next = 0;
  };
  struct Rings {
    Ring by_use[std::size(kernels::kPagesInUse)];
  };

  bool MayTake(const Frame& frame, Manner manner) const;
  Frame* FindVictim(Manner manner);

  const ExtentMemory memory_;
  std::vector<Frame> frames_;
  std::vector<Frame*> free_;
  absl::flat_hash_map<int64_t, Frame*> by_page_;
  absl::flat_hash_map<std::thread::id, Rings> rings_;
  size_t hand_ = 0;
  uint64_t want_ = 0;
  FrameCounts counts_;
};

}  // namespace kvasir::kvstore
