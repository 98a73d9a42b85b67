// Pages that lie on disk only, brought into the device tier by the real kernel, mailbox and thread:
// every page that a selection names is there afterwards, with its bytes, and no other page is
// overwritten. A page that comes late is not taken for another.
#include "worker/backend/cuda/page_mailbox.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <gtest/gtest.h>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "kernels/base/device_buffer.h"
#include "kernels/paged/row_items.h"
#include "kernels/residency/residency_cuda.h"
#include "tests/support/device_memory.h"
#include "tests/support/iterations.h"
#include "worker/backend/cuda/memory/cuda_memory.h"

namespace kvasir::worker {
namespace {

using kernels::DeviceBuffer;
using kernels::DeviceMemory;
using kernels::kPageTokens;
using kernels::PageRef;
using kernels::PageSelection;
using kernels::PageTier;
using kernels::QueryTile;
using kernels::ResidencyState;
using kernels::SelectionEntry;
using kernels::SelectionHeader;

constexpr int64_t kExtents = 3;   // of the host tier; their pages are never brought
constexpr int64_t kBlocks = 150;  // of two sequences, one half after the other
constexpr int64_t kSlots = 2;
constexpr int64_t kSlotBlocks = kBlocks / kSlots;
constexpr int64_t kLean = kBlocks - kExtents;
constexpr int64_t kCapacity = 64;
constexpr kernels::KvLayout kLayout = {
    .num_layers = 3, .num_kv_heads = 2, .head_dim = 64, .dtype = kernels::DType::kBFloat16};

// The bytes of every page are a number that its index gives. Some pages cannot be read.
class NumberedPages final : public kernels::AbsentPages {
 public:
  static uint32_t NumberOf(int64_t page) { return static_cast<uint32_t>(page) * 2654435761u + 1; }
  static bool IsMissing(int64_t page) { return page % 31 == 7; }

  std::byte* Bring(int64_t, int64_t, kernels::PageUse) override { return nullptr; }
  bool Copy(int64_t slot, int64_t page, std::span<std::byte> to) override {
    EXPECT_EQ(slot, page / kLayout.pages_per_block() / kSlotBlocks);
    EXPECT_EQ(to.size(), static_cast<size_t>(kLayout.page_bytes()));
    while (stuck_) std::this_thread::yield();
    if (IsMissing(page)) return false;
    const uint32_t number = NumberOf(page);
    for (size_t at = 0; at < to.size(); at += sizeof(number)) {
      std::memcpy(to.data() + at, &number, sizeof(number));
    }
    ++copied_;
    return true;
  }
  void Want(int64_t layer, std::span<const int64_t> pages) override {
    for (const int64_t page : pages) {
      EXPECT_EQ(page % kLayout.pages_per_block() / kLayout.num_kv_heads, layer);
    }
    ++requests_;
  }

  // Pages that are asked for while it is stuck come when it is no longer.
  void set_stuck(bool stuck) { stuck_ = stuck; }
  int64_t copied() const { return copied_; }
  int64_t requests() const { return requests_; }

