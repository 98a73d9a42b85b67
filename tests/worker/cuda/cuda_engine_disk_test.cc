// An engine on a GPU over a real disk tier, after a restart: the restored KV gives the bits that
// the computed KV gave, through bounds and key codes too.
#include <cstring>
#include <iostream>
#include <map>
#include <memory>
#include <string>
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

class CudaEngineDiskTest : public CudaDiskTest {
 protected:
  CudaEngineDiskTest() : CudaDiskTest(/*num_threads=*/4) {}

  std::vector<std::string> stored_;  // prefix hashes
};

TEST_P(CudaEngineDiskTest, ARoundTripOverTheDiskDoesNotChangeLogits) {
  TestRequest request = Request(0, kWindowTokens);
  std::map<std::pair<int64_t, int64_t>, TestWorker::Logits> cold;
  {
    const std::unique_ptr<TestWorker> worker = Start(Options());
    ComputeAndStore(*worker, request, kChunk, kStoredBlocks, stored_);
    cold = worker->logits();
    EXPECT_EQ(worker->engine().store().stats().tier.written_blocks, kStoredBlocks);
    EXPECT_EQ(worker->engine().store().stats().device_misses, 0);
  }
  const std::unique_ptr<TestWorker> worker = Start(Options());  // after a restart
  TestCoordinator coordinator({.chunk = kChunk});
  // When blocks come back into this memory, it holds digests of another text.
  coordinator.Add(Request(4000, kWindowTokens));
  worker->Run(coordinator);
  const v1::TierReport report = RestoreBlocks(*worker, coordinator, stored_, kRestoredIds);
  ASSERT_THAT(report.restored(), SizeIs(kStoredBlocks));
  for (int i = 0; i < report.restored_size(); ++i) {
    EXPECT_EQ(report.restored(i).error_code(), 0) << report.restored(i).error_message();
    request.cached_blocks.push_back(kRestoredIds + static_cast<uint64_t>(i));
  }
  const size_t r = coordinator.Add(request);
  worker->Run(coordinator);
  ASSERT_TRUE(coordinator.result(r).status.ok()) << coordinator.result(r).status;
  ASSERT_EQ(worker->logits().size(), cold.size());
  for (const auto& [place, logits] : cold) {
    ASSERT_EQ(std::memcmp(logits.data(), worker->logits().at(place).data(),
                          logits.size() * sizeof(float)),
              0)
        << "position " << place.second;
  }
  const kvstore::KvStoreStats stats = worker->engine().store().stats();
  std::cout << GetParam().selector << ": " << stats.device_misses << " pages read in host memory, "
            << stats.promotions << " promoted" << std::endl;
  const v1::RowAccounting& accounting = coordinator.result(r).accounting;
  EXPECT_EQ(BothPhases(accounting).skipped_selected_out() > 0, GetParam().selector != "all");
  EXPECT_EQ(accounting.cached_disk_tokens(), kStoredBlocks * 64);
  EXPECT_EQ(stats.tier.read_blocks, kStoredBlocks);
  EXPECT_GT(stats.device_misses, 0) << "what was restored was not read in place";
  EXPECT_GT(stats.promotions, 0);
  EXPECT_TRUE(worker->engine().store().CheckIntegrity().ok());
}

// Without digests, with bounds, with key codes, with both.
INSTANTIATE_TEST_SUITE_P(Selectors, CudaEngineDiskTest,
                         ::testing::Values(DiskCase{"all"}, DiskCase{"quest"},
                                           DiskCase{"tokenselect"}, DiskCase{"quest", 0.9f}));

}  // namespace
}  // namespace kvasir::worker
