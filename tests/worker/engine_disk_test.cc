// An engine over a real disk tier: restored blocks equal what was written, to the last bit.
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/scratch_directory.h"
#include "tests/worker/disk_round_trip.h"
#include "tests/worker/random_model_fixture.h"
#include "tests/worker/test_coordinator.h"
#include "tests/worker/test_worker.h"
#include "worker/disk.h"

namespace kvasir::worker {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr uint64_t kRestoredIds = 1000;

class EngineDiskTest : public RandomModelFixture {
 protected:
  static EngineOptions Options() {
    EngineOptions options = TestWorker::DefaultOptions();
    options.weights_hash = std::string(32, 'w');
    options.kv_form = "rotated/float32";
    return options;
  }
  absl::StatusOr<std::unique_ptr<kvstore::Tier>> OpenDisk(const EngineOptions& options = Options(),
                                                          double gb = 0.1) {
    v1::KvConfig config;
    config.set_kv_disk_path(scratch_.path() + "/kv");
    config.set_kv_disk_size_gb(gb);
    return worker::OpenDisk({.config = config, .shard = KvShardOf(options, model_->transformer())});
  }
  std::unique_ptr<TestWorker> Start() {
    return std::make_unique<TestWorker>(*model_, Options(), OpenDisk().value());
  }

  static TestRequest Request(uint32_t policy) {
    std::vector<uint32_t> prompt;
    std::mt19937 random(7);
    for (int i = 0; i < 500; ++i) prompt.push_back(static_cast<uint32_t>(random() % 101));
    return MakeSparseRequest(std::move(prompt), policy);
  }

  // Returns its first seven blocks, with 448 tokens.
  void Store(TestWorker& worker, const TestRequest& request) {
    ComputeAndStore(worker, request, /*chunk=*/128, 7, stored_);
  }
  v1::TierReport Restore(TestWorker& worker, TestCoordinator& coordinator) {
    return RestoreBlocks(worker, coordinator, stored_, kRestoredIds);
  }
  std::vector<std::string> Segments() const {
    std::vector<std::string> paths;
    for (const auto& file :
         std::filesystem::directory_iterator(scratch_.path() + "/kv/head0/segments")) {
      paths.push_back(file.path());
    }
    return paths;
  }

