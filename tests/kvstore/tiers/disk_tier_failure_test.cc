// A disk that is full, fails or returns other bytes, and a process that ends at any point.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <future>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kvstore/tiers/disk_tier.h"
#include "tests/kvstore/test_blocks.h"
#include "tests/kvstore/tiers/disk_tier_fixture.h"
#include "tests/support/iterations.h"

namespace kvasir::kvstore {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST_F(DiskTierTest, AFullDiskMakesItReadOnlyUntilSpaceReturns) {
  ASSERT_TRUE(store_.Open().ok());
  for (uint32_t name = 1; name <= 3; ++name) EXPECT_TRUE(store_.Write(name).ok());
  store_.control->Set({.free_bytes = 4096});  // ENOSPC in the middle of an extent
  EXPECT_EQ(store_.Write(4).code(), absl::StatusCode::kResourceExhausted);
  TierStats stats = store_.tier->stats();
  EXPECT_FALSE(stats.writable);
  EXPECT_EQ(stats.failed_writes, 1);
  EXPECT_THAT(store_.Names(), ElementsAre(3)) << "two of the oldest make room";
  EXPECT_TRUE(store_.Read(3).ok()) << "reading goes on";
  EXPECT_EQ(store_.Write(5).code(), absl::StatusCode::kUnavailable) << "too early to try again";
  EXPECT_EQ(store_.tier->stats().refused_writes, 1);
  store_.now_ms += 1001;
  EXPECT_TRUE(store_.Write(6).ok());
  EXPECT_TRUE(store_.tier->stats().writable);
  ASSERT_TRUE(store_.Open().ok());
  EXPECT_THAT(store_.Names(), ElementsAre(3, 6));
  EXPECT_TRUE(store_.Read(6).ok());
}

TEST_F(DiskTierTest, AFullDiskFromTheStartIsNoErrorOfTheService) {
  ASSERT_TRUE(store_.Open().ok());
  store_.control->Set({.free_bytes = 0});
  for (uint32_t name = 1; name <= 5; ++name) {
    store_.now_ms += 1001;
    EXPECT_EQ(store_.Write(name).code(), absl::StatusCode::kResourceExhausted);
  }
  EXPECT_THAT(store_.Names(), IsEmpty());
  store_.control->Set({});
  store_.now_ms += 1001;
  EXPECT_TRUE(store_.Write(1).ok());
  EXPECT_EQ(Segments().size(), 1u);
}

// The engine polls between steps, whatever the disk does. Bug: reads waited.
TEST_F(DiskTierTest, APollAndAReadDoNotWaitForASegmentToBeMade) {
  const TestBlock written(store_.format, 5, 7);
  const TestBlock read(store_.format, 1, 7);
  ASSERT_TRUE(store_.Open().ok());
  for (uint32_t name = 1; name <= 4; ++name) ASSERT_TRUE(store_.Write(name).ok());
  store_.control->Set({.hold_create = true});
  store_.tier->Write({{.ticket = 1001, .block = written.identity, .extent = written.extent}});
  store_.control->AwaitHolding();
  store_.tier->Read({{.ticket = 1002, .hash = HashOf(1), .extent = read.extent}});
  std::vector<TierCompletion> completions;
  const auto poll = [&] {
    for (TierCompletion& completion : store_.tier->Poll().completions) {
      completions.push_back(std::move(completion));
    }
  };
  auto polls = std::async(std::launch::async, [&] {
    while (completions.empty()) poll();
  });
  const auto waited = polls.wait_for(std::chrono::seconds(10));
  EXPECT_EQ(waited, std::future_status::ready) << "a poll or the read waits";
  store_.control->Set({});
  polls.get();
  if (waited == std::future_status::ready) {
    EXPECT_EQ(completions[0].ticket, 1002u);
  }
  while (completions.size() < 2) {
    store_.tier->Wait();
    poll();
  }
  for (const TierCompletion& completion : completions) EXPECT_TRUE(completion.status.ok());
}

TEST_F(DiskTierTest, AfterAFailedWriteOrSyncTheSegmentIsNotWrittenToAgain) {
  for (const Faults& faults : {Faults{.write_error = 1}, Faults{.sync_error = 1}}) {
    ASSERT_TRUE(store_.Open().ok());
    EXPECT_TRUE(store_.Write(1).ok());
    const std::string before = Segments().back();
    store_.control->Set(faults);
    EXPECT_FALSE(store_.Write(2).ok());
    EXPECT_FALSE(store_.tier->stats().writable);
    store_.control->Set({});
    store_.now_ms += 1001;
    EXPECT_TRUE(store_.Write(3).ok());
    EXPECT_NE(Segments().back(), before);
    EXPECT_TRUE(store_.Read(1).ok());
    EXPECT_TRUE(store_.Read(3).ok());
    EXPECT_EQ(store_.Read(2).code(), absl::StatusCode::kNotFound);
    store_.Close();
    std::filesystem::remove_all(directory_);
  }
}

TEST_F(DiskTierTest, ADirectoryThatTakesNoNewFilesMakesItReadOnly) {
  ASSERT_TRUE(store_.Open().ok());
  store_.control->Set({.open_error = 1});
  EXPECT_EQ(store_.Write(1).code(), absl::StatusCode::kPermissionDenied);
  EXPECT_FALSE(store_.tier->stats().writable);
  store_.control->Set({});
  store_.now_ms += 1001;
  EXPECT_TRUE(store_.Write(1).ok());
}

TEST_F(DiskTierTest, ShortTransfersAreResumed) {
  ASSERT_TRUE(store_.Open().ok());
  store_.control->Set({.short_transfer = 0.7});
  for (uint32_t name = 1; name <= 30; ++name) ASSERT_TRUE(store_.Write(name).ok());
  for (uint32_t name = 1; name <= 30; ++name) ASSERT_TRUE(store_.Read(name).ok());
}

TEST_F(DiskTierTest, AReadErrorThatPassesIsTriedOnceMoreAndAStickyOneForgetsTheBlock) {
  ASSERT_TRUE(store_.Open().ok());
  for (uint32_t name = 1; name <= 100; ++name) ASSERT_TRUE(store_.Write(name).ok());
  store_.control->Set({.read_error = 0.2});
  int64_t read = 0;
  for (uint32_t name = 1; name <= 99; ++name) read += store_.Read(name).ok() ? 1 : 0;
  EXPECT_GT(read, 85);  // 0.96 of them
  EXPECT_EQ(store_.tier->stats().blocks, read + 1);
  store_.control->Set({.read_error = 1});
  EXPECT_EQ(store_.Read(100).code(), absl::StatusCode::kDataLoss);
  store_.control->Set({});
  EXPECT_EQ(store_.Read(100).code(), absl::StatusCode::kNotFound) << "never asked for twice";
  EXPECT_EQ(store_.tier->stats().checksum_failures, 0);
  EXPECT_GT(store_.tier->stats().failed_reads, 0);
}

TEST_F(DiskTierTest, ABitFlippedOnTheWayIsNeverServed) {
  ASSERT_TRUE(store_.Open().ok());
  for (uint32_t name = 1; name <= 50; ++name) ASSERT_TRUE(store_.Write(name).ok());
  store_.control->Set({.flip_read = 1});
  int64_t failures = 0;
  for (uint32_t name = 1; name <= 50; ++name) {
    // TestBlock compares all bytes, and nobody reads a flipped bit in the padding.
    TestBlock found(store_.format, name, 0);
    store_.tier->Read({{.ticket = 5000 + name, .hash = HashOf(name), .extent = found.extent}});
    const TierCompletion completion = store_.Await(5000 + name);
    if (completion.status.ok()) {
      EXPECT_TRUE(store_.format.Verify(completion.block, found.extent).ok());
    } else {
      EXPECT_EQ(completion.status.code(), absl::StatusCode::kDataLoss);
      ++failures;
    }
  }
  EXPECT_GT(failures, 10);
  EXPECT_EQ(store_.tier->stats().checksum_failures, failures);
  EXPECT_EQ(store_.tier->stats().blocks, 50 - failures);
}

TEST_F(DiskTierTest, TruncatedSegmentsGiveNothingOrTheBlock) {
  ASSERT_TRUE(store_.Open().ok());
  for (uint32_t name = 1; name <= 4; ++name) ASSERT_TRUE(store_.Write(name).ok());
  store_.Close();
  const std::string backup = scratch_.path() + "/backup";
  std::filesystem::copy(directory_, backup, std::filesystem::copy_options::recursive);
  const int64_t extent = store_.format.extent_bytes();
  for (int64_t size = 0; size <= 4 * extent; size += 4096) {
    for (const bool while_open : {false, true}) {
      std::filesystem::remove_all(directory_);
      std::filesystem::copy(backup, directory_, std::filesystem::copy_options::recursive);
      if (while_open) {
        ASSERT_TRUE(store_.Open().ok());
      }
      std::filesystem::resize_file(Segments()[0], static_cast<uintmax_t>(size));
      if (!while_open) {
        ASSERT_TRUE(store_.Open().ok());
      }
      for (uint32_t name = 1; name <= 4; ++name) {
        EXPECT_EQ(store_.Read(name).ok(), size >= name * extent) << size << " block " << name;
      }
      store_.Close();
    }
  }
}

TEST_F(DiskTierTest, MisdirectedAndStaleExtentsAreNotServed) {
  ASSERT_TRUE(store_.Open().ok());
  for (uint32_t name = 1; name <= 4; ++name) ASSERT_TRUE(store_.Write(name, 7).ok());
  store_.Close();
  const size_t extent = static_cast<size_t>(store_.format.extent_bytes());
  std::string bytes = ReadFile(Segments()[0]);
  ASSERT_EQ(bytes.size(), 4 * extent);
  std::swap_ranges(&bytes[0], &bytes[extent], &bytes[extent]);  // 1 and 2 change places
  const TestBlock stale(store_.format, 3, 6);                   // 3 as it was sealed before
  std::memcpy(&bytes[2 * extent], stale.extent.data(), extent);
  WriteFile(Segments()[0], bytes);
  ASSERT_TRUE(store_.Open().ok());
  for (uint32_t name = 1; name <= 3; ++name) {
    EXPECT_EQ(store_.Read(name).code(), absl::StatusCode::kDataLoss);
  }
  EXPECT_TRUE(store_.Read(4).ok());
}

// After a crash: acknowledged blocks are there, others are absent, and none is wrong.
TEST_F(DiskTierTest, ACrashLosesNothingThatWasAcknowledged) {
  std::mt19937 rng(5);
  std::set<uint32_t> durable;
  uint32_t name = 0;
  for (int64_t round = 0; round < testing::Iterations(10); ++round) {
    store_.control->Set({});
    ASSERT_TRUE(store_.Open(1000000).ok());
    EXPECT_EQ(store_.Names().size(), durable.size());
    for (uint32_t known : durable) ASSERT_TRUE(store_.Read(known).ok()) << known;
    store_.control->Set({.write_error = 0.05, .sync_error = 0.2});
    for (uint64_t i = rng() % 20; i > 0; --i) {
      store_.now_ms += 1001;
      ++name;
      if (store_.Write(name).ok()) durable.insert(name);
    }
    store_.Close();
    const auto files = MakeFileIo(IoEngine::kThreads);
    store_.control->Crash(*files);
  }
  EXPECT_GT(durable.size(), 20u);
}

}  // namespace
}  // namespace kvasir::kvstore
