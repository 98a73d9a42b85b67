// An engine on a GPU over a real disk tier, after a restart: the restored KV gives the bits that
// the computed KV gave, through bounds and key codes too.
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
#include "tests/worker/disk_round_trip.h"
#include "tests/worker/model/golden.h"
#include "tests/worker/test_coordinator.h"
#include "tests/worker/test_worker.h"
#include "worker/disk.h"

namespace kvasir::worker {
namespace {

using ::testing::SizeIs;

constexpr char kModel[] = "tests/model/needle-8k";
constexpr char kText[] = "tests/model/golden/needle-8k.safetensors";
constexpr int64_t kChunk = 256;
// Whole chunks, so that the rest of the prompt is computed in the same steps.
constexpr size_t kStoredBlocks = 10 * kChunk / kernels::kPageTokens;
constexpr uint64_t kRestoredIds = 100000;

struct DiskCase {
  std::string selector;
  float top_p = 0;
};

class CudaEngineDiskTest : public ::testing::TestWithParam<DiskCase> {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
      GTEST_SKIP() << "no GPU on this machine";
    }
    model_ = std::make_unique<TestModel>(TestWorkerOptions{.folder = kModel,
                                                           .dtype = kernels::DType::kBFloat16,
                                                           .max_model_len = 8192,
                                                           .num_threads = 4,
                                                           .device = "cuda",
                                                           .edit_weights = {}});
  }
  static EngineOptions Options() {
    EngineOptions options = TestWorker::DefaultOptions();
    options.policies = {MakePolicy("all", GetParam().selector)};
    if (GetParam().top_p > 0) options.policies[0].mutable_decode()->set_top_p(1);
    options.kv_dtype = kernels::DType::kBFloat16;
    options.kv.device = 128 << 20;
    options.kv.host = 256 << 20;
    options.max_num_batched_tokens = kChunk;
    options.weights_hash = std::string(32, 'w');
    options.kv_form = "rotated/bfloat16";
    return options;
  }
  std::unique_ptr<TestWorker> Start() {
    v1::KvConfig config;
    config.set_kv_disk_path(scratch_.path() + "/kv");
    config.set_kv_disk_size_gb(1);
    auto disk = OpenDisk({.config = config, .shard = KvShardOf(Options(), model_->transformer())});
    return std::make_unique<TestWorker>(*model_, Options(), std::move(disk).value());
  }
  // Returns the part of the text from `begin` on.
  static TestRequest Request(int64_t begin) {
    const std::vector<uint32_t> text = GoldenFile(kText).Run(8000).tokens;
    TestRequest request = {.prompt = {text.begin() + begin, text.begin() + begin + 3000},
                           .max_tokens = 16,
                           .policy = 0,
                           .prefill = MakeNumbers(32, 128, 256),
                           .decode = MakeNumbers(16, 128, 256),
                           .tail_tokens = 20,
                           .sampling = Greedy(),
                           .cached_blocks = {}};
    if (GetParam().top_p > 0) request.decode.set_top_p(GetParam().top_p);
    return request;
  }

  std::unique_ptr<TestModel> model_;
  kvasir::testing::ScratchDirectory scratch_;
  std::vector<std::string> stored_;  // prefix hashes
};

TEST_P(CudaEngineDiskTest, ARoundTripOverTheDiskDoesNotChangeLogits) {
  TestRequest request = Request(0);
  std::map<std::pair<int64_t, int64_t>, TestWorker::Logits> cold;
  {
    const std::unique_ptr<TestWorker> worker = Start();
    ComputeAndStore(*worker, request, kChunk, kStoredBlocks, stored_);
    cold = worker->logits();
    EXPECT_EQ(worker->engine().store().stats().tier.written_blocks, kStoredBlocks);
    EXPECT_EQ(worker->engine().store().stats().device_misses, 0);
  }
  const std::unique_ptr<TestWorker> worker = Start();  // after a restart
  TestCoordinator coordinator({.chunk = kChunk});
  // When blocks come back into this memory, it holds digests of another text.
  coordinator.Add(Request(4000));
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
