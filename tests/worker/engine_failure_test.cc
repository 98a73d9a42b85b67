// Rows that fail alone, plans that the engine refuses, and plans that end it.
#include <functional>
#include <limits>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/worker/engine_fixture.h"
#include "worker/engine/engine.h"

namespace kvasir::worker {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST_F(EngineTest, NanRowFailsAloneWithDataLoss) {
  // Token 100 is poison, and is kept from being generated.
  TestModel model({.folder = folder_->folder(), .edit_weights = [](ModelWeights& weights) {
                     const kernels::TensorView table = weights.embedding.view;
                     table.As<float>()[100 * table.dim(1)] =
                         std::numeric_limits<float>::quiet_NaN();
                   }});
  TestRequest healthy = MakeRequest(200, kQuest);
  for (uint32_t& token : healthy.prompt) token %= 100;
  healthy.sampling.add_stop_token_ids(100);
  healthy.sampling.set_min_tokens(1000);
  TestRequest poisoned = healthy;
  poisoned.prompt[10] = 100;
  poisoned.prompt.resize(150);
  TestWorker worker(model);
  TestCoordinator coordinator({.chunk = 128});
  const size_t good = coordinator.Add(healthy);
  const size_t bad = coordinator.Add(poisoned);
  worker.Run(coordinator);
  EXPECT_EQ(coordinator.result(bad).status.code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(coordinator.result(bad).tokens.empty());
  ASSERT_TRUE(coordinator.result(good).status.ok());
  ExpectSameBits(RunAlone(healthy), worker.logits());
}

// Otherwise its KV would be sealed, and found by others.
TEST_F(EngineTest, NanFailsTheChunkThatReadsIt) {
  TestModel model({.folder = folder_->folder(), .edit_weights = [](ModelWeights& weights) {
                     const kernels::TensorView table = weights.embedding.view;
                     table.As<float>()[100 * table.dim(1)] =
                         std::numeric_limits<float>::quiet_NaN();
                   }});
  TestRequest request = MakeRequest(300, kStreaming);
  request.prompt[10] = 100;
  TestWorker worker(model);
  TestCoordinator coordinator({.chunk = 64});
  coordinator.Add(request);
  const auto reply = worker.engine().Step(coordinator.NextPlan());
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(static_cast<absl::StatusCode>(reply->results(0).error_code()),
            absl::StatusCode::kDataLoss);
}

// The second time with plans that were made before the coordinator heard of the failure.
TEST_F(EngineTest, RowWithoutRoomFailsAlone) {
  EngineOptions options = TestWorker::DefaultOptions();
  options.kv.device = 5 * model_->transformer().kv_layout(kernels::DType::kFloat32).block_bytes();
  for (const bool ahead : {false, true}) {
    TestWorker worker(*model_, options);
    TestCoordinator coordinator({.chunk = 256});
    const size_t fits = coordinator.Add(MakeRequest(200, kAll));
    const size_t does_not = coordinator.Add(MakeRequest(300, kAll));
    ahead ? worker.RunAhead(coordinator) : worker.Run(coordinator);
    EXPECT_TRUE(coordinator.result(fits).status.ok());
    EXPECT_EQ(coordinator.result(does_not).status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(coordinator.rows_in_vain(), ahead ? 1 : 0);
  }
}

TEST_F(EngineTest, BlocksFilledBeforeAFailureMayStillBeSealed) {
  TestModel model({.folder = folder_->folder(), .edit_weights = [](ModelWeights& weights) {
                     const kernels::TensorView table = weights.embedding.view;
                     table.As<float>()[100 * table.dim(1)] =
                         std::numeric_limits<float>::quiet_NaN();
                   }});
  TestRequest poisoned = MakeRequest(300, kStreaming);
  for (uint32_t& token : poisoned.prompt) token %= 100;
  poisoned.prompt[100] = 100;
  TestWorker worker(model);
  TestCoordinator coordinator({.chunk = 64, .keep_blocks = true});
  const size_t r = coordinator.Add(poisoned);
  worker.RunAhead(coordinator);
  EXPECT_EQ(coordinator.result(r).status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(coordinator.result(r).blocks,
              testing::SizeIs(1));  // sealed; the poison is in the next block
  EXPECT_EQ(coordinator.rows_in_vain(), 1);
}

TEST_F(EngineTest, MissingBlocksAreNamedAndNothingIsComputed) {
  TestWorker worker(*model_);
  TestCoordinator coordinator({});
  TestRequest request = MakeRequest(500, kAll);
  request.cached_blocks = {900, 901};
  coordinator.Add(request);
  v1::StepPlan plan = coordinator.NextPlan();
  auto reply = worker.engine().Step(plan);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_THAT(reply->missing_blocks(), testing::ElementsAre(900, 901));
  EXPECT_EQ(reply->results_size(), 0);
  // The slot is still free: the same start without the blocks is accepted.
  plan.set_step(plan.step() + 1);
  plan.mutable_starts(0)->clear_cached_blocks();
  plan.mutable_rows(0)->set_begin(0);
  plan.mutable_rows(0)->set_num_tokens(64);
  plan.mutable_rows(0)->clear_new_blocks();
  plan.mutable_rows(0)->add_new_blocks(1);
  reply = worker.engine().Step(plan);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->results_size(), 1);
}

TEST_F(EngineTest, PlanOfAnotherEpochIsRefused) {
  TestWorker worker(*model_);
  TestCoordinator coordinator({.group_epoch = 2});
  EXPECT_EQ(worker.engine().Step(coordinator.NextPlan()).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(EngineTest, RepeatedPlanIsRefused) {
  TestWorker worker(*model_);
  TestCoordinator coordinator({});
  const v1::StepPlan plan = coordinator.NextPlan();
  ASSERT_TRUE(worker.engine().Step(plan).ok());
  EXPECT_EQ(worker.engine().Step(plan).status().code(), absl::StatusCode::kFailedPrecondition);
}

// Examples of wrong plans: each changes a good one.
struct WrongPlan {
  std::string name;
  std::function<void(v1::StepPlan&)> spoil;
  std::string message;
};

class EngineWrongPlanTest : public EngineTest, public testing::WithParamInterface<WrongPlan> {};

TEST_P(EngineWrongPlanTest, IsInternalErrorAndEndsTheEngine) {
  TestWorker worker(*model_);
  TestCoordinator coordinator({.chunk = 128, .keep_blocks = true});
  coordinator.Add(MakeRequest(100, kQuest));  // leaves block 1 sealed
  worker.Run(coordinator);
  TestRequest running = MakeRequest(200, kQuest);
  coordinator.Add(running);
  for (int i = 0; i < 2; ++i) {
    const v1::StepPlan plan = coordinator.NextPlan();
    const auto reply = worker.engine().Step(plan);
    ASSERT_TRUE(reply.ok()) << reply.status();
    coordinator.Apply(plan, *reply);
  }
  coordinator.Add(MakeRequest(100, kQuest));
  v1::StepPlan plan = coordinator.NextPlan();
  GetParam().spoil(plan);
  const auto reply = worker.engine().Step(plan);
  EXPECT_EQ(reply.status().code(), absl::StatusCode::kInternal) << reply.status();
  EXPECT_THAT(std::string(reply.status().message()), HasSubstr(GetParam().message));
  EXPECT_EQ(worker.engine().Step(coordinator.NextPlan()).status(), reply.status());
}

// Row 0 decodes slot 0 (200 tokens of prompt); row 1 is the whole prompt of start 0 in slot 1.
INSTANTIATE_TEST_SUITE_P(
    Plans, EngineWrongPlanTest,
    testing::Values(
        WrongPlan{"SlotOutOfRange", [](auto& p) { p.mutable_starts(0)->set_slot(16); }, "slot 16"},
        WrongPlan{"SlotTaken", [](auto& p) { p.mutable_starts(0)->set_slot(0); }, "taken"},
        WrongPlan{"EmptyPrompt", [](auto& p) { p.mutable_starts(0)->clear_tokens(); }, "0 tokens"},
        WrongPlan{"PromptTooLong",
                  [](auto& p) {
                    for (int i = 0; i < 5000; ++i) p.mutable_starts(0)->add_tokens(1);
                  },
                  "4096"},
        WrongPlan{"NothingButAnswer",
                  [](auto& p) { p.mutable_starts(0)->set_num_prompt_tokens(0); },
                  "a prompt of 0 of its tokens"},
        WrongPlan{"PromptLongerThanTheTokens",
                  [](auto& p) { p.mutable_starts(0)->set_num_prompt_tokens(101); },
                  "a prompt of 101 of its tokens; it must have 1 to 100"},
        WrongPlan{"TokenOutOfVocabulary", [](auto& p) { p.mutable_starts(0)->set_tokens(3, 101); },
                  "token 101"},
        WrongPlan{"StopTokenOutOfVocabulary",
                  [](auto& p) {
                    p.mutable_starts(0)->mutable_sampling()->add_stop_token_ids(0xffffffffu);
                  },
                  "token 4294967295"},
        WrongPlan{"NoSuchPolicy", [](auto& p) { p.mutable_starts(0)->set_policy_index(99); },
                  "policy 99"},
        WrongPlan{"NothingLeftToCompute",
                  [](auto& p) {
                    p.mutable_starts(0)->add_cached_blocks(1);
                    p.mutable_starts(0)->add_cached_blocks(1);
                  },
                  "nothing to compute"},
        WrongPlan{"RowOfFreeSlot", [](auto& p) { p.mutable_rows(1)->set_slot(7); }, "slot 7"},
        WrongPlan{"RowOfNoSlot", [](auto& p) { p.mutable_rows(1)->set_slot(0xffffffffu); },
                  "slot 4294967295"},
        WrongPlan{"TwoRowsOfASlot", [](auto& p) { *p.add_rows() = p.rows(0); }, "two rows"},
        WrongPlan{"NoTokens", [](auto& p) { p.mutable_rows(0)->set_num_tokens(0); }, "nothing"},
        WrongPlan{"TooManyTokens", [](auto& p) { p.mutable_rows(0)->set_num_tokens(0xffffffffu); },
                  "the step holds 4096"},
        WrongPlan{"UnknownTokens", [](auto& p) { p.mutable_rows(0)->set_num_tokens(2); }, "tokens"},
        WrongPlan{"GapInKv", [](auto& p) { p.mutable_rows(1)->set_begin(64); }, "KV ends at 0"},
        WrongPlan{"TruncatedIntoSealedBlock",
                  [](auto& p) {
                    p.mutable_rows(0)->set_begin(185);
                    p.mutable_rows(0)->set_sample(false);
                    p.mutable_rows(0)->clear_new_blocks();
                  },
                  "sealed"},
        WrongPlan{"ChunkNotOnAPage",
                  [](auto& p) {
                    p.mutable_rows(1)->set_num_tokens(63);
                    p.mutable_rows(1)->set_sample(false);
                  },
                  "multiple of 64"},
        WrongPlan{"SamplesInsidePrompt",
                  [](auto& p) {
                    p.mutable_rows(1)->set_num_tokens(64);
                    p.mutable_rows(1)->mutable_new_blocks()->RemoveLast();
                  },
                  "sampling inside"},
        WrongPlan{"TooFewBlocks",
                  [](auto& p) { p.mutable_rows(1)->mutable_new_blocks()->RemoveLast(); },
                  "new blocks"},
        WrongPlan{"TooManyBlocks", [](auto& p) { p.mutable_rows(1)->add_new_blocks(77); },
                  "new blocks"},
        WrongPlan{"BlockInUse", [](auto& p) { p.mutable_rows(1)->set_new_blocks(0, 1); }, "1"},
        WrongPlan{"SealsUnknownBlock",
                  [](auto& p) {
                    auto& seal = *p.add_seals();
                    seal.set_block_id(12345);
                    seal.set_prefix_hash(std::string(32, 'x'));
                  },
                  "12345"},
        WrongPlan{"SealsSealedBlock",
                  [](auto& p) {
                    auto& seal = *p.add_seals();
                    seal.set_block_id(1);
                    seal.set_prefix_hash(std::string(32, 'x'));
                  },
                  "block 1"},
        WrongPlan{"SealsOpenBlock",
                  [](auto& p) {
                    auto& seal = *p.add_seals();
                    seal.set_block_id(6);  // the last of the running prompt, not full
                    seal.set_prefix_hash(std::string(32, 'x'));
                  },
                  "not complete"},
        WrongPlan{"StoresHalfABlock", [](auto& p) { p.add_persists()->add_tokens(1); }, "1 tokens"},
        WrongPlan{"RestoresWithoutAHash", [](auto& p) { p.add_restores()->set_block_id(500); },
                  "0 bytes"},
        WrongPlan{"RestoresABlockInUse",
                  [](auto& p) {
                    auto& restore = *p.add_restores();
                    restore.set_block_id(1);
                    restore.set_prefix_hash(std::string(32, 'x'));
                  },
                  "block 1"},
        WrongPlan{"FreesFreeSlot", [](auto& p) { p.add_free_slots(9); }, "slot 9"}),
    [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace kvasir::worker
