// Random use of the residency protocol against a naive model: extents are opened, written, sealed,
// restored, read and freed; steps end. Slots that no page is in, or that are being filled, hold
// NaN, and copies are made at any time in a step. After each step every page that can be read must
// hold what was written, and state and counters must be what the model says of them. The ops are a
// parameter, so that another implementation may be run beside the reference. Thread-compatible.
#pragma once

#include <algorithm>
#include <cstring>
#include <gtest/gtest.h>
#include <random>
#include <utility>
#include <vector>

#include "kernels/base/buffer.h"
#include "kernels/residency/residency.h"

namespace kvasir::kernels {

struct RandomResidencyOptions {
  uint32_t seed = 0;
  int64_t num_extents = 0;
  int64_t pages_per_extent = 0;
  int64_t num_slots = 0;
  int64_t max_fills = 0;
  int64_t max_examined = 0;
  int64_t reads = 0;  // of a step
  int64_t page_bytes = 64;
};

// Ops as the host calls them.
class ResidencyOps {
 public:
  virtual ~ResidencyOps() = default;
  virtual void Open(const ResidencyState& s, std::span<const int32_t> extents) {
    OpenExtents(s, extents);
  }
  virtual void CopyToHost(const ResidencyState& s, std::span<const int32_t> extents) {
    CopyExtentsToHost(s, extents);
  }
  virtual void Seal(const ResidencyState& s, std::span<const int32_t> extents) {
    SealExtents(s, extents);
  }
  virtual void Restore(const ResidencyState& s, std::span<const int32_t> extents) {
    RestoreExtents(s, extents);
  }
  virtual void Free(const ResidencyState& s, std::span<const int32_t> extents) {
    FreeExtents(s, extents);
  }
  virtual void Map(const ResidencyState& s) { MapFills(s); }
  virtual void Plan(const ResidencyState& s, uint32_t step) { PlanFills(s, step); }
  virtual void Promote(const ResidencyState& s, std::span<const int32_t> extents,
                       std::span<const uint8_t> running, uint32_t step) {
    PlanPromotion(s, extents, running, step);
  }
  virtual void Copy(const ResidencyState& s) { CopyFills(s); }
  virtual void Survey(const ResidencyState& s, std::span<ExtentUse> uses) {
    SurveyExtents(s, uses);
  }
};

class RandomResidency {
 public:
  RandomResidency(const RandomResidencyOptions& options, ResidencyOps& ops)
      : rng_(options.seed), options_(options), ops_(ops) {
    const int64_t stride = options.pages_per_extent * options.page_bytes + 64;
    arena_ = HostBuffer::Allocate(options.num_slots * options.page_bytes).value();
    extents_ = HostBuffer::Allocate(options.num_extents * stride).value();
    const ResidencyShape shape = {.num_extents = options.num_extents,
                                  .pages_per_extent = options.pages_per_extent,
                                  .num_slots = options.num_slots,
                                  .page_bytes = options.page_bytes,
                                  .arena = arena_.data(),
                                  .extents = extents_.data(),
                                  .extent_stride = stride,
                                  .max_fills = options.max_fills,
                                  .max_examined = options.max_examined};
    EXPECT_TRUE(CheckResidencyShape(shape).ok()) << CheckResidencyShape(shape);
    memory_ = HostBuffer::Allocate(LayOutResidency(shape, nullptr).bytes).value();
    s_ = LayOutResidency(shape, memory_.data());
    InitResidency(s_);
    extent_states_.resize(static_cast<size_t>(options.num_extents));
    pages_.resize(static_cast<size_t>(shape.num_pages()));
    Poison(SlotState::kFree);
  }

