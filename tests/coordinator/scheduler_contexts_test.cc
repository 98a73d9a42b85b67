// Blocks of contexts: pins in memory and on disk, demotion, erasing, export and import.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

#include "tests/coordinator/scheduler_fixture.h"

namespace kvasir::coordinator {
namespace {

class SchedulerContextsTest : public SchedulerTest {
 protected:
  static constexpr int64_t kHostBlocks = 24;

  void MakeSmall(int64_t disk_blocks = 0) {
    SymbolicWorkerOptions worker = {.host_blocks = kHostBlocks, .vocab_size = kVocab};
    worker.disk_blocks = disk_blocks;
    SchedulerOptions options = Options(worker);
    options.longest_sequence = 12 * kBlockTokens;
    Make(worker, options);
  }
  static ContextChain Chain(int64_t number, const std::vector<int32_t>& tokens) {
    return {.context = number,
            .tenant = {},
            .prefill = DensePolicy().prefill,
            .tokens = std::make_shared<const std::vector<int32_t>>(tokens)};
  }
  // Reads a prompt, and returns the tokens of it that were cached.
  int64_t Read(const std::vector<int32_t>& prompt) {
    const SequenceId id = Add(Spec(prompt, 1));
    RunUntilIdle();
    return progress_[id].front().cached_tokens;
  }
  // Reads other prompts until all room was used.
  void FillTheCache(int32_t seed) {
    for (int32_t i = 0; i < 4; ++i) Read(Prompt(10 * kBlockTokens, seed + i));
  }
  ContextBlocks& contexts() { return scheduler_->contexts(); }
};

TEST_F(SchedulerContextsTest, PinnedBlocksStayUnderPressureAndOthersGo) {
  MakeSmall();
  const std::vector<int32_t> pinned = Prompt(4 * kBlockTokens, 100);
  const std::vector<int32_t> other = Prompt(4 * kBlockTokens, 200);
  Read(pinned);
  Read(other);
  const PinnedBlocks pin = contexts().PinHost(Chain(1, pinned), 100);
  EXPECT_EQ(pin.granted, 4);
  EXPECT_EQ(pin.present, 4);
  const int64_t evictions = scheduler_->stats().index.evictions;
  FillTheCache(300);
  EXPECT_GT(scheduler_->stats().index.evictions, evictions + 10);
  EXPECT_EQ(contexts().CountInMemory(Chain(1, pinned)), 4);
  EXPECT_EQ(contexts().CountInMemory(Chain(2, other)), 0);
  EXPECT_EQ(scheduler_->stats().pinned_host_blocks, 4);
  contexts().UnpinHost(1);
  FillTheCache(400);
  EXPECT_EQ(contexts().CountInMemory(Chain(1, pinned)), 0);
}

TEST_F(SchedulerContextsTest, PinsLeaveRoomForTheLongestSequence) {
  MakeSmall();
  const std::vector<int32_t> first = Prompt(9 * kBlockTokens, 1);
  const std::vector<int32_t> second = Prompt(9 * kBlockTokens, 2);
  Read(first);
  Read(second);
  EXPECT_EQ(contexts().PinHost(Chain(1, first), 100).granted, 9);
  EXPECT_EQ(contexts().PinHost(Chain(2, second), 100).granted, kHostBlocks - 12 - 9);
  EXPECT_EQ(contexts().PinHost(Chain(1, first), 2).granted, 2);  // in place of the first pin
  EXPECT_EQ(contexts().PinHost(Chain(2, second), 100).granted, 9);
  const SequenceId longest = Add(Spec(Prompt(11 * kBlockTokens, 3), kBlockTokens));
  RunUntilIdle();
  EXPECT_EQ(tokens_[longest].size(), static_cast<size_t>(kBlockTokens));
}

TEST_F(SchedulerContextsTest, APinGrantsMoreThanIsThere) {
  MakeSmall();
  const std::vector<int32_t> tokens = Prompt(5 * kBlockTokens, 1);
  Read({tokens.begin(), tokens.begin() + 3 * kBlockTokens});
  const PinnedBlocks pin = contexts().PinHost(Chain(1, tokens), 100);
  EXPECT_EQ(pin.granted, 5);
  EXPECT_EQ(pin.present, 3);
}

TEST_F(SchedulerContextsTest, DiskPinsAreToldOnceForBlocksThatContextsShare) {
  MakeSmall(/*disk_blocks=*/100);
  const std::vector<int32_t> longer = Prompt(4 * kBlockTokens, 1);
  const std::vector<int32_t> shorter = {longer.begin(), longer.begin() + 2 * kBlockTokens};
  Read(longer);
  ASSERT_EQ(worker_->num_stored(), 4);
  EXPECT_EQ(contexts().PinDisk(Chain(1, longer), 100).present, 4);
  EXPECT_EQ(contexts().PinDisk(Chain(2, shorter), 100).present, 2);
  ASSERT_TRUE(Step());
  EXPECT_EQ(plan_.disk_pins_size(), 4);
  contexts().UnpinDisk(1);
  ASSERT_TRUE(Step());
  EXPECT_EQ(plan_.disk_unpins_size(), 2);
  EXPECT_EQ(scheduler_->stats().pinned_disk_blocks, 2);
}

TEST_F(SchedulerContextsTest, AnEighthOfTheDiskIsNotPinned) {
  MakeSmall(/*disk_blocks=*/16);
  EXPECT_EQ(contexts().PinDisk(Chain(1, Prompt(20 * kBlockTokens, 1)), 100).granted, 14);
  EXPECT_EQ(contexts().PinDisk(Chain(2, Prompt(kBlockTokens, 2)), 100).granted, 0);
}

TEST_F(SchedulerContextsTest, DemotedBlocksAreOnDiskAndNotInMemory) {
  MakeSmall(/*disk_blocks=*/100);
  const std::vector<int32_t> tokens = Prompt(4 * kBlockTokens, 1);
  Read(tokens);
  EXPECT_EQ(contexts().Demote(Chain(1, tokens)), 4);
  Step();
  EXPECT_EQ(contexts().CountInMemory(Chain(1, tokens)), 0);
  const int64_t reads = worker_->reads();
  EXPECT_EQ(Read(tokens), 3 * kBlockTokens);  // the last token is computed
  EXPECT_EQ(worker_->reads() - reads, 3);
}

TEST_F(SchedulerContextsTest, ErasingATenantForgetsItsBlocksAndNoOthers) {
  MakeSmall(/*disk_blocks=*/100);
  const std::vector<int32_t> mine = Prompt(3 * kBlockTokens, 1);
  const std::vector<int32_t> theirs = Prompt(2 * kBlockTokens, 2);
  SequenceSpec spec = Spec(mine, 1);
  spec.tenant = "mine";
  Add(std::move(spec));
  RunUntilIdle();
  Read(theirs);
  ASSERT_EQ(worker_->num_stored(), 5);
  ContextChain chain = Chain(1, mine);
  chain.tenant = "mine";
  ASSERT_EQ(contexts().CountInMemory(chain), 3);
  absl::StatusOr<v1::Erased> erased = absl::UnknownError("not told");
  contexts().Erase({.tenant = std::make_shared<const std::string>("mine")},
                   [&](const absl::StatusOr<v1::Erased>& sums) { erased = sums; });
  RunUntilIdle();
  ASSERT_TRUE(erased.ok()) << erased.status();
  EXPECT_EQ(erased->disk_blocks(), 3u);
  EXPECT_EQ(worker_->num_stored(), 2);
  EXPECT_EQ(contexts().CountInMemory(chain), 0);
  EXPECT_EQ(contexts().CountInMemory(Chain(2, theirs)), 2);
  EXPECT_EQ(Read(theirs), kBlockTokens);
}

TEST_F(SchedulerContextsTest, ErasingAContextEndsItsPins) {
  MakeSmall(/*disk_blocks=*/100);
  const std::vector<int32_t> tokens = Prompt(3 * kBlockTokens, 1);
  Read(tokens);
  contexts().PinHost(Chain(1, tokens), 100);
  contexts().PinDisk(Chain(1, tokens), 100);
  bool is_erased = false;
  contexts().Erase({.chain = std::make_shared<const ContextChain>(Chain(1, tokens))},
                   [&](const absl::StatusOr<v1::Erased>& sums) { is_erased = sums.ok(); });
  RunUntilIdle();
  EXPECT_TRUE(is_erased);
  EXPECT_EQ(worker_->num_stored(), 0);
  EXPECT_EQ(worker_->num_blocks(), 0);
  EXPECT_EQ(scheduler_->stats().pinned_host_blocks, 0);
  EXPECT_EQ(scheduler_->stats().pinned_disk_blocks, 0);
}

TEST_F(SchedulerContextsTest, AnEraseThatTheGroupDoesNotOutliveIsAnError) {
  MakeSmall();
  Read(Prompt(kBlockTokens, 1));
  absl::Status told;
  contexts().Erase({}, [&](const absl::StatusOr<v1::Erased>& sums) { told = sums.status(); });
  scheduler_->GiveUp();
  EXPECT_EQ(told.code(), absl::StatusCode::kUnavailable);
}

// --- exchange -----------------------------------------------------------------------------------

class SchedulerExchangeTest : public SchedulerContextsTest {
 protected:
  SchedulerExchangeTest() { MakeSmall(); }

