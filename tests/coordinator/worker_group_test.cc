#include "coordinator/group/worker_group.h"

#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/coordinator/group_steps.h"
#include "tests/support/fake_clock.h"
#include "tests/support/fake_rank.h"

namespace kvasir::coordinator {
namespace {

using kvasir::testing::FakeClock;
using kvasir::testing::FakeRank;
using kvasir::testing::FakeRankOptions;
using ::testing::HasSubstr;
using ::testing::SizeIs;

// Fake streams to workers that answer within Send.
class FakeNetwork {
 public:
  std::map<std::string, FakeRankOptions> workers;
  std::map<std::string, WorkerClient::Listener*> streams;  // open streams
  std::map<std::string, v1::ShardPlan> plans;              // the last plan of each

  WorkerDialer dialer() {
    return [this](const std::string& address, WorkerClient::Listener& listener) {
      streams[address] = &listener;
      return std::make_unique<Client>(*this, address, listener);
    };
  }

 private:
  class Client final : public WorkerClient {
   public:
    Client(FakeNetwork& network, std::string address, Listener& listener)
        : network_(network),
          address_(std::move(address)),
          listener_(listener),
          rank_(network.workers[address_]) {}
    ~Client() override { network_.streams.erase(address_); }
    void Send(v1::CoordinatorMessage message) override {
      if (closed_) return;
      if (message.has_shard_plan()) network_.plans[address_] = message.shard_plan();
      absl::StatusOr<std::vector<v1::WorkerMessage>> answers = rank_.Answer(message);
      if (!answers.ok()) {
        closed_ = true;
        return listener_.OnClosed(answers.status());
      }
      for (v1::WorkerMessage& answer : *answers) listener_.OnMessage(std::move(answer));
    }

   private:
    FakeNetwork& network_;
    const std::string address_;
    Listener& listener_;
    FakeRank rank_;
    bool closed_ = false;
  };
};

class WorkerGroupTest : public ::testing::Test {
 protected:
  std::unique_ptr<WorkerGroup> Make(std::vector<std::string> addresses) {
    return CreateWorkerGroup({.addresses = std::move(addresses),
                              .shard_plan = {},
                              .form_silence = absl::Minutes(10),
                              .step_timeout = absl::Minutes(5),
                              .reply_spread = absl::Seconds(30)},
                             network_.dialer(), clock_);
  }

  FakeClock clock_;
  FakeNetwork network_;
};

TEST_F(WorkerGroupTest, FormsWithTheCapacitiesOfTheSmallestRank) {
  network_.workers["a"] = {.worker = {.device_blocks = 10, .host_blocks = 70}};
  network_.workers["b"] = {.worker = {.device_blocks = 20, .host_blocks = 50}};
  std::unique_ptr<WorkerGroup> group = Make({"a", "b"});
  absl::StatusOr<GroupInfo> info = group->Form();
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->epoch, 1u);
  EXPECT_EQ(info->device_blocks, 10);
  EXPECT_EQ(info->host_blocks, 50);
  EXPECT_EQ(info->vocab_size, 50);
  EXPECT_THAT(info->ranks, SizeIs(2));
  absl::StatusOr<v1::StepReply> reply = Step(*group, EmptyPlan(1, 1));
  EXPECT_TRUE(reply.ok()) << reply.status();
}

TEST_F(WorkerGroupTest, EveryFormationHasItsOwnEpoch) {
  std::unique_ptr<WorkerGroup> group = Make({"a"});
  EXPECT_EQ(group->Form()->epoch, 1u);
  group->Disband();
  EXPECT_EQ(Step(*group, EmptyPlan(1, 1)).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(group->Form()->epoch, 2u);
}

TEST_F(WorkerGroupTest, TierReportsAreGatheredByRankAndBelongToTheirFormation) {
  network_.workers["b"] = {.worker = {.disk_blocks = 30}};
  std::unique_ptr<WorkerGroup> group = Make({"a", "b"});
  int calls = 0;
  group->SetTierReportCallback([&calls] { ++calls; });
  EXPECT_EQ(group->Form()->disk_blocks, 0);  // of rank 0
  v1::WorkerMessage message;
  message.mutable_tier_report()->add_forgotten("hash");
  network_.streams["b"]->OnMessage(message);
  EXPECT_TRUE(Step(*group, EmptyPlan(1, 1)).ok());  // a tier report is not an answer to a step
  EXPECT_EQ(calls, 1);
  const std::vector<RankTierReport> reports = group->TakeTierReports();
  ASSERT_THAT(reports, SizeIs(1));
  EXPECT_EQ(reports[0].rank, 1);
  EXPECT_EQ(reports[0].report.forgotten(0), "hash");
  EXPECT_TRUE(group->TakeTierReports().empty());
  network_.streams["a"]->OnMessage(message);
  ASSERT_TRUE(group->Form().ok());
  EXPECT_TRUE(group->TakeTierReports().empty());
}

TEST_F(WorkerGroupTest, RanksThatDoNotFitAreRefused) {
  const std::vector<std::pair<const char*, void (*)(v1::Ready&)>> cases = {
      {"weights", [](v1::Ready& r) { r.set_weights_hash("other"); }},
      {"dtype", [](v1::Ready& r) { r.set_kv_form("rotated/bfloat16"); }},
      {"form", [](v1::Ready& r) { r.set_kv_form("unrotated/float32"); }},
      {"vocabulary", [](v1::Ready& r) { r.set_vocab_size(51); }},
      {"context", [](v1::Ready& r) { r.set_max_model_len(1); }},
  };
  for (const auto& [name, change] : cases) {
    SCOPED_TRACE(name);
    network_.workers["b"] = {.tweak = [change = change](v1::WorkerMessage& m) {
      if (m.has_ready()) change(*m.mutable_ready());
      return true;
    }};
    std::unique_ptr<WorkerGroup> group = Make({"a", "b"});
    const absl::Status status = group->Form().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), HasSubstr("worker 1 (b) does not fit worker 0 (a)"));
    EXPECT_TRUE(network_.streams.empty());
  }
}

