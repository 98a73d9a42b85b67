// An engine on a GPU over a real disk tier, after a restart: the restored KV gives the bits that
// the computed KV gave, through bounds and key codes too.
#include <cstring>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/worker/cuda/cuda_disk_fixture.h"
#include "tests/worker/disk_round_trip.h"
#include "tests/worker/test_coordinator.h"
#include "tests/worker/test_worker.h"

namespace kvasir::worker {
namespace {

using ::testing::SizeIs;

constexpr uint32_t kWindowTokens = 128;

using AllLogits = std::map<std::pair<int64_t, int64_t>, TestWorker::Logits>;

class CudaEngineDiskTest : public CudaDiskTest {
 protected:
  CudaEngineDiskTest() : CudaDiskTest(/*num_threads=*/4) {}

  // Serves the request with the stored blocks, after a restart.
  kvstore::KvStoreStats ExpectSameAfterRestart(TestRequest request, const AllLogits& cold,
                                               const EngineOptions& options) {
    const std::unique_ptr<TestWorker> worker = Start(options);
    TestCoordinator coordinator({.chunk = kChunk, .max_tokens = kChunk, .keep_blocks = true});
    // When blocks come back into this memory, it holds digests of another text.
    const size_t other = coordinator.Add(Request(4000, kWindowTokens));
    worker->Run(coordinator);
    coordinator.Drop(coordinator.result(other));
    const v1::TierReport report = RestoreBlocks(*worker, coordinator, stored_, kRestoredIds);
    EXPECT_THAT(report.restored(), SizeIs(kStoredBlocks));
    for (int i = 0; i < report.restored_size(); ++i) {
      EXPECT_EQ(report.restored(i).error_code(), 0) << report.restored(i).error_message();
      request.cached_blocks.push_back(kRestoredIds + static_cast<uint64_t>(i));
    }
    const kvstore::KvStoreStats before = worker->engine().store().stats();
    const size_t r = coordinator.Add(request);
    worker->Run(coordinator);
    EXPECT_TRUE(coordinator.result(r).status.ok()) << coordinator.result(r).status;
    ExpectSame(cold, worker->logits());
    const v1::RowAccounting& accounting = coordinator.result(r).accounting;
    EXPECT_EQ(BothPhases(accounting).skipped_selected_out() > 0, GetParam().selector != "all");
    EXPECT_EQ(accounting.cached_disk_tokens(), kStoredBlocks * 64);
    kvstore::KvStoreStats stats = worker->engine().store().stats();
    EXPECT_EQ(stats.tier.read_blocks, kStoredBlocks);
    stats.device_misses -= before.device_misses;
    stats.promotions -= before.promotions;
    std::cout << GetParam().selector << ": " << stats.device_misses
              << " pages read in host memory, " << stats.promotions << " promoted" << std::endl;
    // Two start in the same step, on the same blocks, of which some may lie in host memory.
    for (int i = 0; i < 2; ++i) coordinator.Add(request);
    worker->Run(coordinator);
    for (const size_t twin : {r + 1, r + 2}) {
      EXPECT_EQ(coordinator.result(twin).tokens, coordinator.result(r).tokens);
    }
    EXPECT_EQ(worker->engine().store().CheckIntegrity(), absl::OkStatus());
    return stats;
  }
  static void ExpectSame(const AllLogits& cold, const AllLogits& found) {
    for (const auto& [place, logits] : cold) {
      ASSERT_TRUE(found.contains(place));
      ASSERT_EQ(std::memcmp(logits.data(), found.at(place).data(), logits.size() * sizeof(float)),
                0)
          << "position " << place.second;
    }
  }

  std::vector<std::string> stored_;  // prefix hashes
};

TEST_P(CudaEngineDiskTest, ARoundTripOverTheDiskDoesNotChangeLogits) {
  const TestRequest request = Request(0, kWindowTokens);
  AllLogits cold;
  {
    const std::unique_ptr<TestWorker> worker = Start(Options());
    ComputeAndStore(*worker, request, kChunk, kStoredBlocks, stored_);
    cold = worker->logits();
    EXPECT_EQ(worker->engine().store().stats().tier.written_blocks, kStoredBlocks);
    EXPECT_EQ(worker->engine().store().stats().device_misses, 0);
  }
  // Where there is room, blocks are promoted before the dense prompt goes on with them.
  const kvstore::KvStoreStats whole = ExpectSameAfterRestart(request, cold, Options());
  EXPECT_EQ(whole.device_misses, 0) << "read in place";
  EXPECT_GT(whole.promotions, 0);
  EngineOptions scarce = Options();
  scarce.kv.device = 12 * model_->transformer().kv_layout(scarce.kv_dtype).block_bytes();
  const kvstore::KvStoreStats part = ExpectSameAfterRestart(request, cold, scarce);
  EXPECT_GT(part.device_misses, 0) << "all was promoted";
  EXPECT_GT(part.promotions, 0);
}

// Without digests, with bounds, with key codes, with both.
INSTANTIATE_TEST_SUITE_P(Selectors, CudaEngineDiskTest,
                         ::testing::Values(DiskCase{"all"}, DiskCase{"quest"},
                                           DiskCase{"tokenselect"}, DiskCase{"quest", 0.9f}));

}  // namespace
}  // namespace kvasir::worker