  ContextExchange& exchange() { return scheduler_->exchange(); }
  void Import(int64_t context) {
    told_ = absl::UnknownError("not told");
    exchange().Import(context, {}, [this](const absl::Status& status) { told_ = status; });
  }
  // The rank answers the import of the last plan.
  void Answer(absl::StatusCode code = absl::StatusCode::kOk) {
    ASSERT_EQ(plan_.imports_size(), 1);
    v1::TierReport report;
    v1::RestoredBlock& restored = *report.add_restored();
    restored.set_block_id(plan_.imports(0).block_id());
    restored.set_error_code(static_cast<int32_t>(code));
    ASSERT_EQ(scheduler_->OnTierReport(0, report, now_), absl::OkStatus());
    ASSERT_EQ(scheduler_->CheckIntegrity(), absl::OkStatus());
  }

  const std::vector<int32_t> tokens_of_context_ = Prompt(20 * kBlockTokens, 1);
  const ContextChain chain_ = Chain(1, tokens_of_context_);
  absl::Status told_;
};

TEST_F(SchedulerExchangeTest, AnImportedBlockIsFoundOnceTheRanksHaveIt) {
  EXPECT_EQ(exchange().Begin(chain_), 0);
  for (int64_t i = 0; i < 2; ++i) {
    Import(1);
    ASSERT_TRUE(Step());
    const v1::BlockImport& import = plan_.imports(0);
    EXPECT_EQ(import.tokens(5),
              static_cast<uint32_t>(tokens_of_context_[static_cast<size_t>(i * kBlockTokens + 5)]));
    EXPECT_EQ(import.owner().size(), 32u);
    EXPECT_EQ(contexts().CountInMemory(chain_), i);
    Answer();
    EXPECT_EQ(told_, absl::OkStatus());
    EXPECT_EQ(contexts().CountInMemory(chain_), i + 1);
  }
  exchange().End(1);
  EXPECT_EQ(exchange().Begin(chain_), 2);
}

TEST_F(SchedulerExchangeTest, ABlockThatARankRefusesIsGone) {
  exchange().Begin(chain_);
  Import(1);
  ASSERT_TRUE(Step());
  Answer(absl::StatusCode::kDataLoss);
  EXPECT_TRUE(absl::IsDataLoss(told_)) << told_;
  EXPECT_EQ(contexts().CountInMemory(chain_), 0);
  ASSERT_TRUE(Step());
  EXPECT_EQ(plan_.drop_blocks_size(), 1);
}

TEST_F(SchedulerExchangeTest, AfterItsEndNothingGoesToTheRanks) {
  exchange().Begin(chain_);
  Import(1);
  exchange().End(1);
  EXPECT_TRUE(absl::IsAborted(told_)) << told_;
  if (Step()) {
    EXPECT_EQ(plan_.imports_size(), 0);
  }
  Import(1);
  EXPECT_TRUE(absl::IsAborted(told_)) << told_;
}

TEST_F(SchedulerExchangeTest, WhatIsOnItsWayAtTheEndIsNotFound) {
  exchange().Begin(chain_);
  Import(1);
  ASSERT_TRUE(Step());
  exchange().End(1);
  Answer();
  EXPECT_TRUE(absl::IsAborted(told_)) << told_;
  EXPECT_EQ(contexts().CountInMemory(chain_), 0);
}

TEST_F(SchedulerExchangeTest, ImportsLeaveRoomForTheLongestSequence) {
  exchange().Begin(chain_);
  int64_t imported = 0;
  for (;; ++imported) {
    Import(1);
    if (absl::IsResourceExhausted(told_)) break;
    ASSERT_TRUE(Step());
    Answer();
  }
  EXPECT_EQ(imported, kHostBlocks - 12);
}

TEST_F(SchedulerExchangeTest, WhatALostGroupWasAskedIsAnswered) {
  exchange().Begin(chain_);
  Import(1);
  ASSERT_TRUE(Step());
  scheduler_->GiveUp();
  EXPECT_TRUE(absl::IsUnavailable(told_)) << told_;
}

}  // namespace
}  // namespace kvasir::coordinator
