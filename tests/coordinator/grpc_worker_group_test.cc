// A worker group over real streams.
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "coordinator/group/grpc_worker_client.h"
#include "coordinator/group/worker_group.h"
#include "tests/coordinator/group_steps.h"
#include "tests/support/fake_rank.h"
#include "tests/support/fake_worker_service.h"
#include "tests/support/freezing_relay.h"
#include "tests/support/scratch_directory.h"

namespace kvasir::coordinator {
namespace {

using kvasir::testing::FakeRankOptions;
using kvasir::testing::FakeWorkerService;
using ::testing::HasSubstr;

class GrpcWorkerGroupTest : public ::testing::Test {
 protected:
  std::unique_ptr<WorkerGroup> Make(std::vector<std::string> addresses) {
    return CreateWorkerGroup({.addresses = std::move(addresses), .shard_plan = {}},
                             GrpcWorkerDialer(secret_, plain_), clock_);
  }
  SteadyClock clock_;
  std::shared_ptr<const proto::GroupSecret> secret_ = proto::GroupSecret::Read("").value();
  std::shared_ptr<proto::ChannelTls> plain_ = proto::ChannelTls::Load({}).value();
};

TEST_F(GrpcWorkerGroupTest, AWorkerWithoutTheSecretIsToldNothing) {
  const kvasir::testing::ScratchDirectory folder;
  const std::string path = folder.path() + "/secret";
  ASSERT_TRUE(proto::GroupSecret::Make(path).ok());
  FakeWorkerService stranger({});
  FakeWorkerService friendly({}, FakeWorkerService::FreshAddress(),
                             proto::GroupSecret::Read(path).value());
  secret_ = proto::GroupSecret::Read(path).value();
  const absl::Status status = Make({stranger.address()})->Form().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated);
  EXPECT_THAT(std::string(status.message()), HasSubstr("--group-secret-file"));
  EXPECT_EQ(stranger.messages(), 0);
  const absl::StatusOr<GroupInfo> info = Make({friendly.address()})->Form();
  EXPECT_TRUE(info.ok()) << info.status();
}

TEST_F(GrpcWorkerGroupTest, AWorkerThatSkipsItsProofIsToldNothing) {
  FakeWorkerService impostor({.proves = false});
  const absl::Status status = Make({impostor.address()})->Form().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated) << status;
  EXPECT_EQ(impostor.messages(), 0);
}

TEST_F(GrpcWorkerGroupTest, FormsAndStepsOverSockets) {
  FakeWorkerService a({});
  FakeWorkerService b({});
  std::unique_ptr<WorkerGroup> group = Make({a.address(), b.address()});
  absl::StatusOr<GroupInfo> info = group->Form();
  ASSERT_TRUE(info.ok()) << info.status();
  absl::StatusOr<v1::StepReply> reply = Step(*group, OneTokenPlan(info->epoch));
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_TRUE(reply->results(0).has_token_id());
  EXPECT_EQ(reply->results(0).accounting().decode().blocks_total(), 2u);
}

TEST_F(GrpcWorkerGroupTest, WaitsForAWorkerThatComesUpLater) {
  FakeWorkerService a({});
  const std::string later = a.address() + ".later";
  std::unique_ptr<WorkerGroup> group = Make({a.address(), later});
  absl::StatusOr<GroupInfo> info;
  std::thread form([&] { info = group->Form(); });
  while (a.streams() == 0) std::this_thread::yield();  // until the first stream is open
  FakeWorkerService b({}, later);
  form.join();
  EXPECT_TRUE(info.ok()) << info.status();
}

TEST_F(GrpcWorkerGroupTest, AWorkerThatDiesIsNoticedAndComesBackUnderANewEpoch) {
  FakeWorkerService a({});
  auto b = std::make_unique<FakeWorkerService>(FakeRankOptions());
  const std::string address = b->address();
  std::unique_ptr<WorkerGroup> group = Make({a.address(), address});
  kernels::Mutex mu;
  kernels::CondVar changed;
  absl::Status lost;
  group->SetLossCallback([&](const absl::Status& why) {
    kernels::MutexLock lock(mu);
    lost = why;
    changed.NotifyAll();
  });
  ASSERT_TRUE(group->Form().ok());
  b.reset();
  {
    kernels::MutexLock lock(mu);
    while (lost.ok()) changed.Wait(mu);
    EXPECT_THAT(std::string(lost.message()), HasSubstr("worker 1"));
  }
  EXPECT_FALSE(Step(*group, EmptyPlan(1, 1)).ok());
  b = std::make_unique<FakeWorkerService>(FakeRankOptions(), address);
  absl::StatusOr<GroupInfo> info = group->Form();
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->epoch, 2u);
  EXPECT_TRUE(Step(*group, EmptyPlan(2, 1)).ok());
}

TEST_F(GrpcWorkerGroupTest, AWorkerThatFallsSilentIsNoticedWhileItComputes) {
  FakeWorkerService a({.tweak = [](v1::WorkerMessage& m) { return !m.has_step_reply(); }});
  const std::string path = a.address().substr(std::string("unix:").size());
  kvasir::testing::FreezingRelay relay(path + ".r", path);
  std::unique_ptr<WorkerGroup> group = CreateWorkerGroup(
      {.addresses = {"unix:" + path + ".r"}, .shard_plan = {}},
      GrpcWorkerDialer(secret_, plain_, {.interval_ms = 100, .timeout_ms = 300}), clock_);
  ASSERT_TRUE(group->Form().ok());
  relay.Freeze();
  const TimePoint frozen = clock_.Now();
  EXPECT_EQ(Step(*group, EmptyPlan(1, 1)).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_LT(Between(frozen, clock_.Now()), absl::Seconds(30));  // and not the step's 10 minutes
}

TEST_F(GrpcWorkerGroupTest, AWorkerThatFailsToLoadSaysWhy) {
  FakeWorkerService a({.load_error = absl::InvalidArgumentError("no such folder")});
  std::unique_ptr<WorkerGroup> group = Make({a.address()});
  const absl::Status status = group->Form().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("no such folder"));
}

TEST_F(GrpcWorkerGroupTest, LongPromptsTravel) {
  FakeWorkerService a(
      {.worker = {
           .device_blocks = 40000, .host_blocks = 40000, .max_num_batched_tokens = 2000000}});
  std::unique_ptr<WorkerGroup> group = Make({a.address()});
  ASSERT_TRUE(group->Form().ok());
  v1::StepPlan plan = OneTokenPlan(1);
  // The first chunk, one block, of a prompt of 2 million tokens.
  for (int i = 1; i < 2000000; ++i) plan.mutable_starts(0)->add_tokens(4294967295u);
  plan.mutable_starts(0)->set_num_prompt_tokens(2000000);
  plan.mutable_rows(0)->set_num_tokens(64);
  plan.mutable_rows(0)->set_sample(false);
  absl::StatusOr<v1::StepReply> reply = Step(*group, plan);
  EXPECT_TRUE(reply.ok()) << reply.status();
}

}  // namespace
}  // namespace kvasir::coordinator
