// The pages of lean blocks: blocks whose pages lie on disk only, while their digests are in memory.
// A bounded cache of single pages over the disk. A kernel that reads such a page waits until it is
// here; pages that a layer will read are asked for together, and while a layer computes, those that
// the last step read in the next layer. Every page is verified when it comes. It hides frames, the
// threads that read, and which guesses are worth their reads. The lean blocks (lean_blocks.h) say
// which pages exist.
//
//   engine   Want(layer 3) ──▶ queue ──▶ readers: io_uring, checksum ──▶ frame, ready
//   kernels  Bring(page) ──▶ ready: pinned and used;  not here: to the queue's front, waits
//
// Thread-safe where AbsentPages says so; all other functions belong to the engine's thread, when no
// kernel runs.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/mutex.h"
#include "kernels/paged/absent_pages.h"
#include "kvstore/format/page_format.h"
#include "kvstore/on_demand/frame_table.h"
#include "kvstore/tiers/page_residency.h"
#include "kvstore/tiers/tier.h"

namespace kvasir::kvstore {

// Counters since the start, except the first. Pages unless said otherwise.
struct PageCacheStats {
  int64_t frames = 0;  // pages that have room, now
  int64_t brought = 0;
  int64_t waited = 0;       // of those, pages that were not here yet
  double wait_seconds = 0;  // of all threads
  int64_t reads = 0;        // from disk, asked for or guessed
  int64_t read_bytes = 0;
  int64_t failed_reads = 0;  // wrong or not at all
  int64_t evictions = 0;
  // Guesses: pages that the last step read in the next layer.
  int64_t prefetches = 0;
  int64_t used_prefetches = 0;    // here before they were brought
  int64_t late_prefetches = 0;    // brought while they were read
  int64_t wasted_prefetches = 0;  // left before they were brought
};

// Waits of one sequence since its slot was last asked.
struct SlotWaits {
  int64_t pages = 0;
  double seconds = 0;
};

class PageCache final : public kernels::AbsentPages {
 public:
  struct Options {
    ExtentFormat format;
    int64_t first_extent = 0;  // of the lean blocks, in the tables
    int64_t num_blocks = 0;
    int64_t num_slots = 0;
    int64_t bytes = 0;    // of frames
    int num_threads = 1;  // that bring pages
  };

  // RESOURCE_EXHAUSTED when the frames are too few for the threads, or there is no memory. `below`
  // outlives the cache.
  static absl::StatusOr<std::unique_ptr<PageCache>> Create(const Options& options, Tier& below);
  ~PageCache() override;

  // Makes the pages of a lean block readable. `front` has its checksums. Both outlive Remove.
  void Add(int64_t block, const PrefixHash& hash, const HeldExtent& held, const std::byte* front);
  // Waits for reads of its pages.
  void Remove(int64_t block);

  std::byte* Bring(int64_t slot, int64_t page, kernels::PageUse use) override;
  bool Copy(int64_t slot, int64_t page, std::span<std::byte> to) override;
  void Want(int64_t layer, std::span<const int64_t> pages) override;

  // Ends the use of pages by the kernels of a step. Returns the lean blocks with a page that came
  // wrong or not at all, each once.
  std::vector<CorruptExtent> EndStep();
  SlotWaits TakeWaits(int64_t slot);
  PageCacheStats stats() const;
  // Every frame is free, or holds a page of a lean block; INTERNAL otherwise.
  absl::Status CheckIntegrity() const;

 private:
  // A lean block.
  struct Source {
    PrefixHash hash{};
    const HeldExtent* held = nullptr;  // null: there is no block
    const std::byte* front = nullptr;
    int64_t reading = 0;
    bool failed = false;  // and reported
  };
  struct Read {
    Frame* frame = nullptr;
    Source* source = nullptr;
    IoRequest request;
    absl::Status status = {};
  };

  PageCache(const Options& options, Tier& below, ExtentMemory memory, int64_t num_frames);

  Source& SourceOf(int64_t page) REQUIRES(mu_);
  int64_t PageInBlock(int64_t page) const { return (page - first_page_) % pages_per_block_; }
  void CountBrought(Frame& frame) REQUIRES(mu_);
  void Await(Frame& frame, int64_t slot) REQUIRES(mu_);
  // Returns the page's frame. If it has none, it gets one, as soon as one may be taken, and is
  // read.
  Frame& FrameOf(int64_t page) REQUIRES(mu_);
  void AskForGuesses(int64_t layer) REQUIRES(mu_);
  bool MayGuess() REQUIRES(mu_);

  void RunReader();
  std::vector<Read> NextReads() REQUIRES(mu_);
  // Begins the read of one more page of the queue that needs no frame that others wait for. False
  // when there is none.
  bool BeginOne(std::deque<int64_t>& pages, bool guessed, std::vector<Read>& reads) REQUIRES(mu_);
  Read MakeRead(Frame& frame) REQUIRES(mu_);
  absl::Status Verify(const Read& read) const;
  void EndRead(Read& read) REQUIRES(mu_);

  const ExtentFormat format_;
  const int64_t pages_per_block_;
  const int64_t first_page_;
  Tier& below_;

  mutable kernels::Mutex mu_;
  kernels::CondVar wake_;  // readers: there is something to read, or room
  kernels::CondVar done_;  // others: a read has ended, or a frame was let go
  FrameTable frames_ GUARDED_BY(mu_);
  std::vector<Source> sources_ GUARDED_BY(mu_);  // [block]
  std::deque<Frame*> urgent_ GUARDED_BY(mu_);    // somebody waits for these
  std::deque<int64_t> wanted_ GUARDED_BY(mu_);   // the rest of the last Want
  std::deque<int64_t> guessed_ GUARDED_BY(mu_);
  std::vector<std::vector<int64_t>> last_wanted_ GUARDED_BY(mu_);  // [layer]
  std::vector<SlotWaits> waits_ GUARDED_BY(mu_);                   // [slot]
  std::vector<CorruptExtent> corrupt_ GUARDED_BY(mu_);
  PageCacheStats stats_ GUARDED_BY(mu_);
  // Guesses that were judged already. When most of a number were wasted, guessing stops for a time.
  int64_t judged_used_ GUARDED_BY(mu_) = 0;
  int64_t judged_wasted_ GUARDED_BY(mu_) = 0;
  int64_t pause_ GUARDED_BY(mu_) = 0;  // Wants without a guess to come
  bool stop_ GUARDED_BY(mu_) = false;

  std::vector<std::thread> readers_;
};

}  // namespace kvasir::kvstore
