#include "kvstore/on_demand/frame_table.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/base/status_macros.h"

namespace kvasir::kvstore {

FrameTable::FrameTable(ExtentMemory memory, int64_t num_frames)
    : memory_(std::move(memory)), frames_(static_cast<size_t>(num_frames)) {
  for (size_t i = frames_.size(); i-- > 0;) {
    frames_[i].memory = memory_[i].data();
    free_.push_back(&frames_[i]);
  }
}

Frame* FrameTable::Find(int64_t page) {
  const auto it = by_page_.find(page);
  return it == by_page_.end() ? nullptr : it->second;
}

const Frame* FrameTable::Find(int64_t page) const {
  const auto it = by_page_.find(page);
  return it == by_page_.end() ? nullptr : it->second;
}

Frame* FrameTable::Take(int64_t page, Manner manner) {
  if (free_.empty()) {
    Frame* const victim = FindVictim(manner);
    if (victim == nullptr) return nullptr;
    ++counts_.evictions;
    Free(*victim);
  }
  Frame* const frame = free_.back();
  free_.pop_back();
  frame->state = Frame::State::kReading;
  frame->page = page;
  by_page_[page] = frame;
  return frame;
}

void FrameTable::Free(Frame& frame) {
  KVASIR_CHECK(frame.pins == 0 && frame.state != Frame::State::kReading);
  counts_.wasted_prefetches += frame.prefetched ? 1 : 0;
  by_page_.erase(frame.page);
  frame = {.memory = frame.memory};
  free_.push_back(&frame);
}

bool FrameTable::MayTake(const Frame& frame, Manner manner) const {
  if (frame.pins > 0 || frame.state == Frame::State::kReading) return false;
  const bool is_awaited = frame.wanted == want_ && !frame.used;
  return manner == Manner::kAnyFrame || !is_awaited;
}

// A page that was brought since the hand last passed stays once more.
Frame* FrameTable::FindVictim(Manner manner) {
  for (size_t i = 0; i < 2 * frames_.size(); ++i) {
    Frame& frame = frames_[hand_];
    hand_ = (hand_ + 1) % frames_.size();
    if (MayTake(frame, manner) && !std::exchange(frame.recent, false)) return &frame;
  }
  return nullptr;
}

bool FrameTable::Pin(Frame& frame, kernels::PageUse use) {
  const auto i = static_cast<size_t>(use);
  const auto in_use = static_cast<size_t>(kernels::kPagesInUse[i]);
  Ring& ring = rings_[std::this_thread::get_id()].by_use[i];
  ++frame.pins;
  frame.used = true;
  frame.recent = true;
  if (ring.frames.size() < in_use) {
    ring.frames.push_back(&frame);
    return false;
  }
  Frame* const oldest = std::exchange(ring.frames[ring.next], &frame);
  ring.next = (ring.next + 1) % in_use;
  return --oldest->pins == 0;
}

void FrameTable::Wipe(Frame& frame) {
  std::memset(frame.memory, 0, memory_[0].size());
  Free(frame);
}

void FrameTable::UnpinAll() {
  for (auto& [thread, rings] : rings_) {
    for (Ring& ring : rings.by_use) {
      for (Frame* const frame : ring.frames) --frame->pins;
      ring = {};
    }
  }
}

int64_t FrameTable::num_pinned() const {
  return std::count_if(frames_.begin(), frames_.end(),
                       [](const Frame& frame) { return frame.pins > 0; });
}

}  // namespace kvasir::kvstore
