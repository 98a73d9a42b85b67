#include "kvstore/on_demand/page_cache.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "spdlog/spdlog.h"

#include "kernels/base/status_macros.h"

namespace kvasir::kvstore {
namespace {

using kernels::MutexLock;
using kernels::PageUse;
using Clock = std::chrono::steady_clock;

// One reads while the other verifies.
constexpr int kReaders = 2;
// Reads of one round: enough to keep a disk busy, few enough for an urgent one to come soon.
constexpr size_t kMostReads = 32;
// Guesses are judged by as many outcomes, and stop for as many layers.
constexpr int64_t kJudgedGuesses = 512;
constexpr int64_t kGuessPause = 1024;

// Returns the bytes of a frame, which hold a page wherever it lies in the disk's units.
int64_t FrameBytes(int64_t page_bytes) {
  const int64_t units = (page_bytes + kExtentAlignment - 1) / kExtentAlignment;
  return (units + (page_bytes % kExtentAlignment == 0 ? 0 : 1)) * kExtentAlignment;
}

}  // namespace

absl::StatusOr<std::unique_ptr<PageCache>> PageCache::Create(const Options& options, Tier& below) {
  const int64_t frame_bytes = FrameBytes(options.format.shard().layout.page_bytes());
  int64_t least = 0;
  for (const int64_t in_use : kernels::kPagesInUse) least += in_use * options.num_threads;
  const int64_t num_frames = options.bytes / frame_bytes;
  if (num_frames <= least) {
    return absl::ResourceExhaustedError(
        absl::StrCat("page cache: ", options.num_threads, " threads need more than ", least,
                     " pages, ", least * frame_bytes, " bytes; half of the host tier has ",
                     options.bytes, "; raise kv_host_size_gb"));
  }
  KVASIR_ASSIGN_OR_RETURN(ExtentMemory memory, ExtentMemory::Allocate(num_frames, frame_bytes));
  return std::unique_ptr<PageCache>(new PageCache(options, below, std::move(memory), num_frames));
}

PageCache::PageCache(const Options& options, Tier& below, ExtentMemory memory, int64_t num_frames)
    : format_(options.format),
      pages_per_block_(format_.shard().layout.pages_per_block()),
      first_page_(options.first_extent * pages_per_block_),
      below_(below),
      frames_(std::move(memory), num_frames),
      sources_(static_cast<size_t>(options.num_blocks)),
      last_wanted_(static_cast<size_t>(format_.shard().layout.num_layers)),
      waits_(static_cast<size_t>(options.num_slots)) {
  for (int i = 0; i < kReaders; ++i) readers_.emplace_back([this] { RunReader(); });
}

PageCache::~PageCache() {
  {
    MutexLock lock(mu_);
    stop_ = true;
    wake_.NotifyAll();
  }
  for (std::thread& reader : readers_) reader.join();
}

// ---- blocks

void PageCache::Add(int64_t block, const PrefixHash& hash, const HeldExtent& held,
                    const std::byte* front) {
  MutexLock lock(mu_);
  sources_[static_cast<size_t>(block)] = {.hash = hash, .held = &held, .front = front};
}

void PageCache::Remove(int64_t block) {
  MutexLock lock(mu_);
  frames_.UnpinAll();
  Source& source = sources_[static_cast<size_t>(block)];
  source.held = nullptr;  // reads that wait are given up
  while (source.reading > 0) done_.Wait(mu_);
  const int64_t first = first_page_ + block * pages_per_block_;
  for (int64_t page = first; page < first + pages_per_block_; ++page) {
    if (Frame* const frame = frames_.Find(page)) frames_.Wipe(*frame);
  }
  source = {};
}

PageCache::Source& PageCache::SourceOf(int64_t page) {
  return sources_[static_cast<size_t>((page - first_page_) / pages_per_block_)];
}

// ---- kernels

std::byte* PageCache::Bring(int64_t slot, int64_t page, PageUse use) {
  if (page < first_page_) return nullptr;  // absent, and of no lean block
  MutexLock lock(mu_);
  if (SourceOf(page).held == nullptr) return nullptr;
  Frame& frame = FrameOf(page);
  CountBrought(frame);
  const bool let_go = frames_.Pin(frame, use);
  if (let_go) done_.NotifyAll();
  if (!wanted_.empty()) wake_.NotifyOne();  // a page that was read makes room
  if (frame.state == Frame::State::kReading) Await(frame, slot);
  return frame.state == Frame::State::kReady ? frame.address : nullptr;
}

// Nothing is pinned: while the lock is given up, the frame may become another page's.
bool PageCache::Copy(int64_t slot, int64_t page, std::span<std::byte> to) {
  if (page < first_page_) return false;
  MutexLock lock(mu_);
  for (bool first = true; SourceOf(page).held != nullptr; first = false) {
    Frame& frame = FrameOf(page);
    if (first) CountBrought(frame);
    if (!wanted_.empty()) wake_.NotifyOne();  // a page that was read makes room
    if (frame.state == Frame::State::kReading) {
      Await(frame, slot);
      continue;
    }
    frame.used = frame.recent = true;
    if (frame.state != Frame::State::kReady) return false;
    std::memcpy(to.data(), frame.address, to.size());
    return true;
  }
  return false;
}

void PageCache::CountBrought(Frame& frame) {
  ++stats_.brought;
  if (!std::exchange(frame.prefetched, false)) return;
  ++(frame.state == Frame::State::kReading ? stats_.late_prefetches : stats_.used_prefetches);
}

Frame& PageCache::FrameOf(int64_t page) {
  for (;;) {
    if (Frame* const there = frames_.Find(page)) return *there;
    Frame* frame = frames_.Take(page, FrameTable::Manner::kSparing);
    if (frame == nullptr) frame = frames_.Take(page, FrameTable::Manner::kAnyFrame);
    if (frame != nullptr) {
      ++SourceOf(page).reading;
      urgent_.push_back(frame);
      wake_.NotifyOne();
      return *frame;
    }
    done_.Wait(mu_);
  }
}

void PageCache::Await(Frame& frame, int64_t slot) {
  const Clock::time_point begin = Clock::now();
  const int64_t page = frame.page;  // a frame that is not pinned may become another page's
  while (frame.page == page && frame.state == Frame::State::kReading) done_.Wait(mu_);
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  ++stats_.waited;
  stats_.wait_seconds += seconds;
  SlotWaits& waits = waits_[static_cast<size_t>(slot)];
  ++waits.pages;
  waits.seconds += seconds;
}

void PageCache::Want(int64_t layer, std::span<const int64_t> pages) {
  MutexLock lock(mu_);
  frames_.UnpinAll();
  frames_.BeginWant();
  wanted_.clear();
  guessed_.clear();
  for (const int64_t page : pages) {
    if (Frame* const frame = frames_.Find(page)) {
      frame->used = false;
      frames_.MarkWanted(*frame);
    } else {
      wanted_.push_back(page);
    }
  }
  last_wanted_[static_cast<size_t>(layer)].assign(pages.begin(), pages.end());
  AskForGuesses(layer);
  wake_.NotifyAll();
}

void PageCache::AskForGuesses(int64_t layer) {
  if (!MayGuess()) return;
  const auto next = static_cast<size_t>(layer + 1) % last_wanted_.size();
  for (const int64_t page : last_wanted_[next]) {
    if (SourceOf(page).held != nullptr && frames_.Find(page) == nullptr) guessed_.push_back(page);
  }
}

bool PageCache::MayGuess() {
  if (pause_ > 0) {
    --pause_;
    return false;
  }
  const int64_t used = stats_.used_prefetches + stats_.late_prefetches - judged_used_;
  const int64_t wasted = frames_.counts().wasted_prefetches - judged_wasted_;
  if (used + wasted < kJudgedGuesses) return true;
  judged_used_ += used;
  judged_wasted_ += wasted;
  pause_ = wasted > used ? kGuessPause : 0;
  return pause_ == 0;
}

std::vector<CorruptExtent> PageCache::EndStep() {
  std::vector<CorruptExtent> corrupt;
  {
    MutexLock lock(mu_);
    frames_.UnpinAll();
    corrupt = std::exchange(corrupt_, {});
  }
  return corrupt;
}

SlotWaits PageCache::TakeWaits(int64_t slot) {
  MutexLock lock(mu_);
  return std::exchange(waits_[static_cast<size_t>(slot)], {});
}

// ---- readers

void PageCache::RunReader() {
  const std::unique_ptr<IoQueue> queue = below_.NewReadQueue();
  mu_.Lock();
  while (!stop_) {
    std::vector<Read> reads = NextReads();
    if (reads.empty()) {
      wake_.Wait(mu_);
      continue;
    }
    mu_.Unlock();
    std::vector<IoRequest> requests;
    for (const Read& read : reads) requests.push_back(read.request);
    const std::vector<absl::Status> statuses = RunFully(*queue, absl::MakeSpan(requests));
    for (size_t i = 0; i < reads.size(); ++i) {
      reads[i].status = statuses[i].ok() ? Verify(reads[i]) : statuses[i];
    }
    mu_.Lock();
    for (Read& read : reads) EndRead(read);
    done_.NotifyAll();
  }
  mu_.Unlock();
}

std::vector<PageCache::Read> PageCache::NextReads() {
  std::vector<Read> reads;
  for (; reads.size() < kMostReads && !urgent_.empty(); urgent_.pop_front()) {
    reads.push_back(MakeRead(*urgent_.front()));
  }
  while (reads.size() < kMostReads && BeginOne(wanted_, /*guessed=*/false, reads)) continue;
  while (reads.size() < kMostReads && BeginOne(guessed_, /*guessed=*/true, reads)) continue;
  return reads;
}

bool PageCache::BeginOne(std::deque<int64_t>& pages, bool guessed, std::vector<Read>& reads) {
  while (!pages.empty()) {
    const int64_t page = pages.front();
    Frame* frame = frames_.Find(page);
    if (frame != nullptr && !guessed) frames_.MarkWanted(*frame);
    if (frame != nullptr || SourceOf(page).held == nullptr) {
      pages.pop_front();
      continue;
    }
    frame = frames_.Take(page, FrameTable::Manner::kSparing);
    if (frame == nullptr) return false;
    pages.pop_front();
    frame->prefetched = guessed;
    stats_.prefetches += guessed ? 1 : 0;
    if (!guessed) frames_.MarkWanted(*frame);
    ++SourceOf(page).reading;
    reads.push_back(MakeRead(*frame));
    return true;
  }
  return false;
}

PageCache::Read PageCache::MakeRead(Frame& frame) {
  Source& source = SourceOf(frame.page);
  const HeldExtent::Place place = source.held->Find(PageInBlock(frame.page));
  const int64_t page_bytes = format_.shard().layout.page_bytes();
  const int64_t begin = place.offset / kExtentAlignment * kExtentAlignment;
  const int64_t end =
      (place.offset + page_bytes + kExtentAlignment - 1) / kExtentAlignment * kExtentAlignment;
  frame.address = frame.memory + (place.offset - begin);
  return {.frame = &frame,
          .source = &source,
          .request = {.op = IoRequest::Op::kRead,
                      .file = place.file,
                      .offset = begin,
                      .memory = {frame.memory, static_cast<size_t>(end - begin)},
                      .result = 0}};
}

// The source does not change while it is read.
absl::Status PageCache::Verify(const Read& read) const {
  const int64_t page = PageInBlock(read.frame->page);
  uint64_t expected = 0;
  std::memcpy(&expected,
              read.source->front + format_.checksums_offset() +
                  page * static_cast<int64_t>(sizeof(expected)),
              sizeof(expected));
  const PageIdentity identity = format_.identity(read.source->hash, page);
  const uint64_t found = PageChecksum(
      identity, {read.frame->address, static_cast<size_t>(format_.shard().layout.page_bytes())});
  if (found == expected) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("checksum of the page on disk is ", absl::Hex(found),
                                          ", sealed as ", absl::Hex(expected)));
}

