// The GPU's residency protocol against the reference: random use, and after each op the same state,
// entry by entry, and the same bytes in both tiers.
#include "kernels/residency/residency_cuda.h"

#include <functional>
#include <gtest/gtest.h>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "kernels/base/cuda_status.h"
#include "kernels/base/device_buffer.h"
#include "kernels/base/status_macros.h"
#include "tests/support/device_memory.h"
#include "tests/support/iterations.h"
#include "tests/support/random_residency.h"

namespace kvasir::kernels {
namespace {

// Runs each op on the host and on a copy of its state on the device.
class MirroredOps final : public ResidencyOps {
 public:
  using Extents = std::span<const int32_t>;

  void Open(const ResidencyState& s, Extents extents) override {
    Run(
        "OpenExtents", s, [&] { ResidencyOps::Open(s, extents); },
        [&](const ResidencyState& device) { return OpenExtents(device, Copy(extents), nullptr); });
  }
  void CopyToHost(const ResidencyState& s, Extents extents) override {
    Run(
        "CopyExtentsToHost", s, [&] { ResidencyOps::CopyToHost(s, extents); },
        [&](const ResidencyState& device) -> absl::Status {
          // Room for two extents, so that most calls make several copies.
          const int64_t bytes = 2 * s.shape.pages_per_extent * s.shape.page_bytes;
          KVASIR_ASSIGN_OR_RETURN(const DeviceBuffer gathered, DeviceBuffer::Allocate(bytes));
          KVASIR_RETURN_IF_ERROR(CopyExtentsToHost(
              device, extents, {gathered.data(), static_cast<size_t>(bytes)}, nullptr));
          return CudaStatus(cudaDeviceSynchronize(), "copying extents");
        });
  }
  void Seal(const ResidencyState& s, Extents extents) override {
    Run(
        "SealExtents", s, [&] { ResidencyOps::Seal(s, extents); },
        [&](const ResidencyState& device) { return SealExtents(device, Copy(extents), nullptr); });
  }
  void Restore(const ResidencyState& s, Extents extents) override {
    Run(
        "RestoreExtents", s, [&] { ResidencyOps::Restore(s, extents); },
        [&](const ResidencyState& device) {
          return RestoreExtents(device, Copy(extents), nullptr);
        });
  }
  void Free(const ResidencyState& s, Extents extents) override {
    Run(
        "FreeExtents", s, [&] { ResidencyOps::Free(s, extents); },
        [&](const ResidencyState& device) { return FreeExtents(device, Copy(extents), nullptr); });
  }
  void Map(const ResidencyState& s) override {
    Run(
        "MapFills", s, [&] { ResidencyOps::Map(s); },
        [](const ResidencyState& device) { return MapFills(device, nullptr); });
  }
  void Plan(const ResidencyState& s, uint32_t step) override {
    Run(
        "PlanFills", s, [&] { ResidencyOps::Plan(s, step); },
        [&](const ResidencyState& device) { return PlanFills(device, step, nullptr); });
  }
  void Promote(const ResidencyState& s, Extents extents, std::span<const uint8_t> running,
               uint32_t step) override {
    Run(
        "PlanPromotion", s, [&] { ResidencyOps::Promote(s, extents, running, step); },
        [&](const ResidencyState& device) {
          const uint8_t* const on_device = memory_->Copy(running.data(), running.size()).value();
          return PlanPromotion(device, Copy(extents), {on_device, running.size()}, step, nullptr);
        });
  }
  void Copy(const ResidencyState& s) override {
    Run(
        "CopyFills", s, [&] { ResidencyOps::Copy(s); },
        [](const ResidencyState& device) { return CopyFills(device, nullptr); });
  }

  void Survey(const ResidencyState& s, std::span<ExtentUse> uses) override {
    std::vector<ExtentUse> found(uses.size());
    Run(
        "SurveyExtents", s, [&] { ResidencyOps::Survey(s, uses); },
        [&](const ResidencyState& device) -> absl::Status {
          ExtentUse* const on_device = memory_->Copy(found.data(), found.size()).value();
          KVASIR_RETURN_IF_ERROR(SurveyExtents(device, {on_device, found.size()}, nullptr));
          return DeviceMemory::Fetch(on_device, found.data(), found.size() * sizeof(ExtentUse));
        });
    for (size_t i = 0; i < found.size(); ++i) {
      ASSERT_EQ(found[i].device_pages, uses[i].device_pages) << "extent " << i;
      ASSERT_EQ(found[i].last_read, uses[i].last_read) << "extent " << i;
    }
  }

 private:
  Extents Copy(Extents extents) {
    return {memory_->Copy(extents.data(), extents.size()).value(), extents.size()};
  }