  // A boundary between steps and the step after it.
  void Step() {
    ++step_;
    bool copied = false;
    const auto copy_now_and_then = [&] {
      if (copied || rng_() % 4 != 0) return;
      ops_.Copy(s_);
      copied = true;
    };
    copy_now_and_then();
    Seal();
    copy_now_and_then();
    Free();
    Restore();
    // Where all slots are needed, fills must be over: it is the caller's to know.
    const int64_t wanted = static_cast<int64_t>(rng_() % 3) * s_.shape.pages_per_extent;
    if (pinned_ + wanted > s_.shape.num_slots - s_.counters->num_fills) {
      if (!copied) ops_.Copy(s_);
      copied = true;
      Map();
    }
    Open();
    CheckTables();
    copy_now_and_then();
    if (rng_() % 8 == 0) {
      if (!std::exchange(copied, true)) ops_.Copy(s_);
      Map();
      Promote();
    }
    for (int64_t i = 0; i < options_.reads; ++i) Read();
    if (!copied) ops_.Copy(s_);
    Map();
    Plan();
    Survey();
  }

  void FreeAll() {
    for (size_t extent = 0; extent < extent_states_.size(); ++extent) {
      if (extent_states_[extent] != ExtentState::kNone) FreeRow(static_cast<int32_t>(extent));
    }
    Map();
    EXPECT_EQ(s_.counters->free_slots, s_.shape.num_slots);
  }

  const ResidencyCounters& counters() const { return *s_.counters; }
  int64_t restored() const { return restored_; }      // pages
  int64_t promotions() const { return promotions_; }  // of extents, before a step
  // Pages opened, sealed, freed, read, promoted and evicted, and steps.
  int64_t operations() const {
    return operations_ + step_ + s_.counters->promotions + s_.counters->evictions;
  }

 private:
  enum class ExtentState : uint8_t { kNone, kOpen, kSealed };
  struct ModelPage {
    uint64_t content = 0;
    bool in_device = false;
    uint64_t missed = 0;  // since it was opened or promoted, less what is forgotten
    uint32_t touched = kNeverTouched;
  };

  std::vector<int32_t> Pick(ExtentState state, int64_t most) {
    std::vector<int32_t> picked;
    const size_t first = rng_() % extent_states_.size();
    for (size_t i = 0; i < extent_states_.size() && std::ssize(picked) < most; ++i) {
      const size_t extent = (first + i) % extent_states_.size();
      if (extent_states_[extent] == state) picked.push_back(static_cast<int32_t>(extent));
    }
    return picked;
  }
  ModelPage& page(int64_t extent, int64_t i) {
    return pages_[static_cast<size_t>(extent * s_.shape.pages_per_extent + i)];
  }
  int64_t CountPages(const std::vector<int32_t>& extents) {
    const int64_t pages = std::ssize(extents) * s_.shape.pages_per_extent;
    operations_ += pages;
    return pages;
  }

  void Open() {
    const int64_t room =
        (s_.shape.num_slots - s_.counters->num_fills - pinned_) / s_.shape.pages_per_extent;
    const std::vector<int32_t> extents =
        Pick(ExtentState::kNone, std::min<int64_t>(room, static_cast<int64_t>(rng_() % 3)));
    ops_.Open(s_, extents);
    for (const int32_t extent : extents) {
      extent_states_[static_cast<size_t>(extent)] = ExtentState::kOpen;
      for (int64_t i = 0; i < s_.shape.pages_per_extent; ++i) {
        page(extent, i) = {.content = ++next_content_, .in_device = true};
        const PageRef ref = s_.pages[extent * s_.shape.pages_per_extent + i];
        ASSERT_EQ(ref.tier(), PageTier::kDevice);
        Write(ref.page(), next_content_);
      }
    }
    pinned_ += CountPages(extents);
    FollowEvictions();
  }
  void Seal() {
    const std::vector<int32_t> extents = Pick(ExtentState::kOpen, static_cast<int64_t>(rng_() % 3));
    ops_.CopyToHost(s_, extents);
    ops_.Seal(s_, extents);
    for (const int32_t extent : extents)
      extent_states_[static_cast<size_t>(extent)] = ExtentState::kSealed;
    pinned_ -= CountPages(extents);
  }
  // Whatever is below the host tier has filled extents that nothing uses.
  void Restore() {
    if (rng_() % 4 != 0) return;
    const std::vector<int32_t> extents =
        Pick(ExtentState::kNone, 1 + static_cast<int64_t>(rng_() % 2));
    for (const int32_t extent : extents) {
      extent_states_[static_cast<size_t>(extent)] = ExtentState::kSealed;
      for (int64_t i = 0; i < s_.shape.pages_per_extent; ++i) {
        page(extent, i) = {.content = ++next_content_};
        Write(s_.shape.host_page(extent * s_.shape.pages_per_extent + i), next_content_);
      }
    }
    ops_.Restore(s_, extents);
    restored_ += CountPages(extents);
  }
  void Free() {
    if (rng_() % 3 != 0) return;
    const ExtentState state = rng_() % 4 == 0 ? ExtentState::kOpen : ExtentState::kSealed;
    const std::vector<int32_t> extents = Pick(state, 1 + static_cast<int64_t>(rng_() % 2));
    for (const int32_t extent : extents) FreeRow(extent);
    CountPages(extents);
  }
  void FreeRow(int32_t extent) {
    if (extent_states_[static_cast<size_t>(extent)] == ExtentState::kOpen)
      pinned_ -= s_.shape.pages_per_extent;
    for (int64_t i = 0; i < s_.counters->num_fills; ++i) {
      given_up_ +=
          s_.fills[i].given_up == 0 && s_.fills[i].page / s_.shape.pages_per_extent == extent;
    }
    ops_.Free(s_, {&extent, 1});
    extent_states_[static_cast<size_t>(extent)] = ExtentState::kNone;
    for (int64_t i = 0; i < s_.shape.pages_per_extent; ++i) page(extent, i) = {};
    Poison(SlotState::kFree);
  }