void PageCache::EndRead(Read& read) {
  --read.source->reading;
  ++stats_.reads;
  stats_.read_bytes += std::ssize(read.request.memory);
  read.frame->state = read.status.ok() ? Frame::State::kReady : Frame::State::kFailed;
  if (read.status.ok()) return;
  ++stats_.failed_reads;
  if (std::exchange(read.source->failed, true)) return;
  const PageIdentity identity = format_.identity(read.source->hash, PageInBlock(read.frame->page));
  corrupt_.push_back(
      {.extent = read.frame->page / pages_per_block_,
       .status = absl::Status(
           read.status.code(),
           absl::StrCat("layer ", identity.layer, ", KV head ", identity.head, ": ",
                        read.status.message(), "; the disk of this machine may be failing"))});
  spdlog::error("page cache: {}", corrupt_.back().status.ToString());
}

// ---- accounting

PageCacheStats PageCache::stats() const {
  MutexLock lock(mu_);
  PageCacheStats stats = stats_;
  stats.frames = frames_.num_frames();
  stats.evictions = frames_.counts().evictions;
  stats.wasted_prefetches = frames_.counts().wasted_prefetches;
  return stats;
}

absl::Status PageCache::CheckIntegrity() const {
  MutexLock lock(mu_);
  for (size_t block = 0; block < sources_.size(); ++block) {
    if (sources_[block].held != nullptr) continue;
    const int64_t first = first_page_ + static_cast<int64_t>(block) * pages_per_block_;
    for (int64_t page = first; page < first + pages_per_block_; ++page) {
      if (frames_.Find(page) == nullptr) continue;
      return absl::InternalError(
          absl::StrCat("page cache: page ", page, " has a frame and no block"));
    }
  }
  return absl::OkStatus();
}

}  // namespace kvasir::kvstore