  void Run(const char* op, const ResidencyState& s, const std::function<void()>& on_host,
           const std::function<absl::Status(const ResidencyState&)>& on_device) {
    if (::testing::Test::HasFatalFailure()) return;
    memory_.emplace();
    const ResidencyShape& shape = s.shape;
    const int64_t arena_bytes = shape.num_slots * shape.page_bytes;
    const int64_t extents_bytes = shape.num_extents * shape.extent_stride;
    if (extents_.size_bytes() == 0) extents_ = PinnedBuffer::Allocate(extents_bytes).value();
    std::memcpy(extents_.data(), shape.extents, static_cast<size_t>(extents_bytes));
    ResidencyShape moved = shape;
    moved.arena = memory_->Copy(shape.arena, static_cast<size_t>(arena_bytes)).value();
    moved.extents = extents_.data();
    const std::byte* const block = reinterpret_cast<const std::byte*>(s.counters);
    std::vector<std::byte> image(block, block + s.bytes);
    MovePages(shape, moved, image.data());
    const ResidencyState device =
        LayOutResidency(moved, memory_->Copy(image.data(), image.size()).value());
    const absl::Status launched = on_device(device);
    ASSERT_TRUE(launched.ok()) << op << ": " << launched;
    ASSERT_TRUE(DeviceMemory::Fetch(device.counters, image.data(), image.size()).ok()) << op;
    MovePages(moved, shape, image.data());
    std::vector<std::byte> arena(static_cast<size_t>(arena_bytes));
    ASSERT_TRUE(DeviceMemory::Fetch(moved.arena, arena.data(), arena.size()).ok()) << op;
    on_host();
    ExpectSame(op, s, LayOutResidency(shape, image.data()));
    ASSERT_EQ(std::memcmp(arena.data(), shape.arena, arena.size()), 0) << op << ": device tier";
    ASSERT_EQ(std::memcmp(extents_.data(), shape.extents, static_cast<size_t>(extents_bytes)), 0)
        << op << ": host tier";
  }
  // Moves the pages that the page table of a state in `memory` names.
  static void MovePages(const ResidencyShape& from, const ResidencyShape& to, std::byte* memory) {
    const ResidencyState s = LayOutResidency(from, memory);
    for (int64_t page = 0; page < from.num_pages(); ++page) {
      const PageRef ref = s.pages[page];
      if (ref.tier() == PageTier::kAbsent) continue;
      std::byte* const moved = ref.tier() == PageTier::kDevice
                                   ? to.arena + (ref.page() - from.arena)
                                   : to.extents + (ref.page() - from.extents);
      s.pages[page] = PageRef(moved, ref.tier());
    }
  }
  static void ExpectSame(const char* op, const ResidencyState& expected,
                         const ResidencyState& found) {
    const auto same = [&](const char* array, auto* expect, auto* find, int64_t count) {
      for (int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(std::memcmp(expect + i, find + i, sizeof(*expect)), 0)
            << op << ": entry " << i << " of " << array;
      }
    };
    const ResidencyShape& shape = expected.shape;
    same("counters", expected.counters, found.counters, 1);
    same("pages", expected.pages, found.pages, shape.num_pages());
    same("last_touched", expected.last_touched, found.last_touched, shape.num_pages());
    same("missed_bytes", expected.missed_bytes, found.missed_bytes, shape.num_pages());
    same("slot_pages", expected.slot_pages, found.slot_pages, shape.num_slots);
    same("slot_states", expected.slot_states, found.slot_states, shape.num_slots);
    same("slot_seen", expected.slot_seen, found.slot_seen, shape.num_slots);
    same("free_bits", expected.free_bits, found.free_bits, shape.num_free_words());
    same("fills", expected.fills, found.fills, expected.counters->num_fills);
    same("chunk_counts", expected.chunk_counts, found.chunk_counts, shape.num_chunks());
  }

  std::optional<DeviceMemory> memory_;
  PinnedBuffer extents_;
};

struct CudaCase {
  std::string name;
  RandomResidencyOptions options;
  int64_t steps = 0;
};

class ResidencyCudaTest : public ::testing::TestWithParam<CudaCase> {};

TEST_P(ResidencyCudaTest, LeavesTheStateOfTheReference) {
  if (!HasGpu()) GTEST_SKIP() << "no GPU on this machine";
  MirroredOps ops;
  RandomResidency random(GetParam().options, ops);
  const int64_t steps = kvasir::testing::Iterations(GetParam().steps);
  for (int64_t i = 0; i < steps; ++i) {
    random.Step();
    if (HasFatalFailure()) FAIL() << "step " << i;
  }
  const ResidencyCounters& counters = random.counters();
  std::cout << random.operations() << " operations on pages, " << counters.promotions
            << " promotions, " << counters.evictions << " evictions, " << counters.given_up
            << " fills given up" << std::endl;
  EXPECT_GT(counters.misses, steps);
  EXPECT_GT(counters.promotions, steps / 4);
  EXPECT_GT(counters.evictions, steps);
  EXPECT_GT(counters.given_up, 0);
  EXPECT_GT(random.restored(), 0);
  EXPECT_GT(random.promotions(), steps / 20);
  random.FreeAll();
}

// Small shapes; slots and words of their bits over several windows of a CTA; pages over several
// chunks; and pages that a warp does not copy at once, whose length is no multiple of a piece.
INSTANTIATE_TEST_SUITE_P(Shapes, ResidencyCudaTest,
                         ::testing::Values(CudaCase{"small",
                                                    {.seed = 1,
                                                     .num_extents = 9,
                                                     .pages_per_extent = 4,
                                                     .num_slots = 8,
                                                     .max_fills = 1,
                                                     .max_examined = 3,
                                                     .reads = 20},
                                                    1500},
                                           CudaCase{"large_pages",
                                                    {.seed = 2,
                                                     .num_extents = 30,
                                                     .pages_per_extent = 6,
                                                     .num_slots = 70,
                                                     .max_fills = 16,
                                                     .max_examined = 150,
                                                     .reads = 120,
                                                     .page_bytes = 4160},
                                                    1000},
                                           CudaCase{"several_windows",
                                                    {.seed = 3,
                                                     .num_extents = 60,
                                                     .pages_per_extent = 90,
                                                     .num_slots = 1500,
                                                     .max_fills = 200,
                                                     .max_examined = 400,
                                                     .reads = 6000},
                                                    300},
                                           CudaCase{"several_chunks",
                                                    {.seed = 4,
                                                     .num_extents = 60,
                                                     .pages_per_extent = 1024,
                                                     .num_slots = 35000,
                                                     .max_fills = 3000,
                                                     .max_examined = 9000,
                                                     .reads = 80000},
                                                    120}),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace kvasir::kernels