  // Mostly of few extents, as extents of old blocks are read seldom.
  void Read() {
    const size_t range =
        rng_() % 4 == 0 ? extent_states_.size() : std::max<size_t>(1, extent_states_.size() / 3);
    const size_t extent = rng_() % range;
    ++operations_;
    if (extent_states_[extent] == ExtentState::kNone) return;
    const int64_t index = static_cast<int64_t>(extent) * s_.shape.pages_per_extent +
                          static_cast<int64_t>(rng_()) % s_.shape.pages_per_extent;
    const PageRef ref = s_.pages[index];
    ModelPage& model = pages_[static_cast<size_t>(index)];
    ExpectContent(ref.page(), model.content);
    s_.last_touched[index] = model.touched = step_;
    if (ref.tier() == PageTier::kDevice) return;
    const uint32_t bytes =
        static_cast<uint32_t>(s_.shape.page_bytes) / (1 + static_cast<uint32_t>(rng_() % 4));
    s_.missed_bytes[index] += bytes;
    model.missed += bytes;
  }

  void Map() {
    const int64_t before = s_.counters->promotions;
    const int64_t given_up = s_.counters->given_up;
    const int64_t fills = s_.counters->num_fills;
    ops_.Map(s_);
    int64_t promoted = 0;
    for (size_t i = 0; i < pages_.size(); ++i) {
      if (pages_[i].in_device || s_.pages[i].tier() != PageTier::kDevice) continue;
      pages_[i].in_device = true;
      pages_[i].missed = 0;
      ExpectContent(s_.pages[i].page(), pages_[i].content);
      ++promoted;
    }
    ASSERT_EQ(s_.counters->promotions - before, promoted);
    ASSERT_EQ(s_.counters->given_up - given_up, fills - promoted);
    ASSERT_EQ(s_.counters->given_up, given_up_);
    Poison(SlotState::kFree);
  }
  void Promote() {
    const std::vector<int32_t> extents =
        Pick(ExtentState::kSealed, 1 + static_cast<int64_t>(rng_() % 4));
    std::vector<uint8_t> wanted(pages_.size());
    for (const int32_t extent : extents) {
      for (int64_t i = 0; i < s_.shape.pages_per_extent; ++i) {
        page(extent, i).touched = step_ - 1;
        wanted[static_cast<size_t>(extent * s_.shape.pages_per_extent + i)] =
            page(extent, i).in_device ? 0 : 1;
      }
    }
    const int64_t num_wanted = std::count(wanted.begin(), wanted.end(), 1);
    std::vector<uint8_t> running(extent_states_.size());
    for (uint8_t& runs : running) runs = rng_() % 2 == 0 ? 1 : 0;
    for (const int32_t extent : extents) running[static_cast<size_t>(extent)] = 1;
    ops_.Promote(s_, extents, running, step_);
    const int64_t found = s_.counters->num_fills;
    ASSERT_LE(found, num_wanted);
    for (int64_t i = 0; i < found; ++i) {
      ASSERT_EQ(std::exchange(wanted[static_cast<size_t>(s_.fills[i].page)], 0), 1);
    }
    Poison(SlotState::kFilling);
    CheckRecent(running, found < num_wanted);
    FollowEvictions();
    CheckTables();
    ops_.Copy(s_);
    Map();
    ++promotions_;
  }
  // No page of a running block left that a recent step read, and all others did if there was no
  // room.
  void CheckRecent(const std::vector<uint8_t>& running, bool no_room) {
    ASSERT_TRUE(!no_room || s_.counters->free_slots == 0);
    for (size_t i = 0; i < pages_.size(); ++i) {
      const ModelPage& model = pages_[i];
      if (!model.in_device) continue;
      const size_t extent = i / static_cast<size_t>(s_.shape.pages_per_extent);
      const bool is_recent = running[extent] != 0 && model.touched != kNeverTouched &&
                             model.touched >= FirstRecentStep(step_);
      const bool has_left = s_.pages[i].tier() != PageTier::kDevice;
      ASSERT_FALSE(has_left && is_recent) << "page " << i;
      const bool stays = extent_states_[extent] != ExtentState::kSealed || is_recent;
      ASSERT_TRUE(!no_room || has_left || stays) << "page " << i;
    }
  }
  void Plan() {
    ResidencyCounters expected = *s_.counters;
    std::vector<uint8_t> worthy(pages_.size());
    for (size_t i = 0; i < pages_.size(); ++i) {
      ModelPage& model = pages_[i];
      if (model.touched == step_) ++(model.in_device ? expected.hits : expected.misses);
      worthy[i] = model.missed >= static_cast<uint64_t>(s_.shape.page_bytes) ? 1 : 0;
      model.missed -= model.missed >> kMissDecayShift;
    }
    const int64_t num_worthy = std::count(worthy.begin(), worthy.end(), 1);
    ops_.Plan(s_, step_);
    const ResidencyCounters& found = *s_.counters;
    ASSERT_EQ(found.hits, expected.hits);
    ASSERT_EQ(found.misses, expected.misses);
    ASSERT_LE(found.num_fills, std::min(num_worthy, s_.shape.max_fills));
    for (int64_t i = 0; i < found.num_fills; ++i) {
      const size_t filled = static_cast<size_t>(s_.fills[i].page);
      ASSERT_EQ(std::exchange(worthy[filled], 0), 1) << "twice, or not worth it";
      ASSERT_EQ(s_.fills[i].given_up, 0);
    }
    if (found.num_fills < std::min(num_worthy, s_.shape.max_fills)) {
      ASSERT_EQ(found.free_slots, 0);
    }
    Poison(SlotState::kFilling);
    for (size_t i = 0; i < pages_.size(); ++i) {
      const bool evicted = pages_[i].in_device && s_.pages[i].tier() != PageTier::kDevice;
      ASSERT_FALSE(evicted && pages_[i].touched == step_) << "the step read page " << i;
    }
    FollowEvictions();
    CheckTables();
  }

