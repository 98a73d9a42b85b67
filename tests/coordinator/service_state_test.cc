// Readiness, health, tokenizing and what the service says of itself.
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/coordinator/service_fixture.h"
#include "tests/support/health_client.h"

namespace kvasir::coordinator {
namespace {

using kvasir::testing::CheckHealth;
using kvasir::testing::Health;
using ::testing::HasSubstr;

TEST_F(ServiceTest, IsNotReadyWhileTheGroupIsFormedAgain) {
  Start();
  EXPECT_EQ(CheckHealth(channel_, kService), Health::kServing);
  group_->HoldForms();
  group_->Lose(absl::UnavailableError("worker 0 died"));
  ASSERT_TRUE(group_->AwaitForms(2));
  EXPECT_EQ(CheckHealth(channel_, kService), Health::kNotServing);
  EXPECT_EQ(CheckHealth(channel_, ""), Health::kServing);
  EXPECT_EQ(ServerInfo().state(), v1::SERVER_STATE_STARTING);
  group_->ReleaseForms();
  ASSERT_EQ(server_->WaitUntilReady(absl::Minutes(1)), absl::OkStatus());
  EXPECT_TRUE(Generate(TokensRequest({1}, 1)).status.ok());
  EXPECT_EQ(CheckHealth(channel_, kService), Health::kServing);
}

TEST_F(ServiceTest, AGroupThatFormsWhileTheServerDrainsDoesNotMakeItReady) {
  Start(/*hold_forms=*/true);
  server_->Drain();
  group_->ReleaseForms();
  ASSERT_EQ(server_->WaitUntilReady(absl::Minutes(1)), absl::OkStatus());
  EXPECT_EQ(CheckHealth(channel_, kService), Health::kNotServing);
  EXPECT_EQ(Generate(TokensRequest({1}, 1)).status.error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(ServiceTest, HealthFollowsTheGroup) {
  Start(/*hold_forms=*/true);
  EXPECT_EQ(CheckHealth(channel_, ""), Health::kServing);
  EXPECT_EQ(CheckHealth(channel_, kService), Health::kNotServing);
  EXPECT_EQ(CheckHealth(channel_, "nobody"), Health::kServiceUnknown);
  EXPECT_EQ(Generate(TokensRequest({1}, 1)).status.error_code(), grpc::StatusCode::UNAVAILABLE);
  group_->ReleaseForms();
  ASSERT_EQ(server_->WaitUntilReady(absl::Minutes(1)), absl::OkStatus());
  EXPECT_TRUE(Generate(TokensRequest({1}, 1)).status.ok());
  EXPECT_EQ(CheckHealth(channel_, kService), Health::kServing);
}

TEST_F(ServiceTest, TokenizeAndDetokenizeAreInverse) {
  Start(/*hold_forms=*/true);  // these calls need no worker
  v1::TokenizeRequest text;
  text.set_text("What is it?");
  grpc::ClientContext tokenize;
  v1::TokenizeResponse tokens;
  ASSERT_TRUE(stub_->Tokenize(&tokenize, text, &tokens).ok());
  EXPECT_EQ(std::string(tokens.token_ids().begin(), tokens.token_ids().end()), "What is it?");
  v1::DetokenizeRequest ids;
  *ids.mutable_token_ids() = tokens.token_ids();
  grpc::ClientContext detokenize;
  v1::DetokenizeResponse back;
  ASSERT_TRUE(stub_->Detokenize(&detokenize, ids, &back).ok());
  EXPECT_EQ(back.text(), "What is it?");
}

TEST_F(ServiceTest, TokenizeAndDetokenizeRefuseWhatIsNoTextAndNoToken) {
  Start(/*hold_forms=*/true);
  v1::DetokenizeRequest ids;
  for (const uint32_t id : {256u, 2147483647u, 2147483648u, 4294967295u}) {
    ids.clear_token_ids();
    ids.add_token_ids(id);
    grpc::ClientContext context;
    v1::DetokenizeResponse text;
    const grpc::Status status = stub_->Detokenize(&context, ids, &text);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << id;
    EXPECT_THAT(status.error_message(), HasSubstr(absl::StrCat(id))) << id;
  }
}

TEST_F(ServiceTest, ModelInfoIsThatOfTheFormedGroup) {
  Start(/*hold_forms=*/true);
  v1::GetModelInfoResponse info;
  grpc::ClientContext early;
  EXPECT_EQ(stub_->GetModelInfo(&early, {}, &info).error_code(), grpc::StatusCode::UNAVAILABLE);
  group_->ReleaseForms();
  ASSERT_EQ(server_->WaitUntilReady(absl::Minutes(1)), absl::OkStatus());
  grpc::ClientContext context;
  ASSERT_TRUE(stub_->GetModelInfo(&context, {}, &info).ok());
  EXPECT_EQ(info.model_path(), folder_ + "/");
  EXPECT_EQ(info.served_model_name(), std::filesystem::path(folder_).filename());
  EXPECT_EQ(info.model_type(), "paper");
  EXPECT_EQ(info.vocab_size(), uint32_t{kVocab});
  EXPECT_EQ(info.max_context_length(), 10000u);
  ASSERT_EQ(info.eos_token_ids_size(), 1);
  EXPECT_EQ(info.eos_token_ids(0), 3u);
  ASSERT_EQ(info.policies_size(), 1);
  EXPECT_EQ(info.policies(0).name(), "default");
  EXPECT_EQ(info.kv_form(), "rotated/float32");
  EXPECT_EQ(info.weights_hash().substr(0, 4), "7777");
}

TEST_F(ServiceTest, ServerInfoFollowsStateRequestsAndCache) {
  Start(/*hold_forms=*/true);
  EXPECT_EQ(ServerInfo().state(), v1::SERVER_STATE_STARTING);
  EXPECT_THAT(ServerInfo().state_reason(), HasSubstr("being formed"));
  EXPECT_EQ(ServerInfo().workers_size(), 0);
  group_->ReleaseForms();
  ASSERT_EQ(server_->WaitUntilReady(absl::Minutes(1)), absl::OkStatus());
  ASSERT_EQ(ServerInfo().state(), v1::SERVER_STATE_SERVING);
  ASSERT_EQ(ServerInfo().workers_size(), 1);
  EXPECT_EQ(ServerInfo().workers(0).address(), "paper");

  const std::vector<int32_t> prompt(200, 'p');
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(Generate(TokensRequest(prompt, 5)).status.ok());
  group_->HoldSteps();
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, TokensRequest({1, 2, 3}, 3));
  v1::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  v1::GetServerInfoResponse info = ServerInfo();
  EXPECT_EQ(info.requests_running(), 1u);
  EXPECT_EQ(info.requests_finished(), 2u);
  EXPECT_EQ(info.prompt_tokens(), 400u);
  EXPECT_EQ(info.generation_tokens(), 10u);
  EXPECT_EQ(info.prefix_cache_queries(), 400u);  // a prompt counts once its first step is over
  EXPECT_EQ(info.prefix_cache_hits(), 192u);
  EXPECT_EQ(info.cached_device_tokens(), 192u);
  EXPECT_EQ(info.max_num_seqs(), 4u);
  EXPECT_EQ(info.max_num_batched_tokens(), 128u);

  server_->Drain();
  EXPECT_EQ(ServerInfo().state(), v1::SERVER_STATE_DRAINING);
  group_->ReleaseSteps();
  while (reader->Read(&response)) {
  }
  EXPECT_EQ(ServerInfo().prefix_cache_queries(), 403u);
}

TEST_F(ServiceTest, ReflectionNamesTheServices) {
  Start();
  const std::string services = kvasir::testing::ListServices(channel_);
  EXPECT_THAT(services, HasSubstr(kService));
  EXPECT_THAT(services, HasSubstr("grpc.health.v1.Health"));
}

}  // namespace
}  // namespace kvasir::coordinator
