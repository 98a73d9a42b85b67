// An engine on a GPU whose KV lies on a real disk, but for what a few blocks hold: the same bits as
// with everything in memory, while blocks leave memory under a running request, and after a restart
// from digests alone.
#include <cstring>
#include <cuda_runtime_api.h>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/scratch_directory.h"
#include "tests/worker/cuda/cuda_disk_fixture.h"
#include "tests/worker/disk_round_trip.h"
#include "tests/worker/test_coordinator.h"
#include "tests/worker/test_worker.h"
#include "worker/disk.h"

namespace kvasir::worker {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;
using LogitsByPlace = std::map<std::pair<int64_t, int64_t>, TestWorker::Logits>;

constexpr uint32_t kWindowTokens = 512;
constexpr int64_t kLeanBlocks = 64;
// Half of the host tier is for single pages.
constexpr int64_t kFewHostBlocks = 20;   // blocks of the request leave it
constexpr int64_t kMoreHostBlocks = 48;  // what follows a restored prompt has room

class CudaOnDemandTest : public CudaDiskTest {
 protected:
  CudaOnDemandTest() : CudaDiskTest(/*num_threads=*/1) {}

  EngineOptions OnDemand(int64_t host_blocks) const {
    EngineOptions options = Options();
    const kernels::KvLayout layout = KvShardOf(options, model_->transformer()).layout;
    options.on_demand_bytes = kLeanBlocks * layout.block_bytes();
    options.kv.host = host_blocks * layout.block_bytes() * 12 / 10;
    // One layer of all lean blocks, the blocks of a chunk, and fills.
    options.kv.device =
        kLeanBlocks * layout.num_kv_heads * layout.page_bytes() + 8 * layout.block_bytes();
    return options;
  }
  static kvstore::KvStoreStats Stats(TestWorker& worker) {
    EXPECT_TRUE(worker.engine().store().CheckIntegrity().ok());
    const kvstore::KvStoreStats stats = worker.engine().store().stats();
    std::cout << GetParam().selector << ": " << stats.lean_blocks << " blocks on disk only, "
              << stats.shed_blocks << " left memory, " << stats.pages.brought << " pages brought, "
              << stats.pages.reads << " read, " << stats.evictions << " evicted" << std::endl;
    return stats;
  }
  static void ExpectSame(const LogitsByPlace& expected, const LogitsByPlace& found) {
    ASSERT_EQ(expected.size(), found.size());
    for (const auto& [place, logits] : expected) {
      ASSERT_TRUE(found.contains(place)) << "position " << place.second;
      ASSERT_EQ(std::memcmp(logits.data(), found.at(place).data(), logits.size() * sizeof(float)),
                0)
          << "position " << place.second;
    }
  }
};

TEST_P(CudaOnDemandTest, BlocksThatLeaveMemoryWhileTheyAreReadChangeNoBit) {
  LogitsByPlace expected;
  for (const bool on_demand : {false, true}) {
    const std::unique_ptr<TestWorker> worker =
        Start(on_demand ? OnDemand(kFewHostBlocks) : Options());
    TestCoordinator coordinator({.chunk = kChunk});
    const size_t r = coordinator.Add(Request(0, kWindowTokens));
    worker->Run(coordinator);
    ASSERT_TRUE(coordinator.result(r).status.ok()) << coordinator.result(r).status;
    const kvstore::KvStoreStats stats = Stats(*worker);
    if (!on_demand) {
      expected = worker->logits();
      continue;
    }
    ExpectSame(expected, worker->logits());
    EXPECT_GT(stats.shed_blocks, 0);
    EXPECT_GT(stats.pages.brought, 0);
    EXPECT_GT(stats.pages.reads, 0);
    EXPECT_GT(coordinator.result(r).accounting.disk_page_waits(), 0u);
    EXPECT_EQ(stats.pages.failed_reads, 0);
  }
}

TEST_P(CudaOnDemandTest, ARestoredPromptIsReadFromDiskWhereItIsNeeded) {
  TestRequest request = Request(0, kWindowTokens);
  std::vector<std::string> stored;  // prefix hashes
  LogitsByPlace cold;
  {
    const std::unique_ptr<TestWorker> worker = Start(OnDemand(kMoreHostBlocks));
    ComputeAndStore(*worker, request, kChunk, kStoredBlocks, stored);
    cold = worker->logits();
  }
  const std::unique_ptr<TestWorker> worker = Start(OnDemand(kMoreHostBlocks));  // after a restart
  TestCoordinator coordinator({.chunk = kChunk});
  const v1::TierReport report = RestoreBlocks(*worker, coordinator, stored, kRestoredIds);
  ASSERT_THAT(report.restored(), SizeIs(kStoredBlocks));
  EXPECT_EQ(Stats(*worker).lean_blocks, kStoredBlocks);
  for (int i = 0; i < report.restored_size(); ++i) {
    EXPECT_EQ(report.restored(i).error_code(), 0) << report.restored(i).error_message();
    request.cached_blocks.push_back(kRestoredIds + static_cast<uint64_t>(i));
  }
  const size_t r = coordinator.Add(request);
  worker->Run(coordinator);
  ASSERT_TRUE(coordinator.result(r).status.ok()) << coordinator.result(r).status;
  ExpectSame(cold, worker->logits());
  EXPECT_EQ(coordinator.result(r).accounting.cached_disk_tokens(), kStoredBlocks * 64);
  EXPECT_GT(Stats(*worker).pages.brought, 0);
}

std::string NameOf(const ::testing::TestParamInfo<DiskCase>& tested) {
  const DiskCase& c = tested.param;
  return c.selector + (c.top_p > 0 ? "_top_p" : "") +
         (kernels::IsQuantized(c.kv_dtype) ? "_fp8" : "");
}
INSTANTIATE_TEST_SUITE_P(Selectors, CudaOnDemandTest,
                         ::testing::Values(DiskCase{"all"}, DiskCase{"quest"},
                                           DiskCase{"quest", 0.9f}, DiskCase{"infinitehip"},
                                           DiskCase{.selector = "quest",
                                                    .kv_dtype = kernels::DType::kFloat8E4M3}),
                         NameOf);

// The limits name what to change.
TEST(CudaOnDemandLimitsTest, ADeviceTierWithoutRoomForALayerIsRefused) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no GPU";
  TestModel model({.folder = "tests/model/needle-8k",
                   .dtype = kernels::DType::kBFloat16,
                   .max_model_len = 8192,
                   .num_threads = 1,
                   .device = "cuda",
                   .edit_weights = {}});
  const kvasir::testing::ScratchDirectory scratch;
  EngineOptions options = TestWorker::DefaultOptions();
  options.policies = {MakePolicy("all", "quest")};
  options.kv_dtype = kernels::DType::kBFloat16;
  options.weights_hash = std::string(32, 'w');
  options.kv_form = "rotated/bfloat16";
  const kernels::KvLayout layout = KvShardOf(options, model.transformer()).layout;
  options.kv.host = 100 * layout.block_bytes();
  options.kv.device = 10 * layout.block_bytes();
  options.on_demand_bytes = 400 * layout.block_bytes();
  v1::KvConfig config;
  config.set_kv_disk_path(scratch.path() + "/kv");
  config.set_kv_disk_size_gb(1);
  SingleCollective alone;
  const auto engine = Engine::Create(
      options, model.transformer(), alone,
      OpenDisk({.config = config, .shard = KvShardOf(options, model.transformer())}).value());
  ASSERT_EQ(engine.status().code(), absl::StatusCode::kResourceExhausted) << engine.status();
  EXPECT_THAT(engine.status().message(), HasSubstr("--kv-device-size-gb"));
  EXPECT_THAT(engine.status().message(), HasSubstr("--kv-on-demand-size-gb"));
}

}  // namespace
}  // namespace kvasir::worker