TEST_F(WorkerGroupTest, TheErrorOfARankThatCannotLoadComesThrough) {
  network_.workers["b"] = {.load_error = absl::InvalidArgumentError("3 ranks, 4 heads")};
  std::unique_ptr<WorkerGroup> group = Make({"a", "b"});
  const absl::Status status = group->Form().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(std::string(status.message()), "worker 1 (b): 3 ranks, 4 heads");
}

// Bug: it was mistaken for the end of our own wait, and the reason was lost.
TEST_F(WorkerGroupTest, ARankThatWaitedTooLongForAnotherSaysSo) {
  network_.workers["b"] = {.load_error = absl::DeadlineExceededError("connecting to rank 0")};
  std::unique_ptr<WorkerGroup> group = Make({"a", "b"});
  EXPECT_EQ(group->Form().status(), absl::UnavailableError("worker 1 (b): connecting to rank 0"));
}

TEST_F(WorkerGroupTest, RanksOfOneMachineKnowHowManyTheyAre) {
  std::unique_ptr<WorkerGroup> group = Make({"unix:/a", "h1:50061", "h1:50062", "h2:50061"});
  ASSERT_TRUE(group->Form().ok());
  for (const auto& [address, ranks] : std::map<std::string, uint32_t>{
           {"unix:/a", 1}, {"h1:50061", 2}, {"h1:50062", 2}, {"h2:50061", 1}}) {
    EXPECT_EQ(network_.plans[address].ranks_on_machine(), ranks) << address;
  }
}

TEST_F(WorkerGroupTest, ARankThatNeverGetsReadyIsNamed) {
  network_.workers["b"] = {.tweak = [](v1::WorkerMessage& m) { return !m.has_ready(); }};
  std::unique_ptr<WorkerGroup> group = Make({"a", "b"});
  std::thread time([&] {
    clock_.AwaitWaiter();
    clock_.Advance(absl::Minutes(11));
  });
  const absl::Status status = group->Form().status();
  time.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("worker 1 (b)"));
}

TEST_F(WorkerGroupTest, ARankThatDoesNotAnswerIsNamedWithinSeconds) {
  network_.workers["b"] = {.tweak = [](v1::WorkerMessage&) { return false; }};
  std::unique_ptr<WorkerGroup> group = Make({"a", "b"});
  std::string progress;
  group->SetProgressCallback([&progress](const std::string& what) { progress = what; });
  std::thread time([&] {
    clock_.AwaitWaiter();
    clock_.Advance(absl::Seconds(31));
  });
  const absl::Status status = group->Form().status();
  time.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("no answer within 30s from worker 1 (b);"));
  EXPECT_EQ(progress, "no answer yet from worker 1 (b)");
}

TEST_F(WorkerGroupTest, ASlowRankIsTakenForDeadSoonBehindTheOthers) {
  network_.workers["b"] = {.tweak = [](v1::WorkerMessage& m) { return !m.has_step_reply(); }};
  std::unique_ptr<WorkerGroup> group = Make({"a", "b"});
  ASSERT_TRUE(group->Form().ok());
  std::thread time([&] {
    clock_.AwaitWaiter();
    clock_.Advance(absl::Seconds(31));
  });
  const absl::Status status = Step(*group, EmptyPlan(1, 1)).status();
  time.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("taken for dead: worker 1 (b)"));
  EXPECT_TRUE(network_.streams.empty());  // the group ends with it
}