  void Survey() {
    if (rng_() % 8 != 0) return;
    std::vector<ExtentUse> uses(extent_states_.size());
    ops_.Survey(s_, uses);
    for (size_t extent = 0; extent < uses.size(); ++extent) {
      if (extent_states_[extent] == ExtentState::kNone) continue;
      ExtentUse expected;
      for (int64_t i = 0; i < s_.shape.pages_per_extent; ++i) {
        const ModelPage& model = page(static_cast<int64_t>(extent), i);
        expected.device_pages += model.in_device;
        if (model.touched == kNeverTouched) continue;
        expected.last_read = std::max(expected.last_read, model.touched);
      }
      ASSERT_EQ(uses[extent].device_pages, expected.device_pages);
      ASSERT_EQ(uses[extent].last_read, expected.last_read);
    }
  }

  // Pages that left the device tier since the model looked.
  void FollowEvictions() {
    for (size_t i = 0; i < pages_.size(); ++i) {
      if (!pages_[i].in_device || s_.pages[i].tier() == PageTier::kDevice) continue;
      ASSERT_EQ(extent_states_[i / static_cast<size_t>(s_.shape.pages_per_extent)],
                ExtentState::kSealed)
          << "page " << i << " is pinned";
      pages_[i].in_device = false;
      ++evictions_;
    }
    ASSERT_EQ(s_.counters->evictions, evictions_);
    Poison(SlotState::kFree);
  }

