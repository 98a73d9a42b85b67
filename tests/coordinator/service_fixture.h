// A server over a fake worker group, and a client of it.
#pragma once

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "grpcpp/create_channel.h"
#include "gtest/gtest.h"

#include "coordinator/server.h"
#include "coordinator/service.h"
#include "tests/coordinator/tokenizer/minimal_json.h"
#include "tests/support/fake_worker_group.h"

namespace kvasir::coordinator {

inline constexpr int64_t kVocab = 128;  // one token per ASCII character
inline constexpr char kService[] = "kvasir.v1.Generation";

// The messages that a client has received in one call.
struct Received {
  grpc::Status status;
  std::vector<v1::GenerateResponse> messages;

  std::string text() const {
    std::string text;
    for (const auto& message : messages) text += message.tokens().text();
    return text;
  }
  std::vector<int32_t> token_ids() const {
    std::vector<int32_t> ids;
    for (const auto& message : messages) {
      if (!message.has_tokens()) continue;
      EXPECT_EQ(message.tokens().index(), ids.size());
      ids.insert(ids.end(), message.tokens().token_ids().begin(),
                 message.tokens().token_ids().end());
    }
    return ids;
  }
};

class ServiceTest : public ::testing::Test {
 protected:
  ServiceTest() {
    std::filesystem::create_directories(folder_);
    std::ofstream(folder_ + "/tokenizer.json") << MinimalJson().dump();
    std::ofstream(folder_ + "/config.json") << R"({"eos_token_id": [3], "model_type": "paper"})";
  }
  ~ServiceTest() override {
    if (group_ != nullptr) group_->ReleaseSteps();
    const bool legal = group_ == nullptr || group_->illegal_plan().ok();
    EXPECT_TRUE(legal) << group_->illegal_plan();
    server_.reset();
    std::filesystem::remove_all(folder_);
  }

  v1::ServeConfig Config() const {
    v1::ServeConfig config;
    config.mutable_model()->set_model(folder_ + "/");
    config.mutable_endpoint()->set_host("127.0.0.1");
    config.mutable_scheduler()->set_max_num_seqs(4);
    config.mutable_scheduler()->set_max_num_batched_tokens(130);  // rounded down to 128
    config.mutable_scheduler()->set_max_queue_len(queue_len_);
    config.mutable_scheduler()->set_max_queued_tokens(1000000);
    config.mutable_scheduler()->set_max_request_time(3600);
    config.mutable_scheduler()->set_enable_prefix_caching(true);
    config.set_client_timeout(60);
    return config;
  }
  void Start(bool hold_forms = false, int64_t max_model_len = 10000) {
    absl::StatusOr<std::unique_ptr<Server>> server =
        Server::Start(Config(), [&](const v1::ShardPlan& plan, Clock&) {
          EXPECT_EQ(plan.max_num_batched_tokens(), 128u);
          testing::SymbolicWorkerOptions worker = {.host_blocks = 2000, .vocab_size = kVocab};
          worker.max_num_seqs = plan.max_num_seqs();
          worker.max_num_batched_tokens = plan.max_num_batched_tokens();
          auto group = std::make_unique<testing::FakeWorkerGroup>(worker, max_model_len);
          group_ = group.get();
          if (hold_forms) group_->HoldForms();
          return group;
        });
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    if (!hold_forms) {
      ASSERT_EQ(server_->WaitUntilReady(absl::Minutes(1)), absl::OkStatus());
    }
    channel_ = NewChannel();
    stub_ = v1::Generation::NewStub(channel_);
  }
  std::shared_ptr<grpc::Channel> NewChannel() const {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel(absl::StrCat("127.0.0.1:", server_->port()),
                                     grpc::InsecureChannelCredentials(), arguments);
  }

  static v1::GenerateRequest TokensRequest(std::vector<int32_t> prompt, uint32_t max_tokens) {
    v1::GenerateRequest request;
    for (int32_t id : prompt) request.mutable_token_ids()->add_ids(static_cast<uint32_t>(id));
    request.mutable_sampling()->set_max_tokens(max_tokens);
    request.mutable_sampling()->set_seed(0);
    request.mutable_sampling()->set_ignore_eos(true);
    return request;
  }
  Received Generate(const v1::GenerateRequest& request) {
    grpc::ClientContext context;
    return Generate(request, context);
  }
  Received Generate(const v1::GenerateRequest& request, grpc::ClientContext& context) {
    auto reader = stub_->Generate(&context, request);
    Received received;
    v1::GenerateResponse response;
    while (reader->Read(&response)) received.messages.push_back(response);
    received.status = reader->Finish();
    return received;
  }

  v1::GetServerInfoResponse ServerInfo() {
    grpc::ClientContext context;
    v1::GetServerInfoResponse info;
    const grpc::Status status = stub_->GetServerInfo(&context, {}, &info);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return info;
  }

  const std::string folder_ =
      absl::StrCat(::testing::TempDir(), "/kvasir_service_test.", getpid(), ".",
                   ::testing::UnitTest::GetInstance()->current_test_info()->name());
  uint32_t queue_len_ = 1000;
  testing::FakeWorkerGroup* group_ = nullptr;
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Generation::Stub> stub_;
};

}  // namespace kvasir::coordinator