TEST_F(WorkerGroupTest, AStepOfAllRanksMayTakeLonger) {
  network_.workers["a"] = {.tweak = [](v1::WorkerMessage& m) { return !m.has_step_reply(); }};
  std::unique_ptr<WorkerGroup> group = Make({"a"});
  ASSERT_TRUE(group->Form().ok());
  absl::Status status;
  std::thread step([&] { status = Step(*group, EmptyPlan(1, 1)).status(); });
  clock_.AwaitWaiter();
  clock_.Advance(absl::Minutes(4));
  v1::WorkerMessage reply;
  reply.mutable_step_reply()->set_step(1);
  network_.streams["a"]->OnMessage(reply);
  step.join();
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(WorkerGroupTest, RanksThatDisagreeEndTheGroup) {
  network_.workers["b"] = {.tweak = [](v1::WorkerMessage& m) {
    if (m.has_step_reply()) m.mutable_step_reply()->set_token_hash(1);
    return true;
  }};
  std::unique_ptr<WorkerGroup> group = Make({"a", "b"});
  ASSERT_TRUE(group->Form().ok());
  const absl::Status status = Step(*group, OneTokenPlan(1)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("the sampled tokens"));
  EXPECT_TRUE(network_.streams.empty());
}

TEST_F(WorkerGroupTest, ARankMayAnswerTheNextPlanBeforeAnotherAnswersThis) {
  network_.workers["b"] = {.tweak = [](v1::WorkerMessage& m) { return !m.has_step_reply(); }};
  std::unique_ptr<WorkerGroup> group = Make({"a", "b"});
  ASSERT_TRUE(group->Form().ok());
  ASSERT_TRUE(group->Send(EmptyPlan(1, 1)).ok());
  ASSERT_TRUE(group->Send(EmptyPlan(1, 2)).ok());  // "a" has answered both
  for (const uint64_t step : {uint64_t{1}, uint64_t{2}}) {
    v1::WorkerMessage reply;
    reply.mutable_step_reply()->set_group_epoch(1);
    reply.mutable_step_reply()->set_step(step);
    network_.streams["b"]->OnMessage(reply);
    const absl::StatusOr<v1::StepReply> merged = group->AwaitReply();
    ASSERT_TRUE(merged.ok()) << merged.status();
    EXPECT_EQ(merged->step(), step);
  }
}

TEST_F(WorkerGroupTest, MoreAnswersThanPlansEndTheGroup) {
  std::unique_ptr<WorkerGroup> group = Make({"a", "b"});
  ASSERT_TRUE(group->Form().ok());
  v1::WorkerMessage reply;
  reply.mutable_step_reply()->set_group_epoch(1);
  network_.streams["a"]->OnMessage(reply);
  EXPECT_EQ(Step(*group, EmptyPlan(1, 1)).status().code(), absl::StatusCode::kInternal);
}

TEST_F(WorkerGroupTest, ALossWhileAPlanIsUnansweredIsNotTold) {
  int told = 0;
  std::unique_ptr<WorkerGroup> group = Make({"a"});
  group->SetLossCallback([&](const absl::Status&) { ++told; });
  ASSERT_TRUE(group->Form().ok());
  ASSERT_TRUE(group->Send(EmptyPlan(1, 1)).ok());
  ASSERT_TRUE(group->Send(EmptyPlan(1, 2)).ok());
  ASSERT_TRUE(group->AwaitReply().ok());
  network_.streams["a"]->OnClosed(absl::UnavailableError("died"));
  EXPECT_EQ(told, 0);
  EXPECT_TRUE(group->AwaitReply().ok());  // the reply came before the loss
  EXPECT_EQ(group->Send(EmptyPlan(1, 3)).code(), absl::StatusCode::kUnavailable);
}

TEST_F(WorkerGroupTest, ARankThatFailsInAStepEndsTheGroup) {
  network_.workers["b"] = {.step_error = absl::InternalError("collective: peer closed")};
  std::unique_ptr<WorkerGroup> group = Make({"a", "b"});
  ASSERT_TRUE(group->Form().ok());
  const absl::Status status = Step(*group, EmptyPlan(1, 1)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("worker 1 (b): collective"));
}

TEST_F(WorkerGroupTest, ALossBetweenStepsIsToldOnce) {
  int told = 0;
  std::unique_ptr<WorkerGroup> group = Make({"a", "b"});
  group->SetLossCallback([&](const absl::Status& why) {
    ++told;
    EXPECT_THAT(std::string(why.message()), HasSubstr("worker 1 (b): died"));
  });
  ASSERT_TRUE(group->Form().ok());
  network_.streams["b"]->OnClosed(absl::UnavailableError("died"));
  network_.streams["a"]->OnClosed(absl::UnavailableError("died too"));
  EXPECT_EQ(told, 1);
  EXPECT_EQ(Step(*group, EmptyPlan(1, 1)).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(group->Form().ok());
}

TEST_F(WorkerGroupTest, InterruptingEndsAWaitAtOnce) {
  network_.workers["a"] = {.tweak = [](v1::WorkerMessage&) { return false; }};
  std::unique_ptr<WorkerGroup> group = Make({"a"});
  std::thread other([&] {
    clock_.AwaitWaiter();
    group->Interrupt();
  });
  EXPECT_EQ(group->Form().status().code(), absl::StatusCode::kCancelled);
  other.join();
}

TEST_F(WorkerGroupTest, MessagesOutOfTurnEndTheGroup) {
  network_.workers["a"] = {.tweak = [](v1::WorkerMessage& m) {
    if (m.has_load_progress()) m.mutable_step_reply();
    return true;
  }};
  std::unique_ptr<WorkerGroup> group = Make({"a"});
  EXPECT_EQ(group->Form().status().code(), absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace kvasir::coordinator