  kvasir::testing::ScratchDirectory scratch_;
  std::vector<std::string> stored_;  // prefix hashes
};

// Runs for every policy of DefaultOptions.
class EngineDiskPolicyTest : public EngineDiskTest,
                             public ::testing::WithParamInterface<uint32_t> {};

TEST_P(EngineDiskPolicyTest, ARoundTripOverTheDiskDoesNotChangeLogits) {
  TestRequest request = Request(GetParam());
  std::map<std::pair<int64_t, int64_t>, TestWorker::Logits> cold;
  {
    const std::unique_ptr<TestWorker> worker = Start();
    Store(*worker, request);
    cold = worker->logits();
    EXPECT_THAT(worker->engine().TakeTierReport().stored(), SizeIs(7));
    EXPECT_EQ(worker->engine().store().stats().tier.written_blocks, 7);
  }
  const std::unique_ptr<TestWorker> worker = Start();  // after a restart
  const std::vector<v1::TierReport> inventory = worker->engine().Inventory();
  ASSERT_THAT(inventory, SizeIs(1));
  EXPECT_THAT(inventory[0].stored(), SizeIs(7));
  EXPECT_THAT(inventory[0].stored(0).tokens(), SizeIs(64));
  TestCoordinator coordinator({.chunk = 128});
  const v1::TierReport report = Restore(*worker, coordinator);
  ASSERT_THAT(report.restored(), SizeIs(7));
  for (const v1::RestoredBlock& restored : report.restored()) {
    EXPECT_EQ(restored.error_code(), 0) << restored.error_message();
    request.cached_blocks.push_back(0);
  }
  for (size_t i = 0; i < 7; ++i) request.cached_blocks[i] = kRestoredIds + i;
  const size_t r = coordinator.Add(request);
  worker->Run(coordinator);
  ASSERT_EQ(worker->logits().size(), cold.size());
  for (const auto& [place, logits] : cold) {
    ASSERT_EQ(std::memcmp(logits.data(), worker->logits().at(place).data(),
                          logits.size() * sizeof(float)),
              0)
        << "position " << place.second;
  }
  EXPECT_EQ(coordinator.result(r).accounting.cached_disk_tokens(), 448u);
  EXPECT_EQ(worker->engine().store().stats().tier.read_blocks, 7);
}

INSTANTIATE_TEST_SUITE_P(Policies, EngineDiskPolicyTest, ::testing::Range(0u, 11u));

TEST_F(EngineDiskTest, DamagedAndMissingBlocksAreReportedAndNeverUsed) {
  {
    const std::unique_ptr<TestWorker> worker = Start();
    Store(*worker, Request(0));
  }
  const std::vector<std::string> segments = Segments();
  ASSERT_THAT(segments, SizeIs(1));
  std::fstream file(segments[0], std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(20000);  // in the pages of the first extent
  file.put('x');
  file.close();
  const std::unique_ptr<TestWorker> worker = Start();
  stored_.push_back(std::string(32, 'n'));  // never stored
  TestCoordinator coordinator({.chunk = 128});
  const v1::TierReport report = Restore(*worker, coordinator);
  ASSERT_THAT(report.restored(), SizeIs(8));
  int damaged = 0, missing = 0;
  for (const v1::RestoredBlock& restored : report.restored()) {
    const auto code = static_cast<absl::StatusCode>(restored.error_code());
    damaged += code == absl::StatusCode::kDataLoss ? 1 : 0;
    missing += code == absl::StatusCode::kNotFound ? 1 : 0;
    const kernels::BlockId id(static_cast<int64_t>(restored.block_id()));
    EXPECT_EQ(worker->engine().store().Holds(id), restored.error_code() == 0);
  }
  EXPECT_EQ(damaged, 1);
  EXPECT_EQ(missing, 1);
  EXPECT_THAT(report.forgotten(), SizeIs(1));
  EXPECT_EQ(worker->engine().store().stats().tier.checksum_failures, 1);
}

TEST_F(EngineDiskTest, ARestoreThatIsDroppedOnItsWayLeavesNothing) {
  const std::unique_ptr<TestWorker> worker = Start();
  Store(*worker, Request(0));
  TestCoordinator coordinator({});
  v1::StepPlan plan = coordinator.NextPlan();
  plan.set_step(1000);
  for (size_t i = 0; i < stored_.size(); ++i) {
    v1::BlockRestore& restore = *plan.add_restores();
    restore.set_block_id(kRestoredIds + i);
    restore.set_prefix_hash(stored_[i]);
  }
  const int64_t used = worker->engine().store().stats().host_blocks_used;
  ASSERT_TRUE(worker->engine().Step(plan).ok());
  v1::StepPlan drop = coordinator.NextPlan();
  drop.set_step(1001);
  for (size_t i = 0; i < stored_.size(); ++i) drop.add_drop_blocks(kRestoredIds + i);
  ASSERT_TRUE(worker->engine().Step(drop).ok());
  while (worker->engine().TierIsBusy()) worker->engine().PollTier();
  EXPECT_EQ(worker->engine().store().stats().host_blocks_used, used);
  EXPECT_TRUE(worker->engine().store().CheckIntegrity().ok());
}

TEST_F(EngineDiskTest, WithoutADiskNothingIsStored) {
  TestWorker worker(*model_, Options());
  Store(worker, Request(0));
  EXPECT_THAT(worker.engine().TakeTierReport().stored(), IsEmpty());
  EXPECT_THAT(worker.engine().Inventory(), IsEmpty());
  EXPECT_FALSE(worker.engine().TierIsBusy());
}

// --- opening

TEST_F(EngineDiskTest, AStoreInUseIsRefusedAndNamesTheOwner) {
  const std::unique_ptr<TestWorker> worker = Start();
  const absl::Status second = OpenDisk().status();
  EXPECT_EQ(second.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(second.message()), HasSubstr("kv_disk_path"));
}

TEST_F(EngineDiskTest, AStoreOfAnotherModelIsRefused) {
  { const std::unique_ptr<TestWorker> worker = Start(); }
  EngineOptions other = Options();
  other.weights_hash = std::string(32, 'x');
  EXPECT_EQ(OpenDisk(other).status().code(), absl::StatusCode::kFailedPrecondition);
  other = Options();
  other.kv_dtype = kernels::DType::kBFloat16;
  EXPECT_EQ(OpenDisk(other).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(OpenDisk().ok());
}

TEST_F(EngineDiskTest, AStoreOfVersion1IsRefusedWithWhatToDo) {
  std::filesystem::create_directories(scratch_.path() + "/kv/tp1-rank0/segments");
  const absl::Status status = OpenDisk().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("Remove the folders tp*-rank*"));
  std::filesystem::remove_all(scratch_.path() + "/kv/tp1-rank0");
  EXPECT_TRUE(OpenDisk().ok());
}

TEST_F(EngineDiskTest, ACapacityBelowOneBlockIsRefused) {
  const absl::Status status = OpenDisk(Options(), 1e-6).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("kv_disk_size_gb"));
}

TEST_F(EngineDiskTest, AFolderThatCannotBeMadeIsRefused) {
  std::ofstream(scratch_.path() + "/kv") << "a file";
  EXPECT_FALSE(OpenDisk().ok());
}

}  // namespace
}  // namespace kvasir::worker
