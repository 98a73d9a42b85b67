// The public API over a real socket, with a simulated worker group.
#include "coordinator/service.h"

#include <atomic>
#include <chrono>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "proto/grpc_status.h"
#include "tests/coordinator/service_fixture.h"
#include "tests/support/health_client.h"

namespace kvasir::coordinator {
namespace {

using kvasir::testing::CheckHealth;
using kvasir::testing::FakeWorkerGroup;
using kvasir::testing::Health;
using kvasir::testing::SymbolicWorker;
using kvasir::testing::SymbolicWorkerOptions;
using ::testing::HasSubstr;

TEST_F(ServiceTest, StreamsProgressThenTokensThenOneFinish) {
  Start();
  const std::vector<int32_t> prompt(300, 'p');
  v1::GenerateRequest request = TokensRequest(prompt, 12);
  request.set_request_id("mine");
  const Received received = Generate(request);
  ASSERT_TRUE(received.status.ok()) << received.status.error_message();
  int phase = 0;  // progress, tokens, finish
  uint32_t processed = 0;
  for (const v1::GenerateResponse& message : received.messages) {
    const int kind = message.has_progress() ? 0 : message.has_tokens() ? 1 : 2;
    EXPECT_TRUE(kind == phase || kind == phase + 1);
    phase = kind;
    if (!message.has_progress()) continue;
    EXPECT_EQ(message.progress().request_id(), "mine");
    EXPECT_EQ(message.progress().prompt_tokens(), 300u);
    EXPECT_GE(message.progress().processed_tokens(), processed);
    processed = message.progress().processed_tokens();
  }
  EXPECT_EQ(phase, 2);
  EXPECT_EQ(received.token_ids(), SymbolicWorker::ExpectedTokens(prompt, 12, {}, kVocab));
  const v1::Finish& finish = received.messages.back().finish();
  EXPECT_EQ(finish.request_id(), "mine");
  EXPECT_EQ(finish.reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(finish.usage().prompt_tokens(), 300u);
  EXPECT_EQ(finish.usage().completion_tokens(), 12u);
  EXPECT_TRUE(finish.timing().has_time_to_first_token());
  EXPECT_TRUE(group_->AwaitIdle(4));
}

TEST_F(ServiceTest, TextGoesInAndComesOut) {
  Start();
  v1::GenerateRequest request;
  request.set_text("What is it?");
  request.mutable_sampling()->set_max_tokens(200);
  request.mutable_sampling()->set_seed(5);
  const Received received = Generate(request);
  ASSERT_TRUE(received.status.ok()) << received.status.error_message();
  v1::RowSampling sampling;
  sampling.set_seed(5);
  sampling.add_stop_token_ids(3);  // config.json's eos_token_id
  const std::string prompt = "What is it?";
  const std::vector<int32_t> expected =
      SymbolicWorker::ExpectedTokens({prompt.begin(), prompt.end()}, 200, sampling, kVocab);
  EXPECT_EQ(received.token_ids(), expected);
  std::string text(expected.begin(), expected.end());
  const v1::Finish& finish = received.messages.back().finish();
  if (finish.reason() == v1::FINISH_REASON_STOP) {
    EXPECT_EQ(finish.matched_token_id(), 3u);
    text.pop_back();
  }
  EXPECT_EQ(received.text(), text);
}

TEST_F(ServiceTest, BadRequestsAreInvalidAndHarmless) {
  Start();
  std::vector<v1::GenerateRequest> bad(6, TokensRequest({1, 2}, 4));
  bad[0].clear_token_ids();
  bad[1].mutable_token_ids()->add_ids(kVocab);
  bad[2].mutable_sampling()->set_max_tokens(10000);
  bad[3].mutable_sampling()->set_top_p(std::numeric_limits<float>::quiet_NaN());
  bad[4].mutable_policy()->set_name("unknown");
  bad[5].mutable_sampling()->add_stop("");
  for (const v1::GenerateRequest& request : bad) {
    const Received received = Generate(request);
    EXPECT_EQ(received.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT)
        << request.ShortDebugString();
    EXPECT_TRUE(received.messages.empty());
  }
  EXPECT_TRUE(Generate(TokensRequest({1, 2}, 4)).status.ok());
}

// Bug: the server advertised the context and refused requests for it.
TEST_F(ServiceTest, AContextThatNeverFitsIsRefusedAtTheStart) {
  Start(/*hold_forms=*/true, 1000000);
  group_->ReleaseForms();
  const absl::Status status = server_->WaitUntilReady(absl::Minutes(1));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("KV holds 128000"));
}

TEST_F(ServiceTest, AFullQueueTellsWhenToTryAgain) {
  queue_len_ = 1;
  Start();
  group_->HoldSteps();
  const v1::GenerateRequest request = TokensRequest(std::vector<int32_t>(50, 1), 2);
  grpc::ClientContext context;
  auto first = stub_->Generate(&context, request);
  v1::GenerateResponse response;
  ASSERT_TRUE(first->Read(&response));  // before its step and during it, five more each may arrive
  std::atomic<int> refused = 0;
  std::vector<std::thread> clients;
  for (int i = 0; i < 40; ++i) {
    clients.emplace_back([&] {
      const grpc::Status status = Generate(request).status;
      if (status.ok()) return;
      EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
      EXPECT_THAT(status.error_message(), HasSubstr("try again later"));
      const auto delay = proto::RetryDelay(proto::FromGrpcStatus(status));
      EXPECT_TRUE(delay.has_value() && *delay >= absl::Seconds(1) && *delay <= absl::Minutes(1));
      ++refused;
    });
  }
  while (refused < 15) std::this_thread::yield();
  group_->ReleaseSteps();
  while (first->Read(&response)) {
  }
  EXPECT_TRUE(first->Finish().ok());
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(ServerInfo().requests_rejected(), static_cast<uint64_t>(refused.load()));
}

TEST_F(ServiceTest, AMessageBeyondTheCapIsRefusedUnread) {
  Start();
  v1::GenerateRequest request;
  request.set_text(std::string((size_t{64} << 20) + 1, 'x'));
  const Received received = Generate(request);
  EXPECT_EQ(received.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(received.status.error_message(), HasSubstr("larger than max"));
  EXPECT_TRUE(Generate(TokensRequest({1}, 1)).status.ok());
}

TEST_F(ServiceTest, ACancelledCallFreesEverything) {
  Start();
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, TokensRequest(std::vector<int32_t>(100, 1), 9000));
  v1::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  context.TryCancel();
  while (reader->Read(&response)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(group_->AwaitSequences(0));
}

TEST_F(ServiceTest, ALostConnectionFreesEverything) {
  Start();
  auto channel = NewChannel();
  auto context = std::make_unique<grpc::ClientContext>();
  auto stub = v1::Generation::NewStub(channel);
  auto reader = stub->Generate(context.get(), TokensRequest(std::vector<int32_t>(100, 1), 9000));
  v1::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  ASSERT_TRUE(group_->AwaitSequences(1));
  reader.reset();
  context.reset();
  stub.reset();
  channel.reset();
  EXPECT_TRUE(group_->AwaitSequences(0));
}

TEST_F(ServiceTest, APassedDeadlineFreesEverything) {
  Start();
  group_->HoldSteps();
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(100));
  const Received received = Generate(TokensRequest(std::vector<int32_t>(1000, 1), 10), context);
  EXPECT_EQ(received.status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  group_->AllowSteps(1);  // the step that was running
  group_->ReleaseSteps();
  EXPECT_TRUE(group_->AwaitSequences(0));
}

TEST_F(ServiceTest, ARunningRequestIdCannotBeUsedTwice) {
  Start();
  group_->HoldSteps();
  v1::GenerateRequest request = TokensRequest({1, 2, 3}, 3);
  request.set_request_id("twin");
  grpc::ClientContext context;
  auto first = stub_->Generate(&context, request);
  v1::GenerateResponse response;
  ASSERT_TRUE(first->Read(&response));
  EXPECT_EQ(Generate(request).status.error_code(), grpc::StatusCode::ALREADY_EXISTS);
  group_->ReleaseSteps();
  while (first->Read(&response)) {
  }
  EXPECT_TRUE(first->Finish().ok());
  EXPECT_TRUE(Generate(request).status.ok());  // at once
}

TEST_F(ServiceTest, WhenTheGroupFailsRunningRequestsGoOnAndLaterOnesRun) {
  Start();
  group_->HoldSteps();
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, TokensRequest({1, 2, 3}, 3));
  v1::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  group_->FailNextStep(absl::UnavailableError("worker 0 died"));
  group_->ReleaseSteps();
  bool waited = false;
  uint32_t tokens = 0;
  while (reader->Read(&response)) {
    waited |= response.progress().waits_for_worker();
    if (response.has_tokens()) {
      EXPECT_EQ(response.tokens().index(), tokens);
    }
    tokens += static_cast<uint32_t>(response.tokens().token_ids_size());
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_TRUE(waited);
  EXPECT_EQ(tokens, 3u);
  EXPECT_EQ(group_->forms(), 2);
  EXPECT_TRUE(Generate(TokensRequest({1, 2, 3}, 3)).status.ok());
}

TEST_F(ServiceTest, DrainingFinishesWhatRunsAndRefusesTheRest) {
  Start();
  group_->HoldSteps();
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, TokensRequest({1, 2, 3}, 3));
  v1::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  server_->Drain();
  EXPECT_EQ(CheckHealth(channel_, kService), Health::kNotServing);
  EXPECT_EQ(CheckHealth(channel_, ""), Health::kServing);
  EXPECT_FALSE(server_->WaitUntilIdle(absl::ZeroDuration()));
  EXPECT_EQ(Generate(TokensRequest({1}, 1)).status.error_code(), grpc::StatusCode::UNAVAILABLE);
  group_->ReleaseSteps();
  while (reader->Read(&response)) {
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_TRUE(response.has_finish());
  EXPECT_TRUE(server_->WaitUntilIdle(absl::Minutes(1)));
  server_->Shutdown();
}

TEST_F(ServiceTest, ShutdownWithoutGraceEndsRequestsWithUnavailable) {
  Start();
  group_->HoldSteps();
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, TokensRequest({1, 2, 3}, 3));
  v1::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  server_->Shutdown();
  while (reader->Read(&response)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(ServiceTest, ASlowReaderGetsTheSameTokensInFewerMessages) {
  Start();
  grpc::ClientContext context;
  const std::vector<int32_t> prompt = {1, 2, 3};
  v1::GenerateRequest request = TokensRequest(prompt, 6000);
  request.mutable_sampling()->set_logprobs(2);
  auto reader = stub_->Generate(&context, request);
  Received received;
  v1::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  ASSERT_TRUE(group_->AwaitSequences(1));
  ASSERT_TRUE(group_->AwaitSequences(0));  // the whole answer is generated before more is read
  while (reader->Read(&response)) received.messages.push_back(response);
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(received.token_ids(), SymbolicWorker::ExpectedTokens(prompt, 6000, {}, kVocab));
  EXPECT_LT(received.messages.size(), 6000u);
  for (const v1::GenerateResponse& message : received.messages) {
    const v1::Tokens& tokens = message.tokens();
    ASSERT_EQ(tokens.logprobs_size(), tokens.token_ids_size());
    for (int i = 0; i < tokens.token_ids_size(); ++i) {
      EXPECT_EQ(tokens.logprobs(i).logprob(), -static_cast<float>(tokens.token_ids(i)));
      EXPECT_EQ(tokens.logprobs(i).top_size(), 2);
    }
  }
}

TEST_F(ServiceTest, RandomCancellationsAndDisconnectsLeaveNothing) {
  Start();
  std::minstd_rand random(4);
  for (int i = 0; i < 500; ++i) {
    auto channel = i % 10 == 0 ? NewChannel() : channel_;
    auto stub = v1::Generation::NewStub(channel);
    grpc::ClientContext context;
    const auto length = static_cast<size_t>(1 + random() % 300);
    auto reader = stub->Generate(
        &context,
        TokensRequest(std::vector<int32_t>(length, 5), static_cast<uint32_t>(1 + random() % 100)));
    v1::GenerateResponse response;
    for (auto reads = random() % 20; reads > 0 && reader->Read(&response); --reads) {
    }
    if (random() % 4 == 0) continue;  // the reader's destructor cancels
    context.TryCancel();
  }
  EXPECT_TRUE(group_->AwaitSequences(0));
  EXPECT_TRUE(Generate(TokensRequest({1, 2, 3}, 3)).status.ok());
}

TEST_F(ServiceTest, APortInUseIsAnError) {
  Start();
  v1::ServeConfig config = Config();
  config.mutable_endpoint()->set_port(static_cast<uint32_t>(server_->port()));
  const absl::Status status = Server::Start(config, [](const v1::ShardPlan&, Clock&) {
                                return std::make_unique<FakeWorkerGroup>(SymbolicWorkerOptions());
                              }).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("in use"));
}

}  // namespace
}  // namespace kvasir::coordinator