  void CheckTables() {
    std::vector<int32_t> page_of(static_cast<size_t>(s_.shape.num_slots), -1);
    for (size_t i = 0; i < pages_.size(); ++i) {
      const ExtentState extent = extent_states_[i / static_cast<size_t>(s_.shape.pages_per_extent)];
      const PageRef ref = s_.pages[i];
      ASSERT_EQ(ref.tier() == PageTier::kAbsent, extent == ExtentState::kNone);
      ASSERT_EQ(ref.tier() == PageTier::kDevice, pages_[i].in_device);
      if (extent == ExtentState::kNone) continue;
      if (ref.tier() == PageTier::kHost) {
        ASSERT_EQ(ref.page(), s_.shape.host_page(static_cast<int64_t>(i)));
      } else {
        const int64_t slot = s_.shape.slot_of(ref.page());
        ASSERT_EQ(std::exchange(page_of[static_cast<size_t>(slot)], static_cast<int32_t>(i)), -1);
        ASSERT_EQ(s_.slot_pages[slot], static_cast<int32_t>(i));
        ASSERT_EQ(s_.slot_states[slot],
                  extent == ExtentState::kOpen ? SlotState::kPinned : SlotState::kCached);
      }
      ExpectContent(ref.page(), pages_[i].content);
    }
    CheckSlots(page_of);
  }
  void CheckSlots(const std::vector<int32_t>& page_of) {
    int64_t free = 0;
    int64_t filling = 0;
    for (int64_t slot = 0; slot < s_.shape.num_slots; ++slot) {
      const bool is_free = s_.slot_states[slot] == SlotState::kFree;
      const bool is_filling = s_.slot_states[slot] == SlotState::kFilling;
      free += is_free;
      filling += is_filling;
      ASSERT_EQ((s_.free_bits[slot / kWordBits] >> (slot % kWordBits) & 1) != 0, is_free);
      ASSERT_EQ(page_of[static_cast<size_t>(slot)] < 0, is_free || is_filling);
    }
    ASSERT_EQ(free, s_.counters->free_slots);
    ASSERT_EQ(filling, s_.counters->num_fills);
    ASSERT_EQ(s_.counters->without_room, 0);
  }

  // What may not be read: no table names it.
  void Poison(SlotState state) {
    for (int64_t slot = 0; slot < s_.shape.num_slots; ++slot) {
      if (s_.slot_states[slot] != state) continue;
      std::memset(s_.shape.slot_memory(slot), 0xff, static_cast<size_t>(s_.shape.page_bytes));
    }
  }
  void Write(std::byte* to, uint64_t content) const {
    for (int64_t at = 0; at < s_.shape.page_bytes; at += 8) {
      std::memcpy(to + at, &content, sizeof(content));
    }
  }
  void ExpectContent(const std::byte* at, uint64_t content) const {
    uint64_t first = 0;
    uint64_t last = 0;
    std::memcpy(&first, at, sizeof(first));
    std::memcpy(&last, at + s_.shape.page_bytes - 8, sizeof(last));
    ASSERT_EQ(first, content);
    ASSERT_EQ(last, content);
  }

  std::mt19937 rng_;
  const RandomResidencyOptions options_;
  ResidencyOps& ops_;
  HostBuffer arena_, extents_, memory_;
  ResidencyState s_;
  std::vector<ExtentState> extent_states_;
  std::vector<ModelPage> pages_;
  int64_t pinned_ = 0;
  int64_t restored_ = 0;
  int64_t promotions_ = 0;
  int64_t evictions_ = 0;
  int64_t given_up_ = 0;
  int64_t operations_ = 0;
  uint64_t next_content_ = 0;
  uint32_t step_ = 0;
};

}  // namespace kvasir::kernels