 private:
  std::atomic<bool> stuck_ = false;
  std::atomic<int64_t> copied_ = 0, requests_ = 0;
};

class PageMailboxTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!kernels::HasGpu()) GTEST_SKIP() << "no GPU on this machine";
    stream_ = CudaStream::Create().value();
    // Room for one layer, and little more.
    kernels::ResidencyShape shape = {.num_extents = kExtents,
                                     .pages_per_extent = kLayout.pages_per_block(),
                                     .num_slots = kLean * kLayout.num_kv_heads + 20,
                                     .page_bytes = kLayout.page_bytes(),
                                     .num_lean = kLean,
                                     .max_fills = 8,
                                     .max_examined = 64};
    arena_ = DeviceBuffer::Allocate(shape.num_slots * shape.page_bytes).value();
    shape.arena = arena_.data();
    ASSERT_TRUE(CheckResidencyShape(shape).ok());
    memory_ = DeviceBuffer::Allocate(LayOutResidency(shape, nullptr).bytes).value();
    state_ = LayOutResidency(shape, memory_.data());
    ASSERT_TRUE(InitResidency(state_, stream_.get()).ok());
    mailbox_ = PageMailbox::Create(kLayout.page_bytes(), kLean * kLayout.pages_per_block()).value();
    mailbox_->ServeFrom(pages_);
    for (int32_t block = 0; block < kBlocks; ++block) block_extents_.push_back(block);
  }

  // A row of one query at the last position, with everything or a random part of it.
  SelectionHeader MakeRow(SelectionEntry* list) {
    SelectionHeader header;
    if (rng_() % 5 == 0) {
      header.kind = SelectionHeader::Kind::kAll;
      return header;
    }
    header.kind = SelectionHeader::Kind::kList;
    header.sink_end = 64 * static_cast<int64_t>(rng_() % 5);
    header.window_begin = kPageTokens * (kSlotBlocks - 1 - static_cast<int64_t>(rng_() % 6)) + 10;
    for (int32_t page = 0; page < kSlotBlocks && header.count < kCapacity; ++page) {
      if (rng_() % 4 != 0) continue;
      list[header.count++] = {.page = page, .live = rng_() % 3 == 0 ? 0 : ~uint64_t{0}};
    }
    return header;
  }

  void Bring(int64_t layer, uint64_t patience_ns = 10'000'000'000) {
    constexpr int64_t kHeads = kLayout.num_kv_heads;
    std::vector<QueryTile> tiles;
    std::vector<SelectionEntry> lists(static_cast<size_t>(kSlots * kHeads * kCapacity));
    std::vector<SelectionHeader> headers;
    needed_.clear();
    for (int64_t row = 0; row < kSlots * kHeads; ++row) {
      const int64_t slot = row / kHeads, head = row % kHeads;
      if (head == 0) {
        tiles.push_back(
            {.slot = slot, .num_rows = 1, .first_position = kSlotBlocks * kPageTokens - 1});
      }
      SelectionEntry* const list = lists.data() + row * kCapacity;
      headers.push_back(MakeRow(list));
      const kernels::RowItems items = NumberItems(headers.back(), tiles.back().first_position);
      for (int64_t i = 0; i < items.num_items; ++i) {
        const kernels::RowItem item = FindItem(items, headers.back(), list, i);
        const int64_t block = slot * kSlotBlocks + item.page;
        if (item.mask == 0 || block < kExtents) continue;
        needed_.insert(block * kLayout.pages_per_block() + kLayout.page_in_block(layer, head));
      }
    }
    DeviceMemory device;
    const kernels::PagedKv kv = {
        .layout = kLayout,
        .block_extents = device.Copy(block_extents_.data(), block_extents_.size()).value(),
        .num_slots = kSlots,
        .max_blocks_per_slot = kSlotBlocks,
        .num_extents = kBlocks,
        .pages = state_.pages,
        .accesses = {}};
    const PageSelection selection = {.headers = device.Copy(headers.data(), headers.size()).value(),
                                     .entries = device.Copy(lists.data(), lists.size()).value(),
                                     .num_rows = kSlots * kHeads,
                                     .capacity = kCapacity};
    QueryTile* const device_tiles = device.Copy(tiles.data(), tiles.size()).value();
    ASSERT_TRUE(kernels::BringPages(state_, mailbox_->view(),
                                    {.kv = kv,
                                     .layer = layer,
                                     .tiles = {device_tiles, tiles.size()},
                                     .selection = selection,
                                     .patience_ns = patience_ns},
                                    stream_.get())
                    .ok());
    const absl::Status status = stream_.Wait();
    ASSERT_TRUE(status.ok()) << status;
  }

  void CheckPages() {
    std::vector<std::byte> image(static_cast<size_t>(state_.bytes));
    std::vector<std::byte> arena(static_cast<size_t>(arena_.size_bytes()));
    ASSERT_TRUE(DeviceMemory::Fetch(memory_.data(), image.data(), image.size()).ok());
    ASSERT_TRUE(DeviceMemory::Fetch(arena_.data(), arena.data(), arena.size()).ok());
    const ResidencyState found = LayOutResidency(state_.shape, image.data());
    std::set<int64_t> slots;
    for (int64_t page = 0; page < state_.shape.num_pages(); ++page) {
      const bool is_needed = needed_.contains(page) && !NumberedPages::IsMissing(page);
      if (found.pages[page].tier() == PageTier::kAbsent) {
        ASSERT_FALSE(is_needed) << "page " << page;
        continue;
      }
      ASSERT_EQ(found.pages[page].tier(), PageTier::kDevice);
      const int64_t slot = state_.shape.slot_of(found.pages[page].page());
      ASSERT_TRUE(slots.insert(slot).second) << "two pages in slot " << slot;
      ASSERT_EQ(found.slot_pages[slot], page);
      ASSERT_EQ(found.slot_states[slot], kernels::SlotState::kCached);
      const uint32_t number = NumberedPages::NumberOf(page);
      for (int64_t at = 0; at < kLayout.page_bytes(); at += 4) {
        ASSERT_EQ(std::memcmp(arena.data() + slot * kLayout.page_bytes() + at, &number, 4), 0)
            << "page " << page << ", byte " << at;
      }
    }
    EXPECT_EQ(found.counters->free_slots, state_.shape.num_slots - std::ssize(slots));
    EXPECT_EQ(std::count(found.slot_states, found.slot_states + state_.shape.num_slots,
                         kernels::SlotState::kFree),
              found.counters->free_slots);
    evictions_ = found.counters->evictions;
  }

  std::mt19937 rng_{7};
  CudaStream stream_;
  DeviceBuffer arena_, memory_;
  ResidencyState state_;
  NumberedPages pages_;
  std::unique_ptr<PageMailbox> mailbox_;
  std::vector<int32_t> block_extents_;
  std::set<int64_t> needed_;  // by the last call
  int64_t evictions_ = 0;
};

TEST_F(PageMailboxTest, WhatSelectionsNameIsInTheDeviceTier) {
  const int calls = static_cast<int>(kvasir::testing::Iterations(40));
  for (int call = 0; call < calls && !HasFatalFailure(); ++call) {
    SCOPED_TRACE(call);
    Bring(call % kLayout.num_layers);
    CheckPages();
  }
  // The premises: more pages than buffers and slots, so both were used again.
  EXPECT_GT(pages_.copied(), 4 * kernels::kMailboxBuffers);
  EXPECT_GT(evictions_, 2 * kLean);
  EXPECT_GT(pages_.requests(), calls / 2);
}

// Three requests are given up, and the next one must get its own pages.
TEST_F(PageMailboxTest, APageThatComesLateIsNotTakenForAnother) {
  for (int round = 0; round < 5 && !HasFatalFailure(); ++round) {
    SCOPED_TRACE(round);
    pages_.set_stuck(true);
    const int64_t requests = pages_.requests();
    for (int64_t layer = 0; layer < kLayout.num_layers; ++layer) {
      Bring(layer, /*patience_ns=*/20'000'000);
      needed_.clear();  // of what was here before, nothing is wrong
      CheckPages();
    }
    EXPECT_GT(pages_.requests(), requests);
    pages_.set_stuck(false);
    Bring(round % kLayout.num_layers);
    CheckPages();
  }
}

}  // namespace
}  // namespace kvasir::worker
