#include "kvstore/on_demand/frame_table.h"

#include "gtest/gtest.h"

namespace kvasir::kvstore {
namespace {

using kernels::kPagesInUse;
using kernels::PageUse;
using Manner = FrameTable::Manner;

class FrameTableTest : public ::testing::Test {
 protected:
  static constexpr auto kUse = PageUse::kAttend;
  static constexpr int64_t kInUse = kPagesInUse[static_cast<size_t>(kUse)];
  static constexpr int64_t kFrames = kInUse + 1;

  // Brings the page, as a thread that reads it.
  void Use(int64_t page) {
    Frame* const frame = table_.Take(page, Manner::kAnyFrame);
    ASSERT_NE(frame, nullptr) << "page " << page;
    frame->state = Frame::State::kReady;
    table_.Pin(*frame, kUse);
  }

  FrameTable table_{*ExtentMemory::Allocate(kFrames, kExtentAlignment), kFrames};
};

TEST_F(FrameTableTest, AFrameInUseIsNotTaken) {
  for (int64_t page = 0; page < kFrames; ++page) Use(page);
  // All were used just now, and the thread has let the first one go.
  ASSERT_EQ(table_.num_pinned(), kInUse);
  for (int64_t page = kFrames; page < 4 * kFrames; ++page) {
    Use(page);
    EXPECT_EQ(table_.Find(page - kFrames), nullptr) << "the page that nobody uses leaves";
    for (int64_t used = page - kInUse + 1; used <= page; ++used) {
      EXPECT_NE(table_.Find(used), nullptr) << "page " << used << " is in use";
    }
  }
}

TEST_F(FrameTableTest, WithoutAFrameThatNobodyUsesThereIsNone) {
  for (int64_t page = 0; page < kInUse; ++page) Use(page);
  Frame* const reading = table_.Take(kInUse, Manner::kAnyFrame);
  ASSERT_NE(reading, nullptr);
  EXPECT_EQ(table_.Take(kFrames, Manner::kAnyFrame), nullptr) << "one is read, the others are used";
  table_.UnpinAll();
  EXPECT_NE(table_.Take(kFrames, Manner::kAnyFrame), nullptr);
}

TEST_F(FrameTableTest, WhatWasWantedAndNotReadYetStaysWhereOthersWillDo) {
  for (int64_t page = 0; page < kFrames; ++page) {
    table_.Take(page, Manner::kAnyFrame)->state = Frame::State::kReady;
  }
  table_.BeginWant();
  for (int64_t page = 0; page < kFrames; ++page) table_.MarkWanted(*table_.Find(page));
  EXPECT_EQ(table_.Take(kFrames, Manner::kSparing), nullptr);
  EXPECT_NE(table_.Take(kFrames, Manner::kAnyFrame), nullptr);
}

}  // namespace
}  // namespace kvasir::kvstore
