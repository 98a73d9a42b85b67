#include "coordinator/replicas/movable_answer.h"

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "grpcpp/server_builder.h"
#include "gtest/gtest.h"
#include "spdlog/spdlog.h"

#include "kernels/base/mutex.h"
#include "tests/coordinator/collected_response.h"

namespace kvasir::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Outcome = MovableAnswer::Outcome;

// Another server, which answers as the test wants: token i of every answer is 100 + i.
class OtherServer final : public v1::Generation::Service {
 public:
  OtherServer() {
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    address = absl::StrCat("127.0.0.1:", port);
  }
  ~OtherServer() override { server_->Shutdown(std::chrono::system_clock::now()); }

  grpc::Status Generate(grpc::ServerContext* context, const v1::GenerateRequest* request,
                        grpc::ServerWriter<v1::GenerateResponse>* stream) override {
    {
      kernels::MutexLock lock(mu_);
      requests_.push_back(*request);
      const auto key = context->client_metadata().find("authorization");
      if (key != context->client_metadata().end()) {
        authorization_ = std::string(key->second.data(), key->second.size());
      }
    }
    if (refuses) return {grpc::StatusCode::RESOURCE_EXHAUSTED, "the queue is full"};
    const bool prepares = absl::StartsWith(request->request_id(), "prepare-");
    const auto told = static_cast<uint32_t>(request->resume().token_ids_size());
    for (uint32_t i = told; i < request->sampling().max_tokens(); ++i) {
      if (!prepares && i == breaks_at) {
        if (on_break) on_break();
        return {grpc::StatusCode::UNAVAILABLE, "it breaks"};
      }
      while (!prepares && i == hangs_at) {
        if (context->IsCancelled()) return grpc::Status::CANCELLED;
      }
      v1::GenerateResponse response;
      response.mutable_tokens()->set_index(i);
      response.mutable_tokens()->add_token_ids(100 + i);
      stream->Write(response);
    }
    v1::GenerateResponse response;
    response.mutable_finish()->set_reason(v1::FINISH_REASON_LENGTH);
    stream->Write(response);
    return grpc::Status::OK;
  }
  std::vector<v1::GenerateRequest> requests() {
    kernels::MutexLock lock(mu_);
    return requests_;
  }
  std::string authorization() {
    kernels::MutexLock lock(mu_);
    return authorization_;
  }

  std::string address;
  std::atomic<bool> refuses = false;
  std::atomic<uint32_t> breaks_at = UINT32_MAX;  // index of a token; not while it prepares
  std::atomic<uint32_t> hangs_at = UINT32_MAX;
  std::function<void()> on_break;

 private:
  kernels::Mutex mu_;
  std::vector<v1::GenerateRequest> requests_ GUARDED_BY(mu_);
  std::string authorization_ GUARDED_BY(mu_);
  std::unique_ptr<grpc::Server> server_;
};

class Client final : public ClientSink {
 public:
  void Write(v1::GenerateResponse response) override { got.Write(std::move(response)); }
  void Close(const absl::Status& status) override { got.Close(status); }

  CollectedResponse got;
};

class MovableAnswerTest : public ::testing::Test {
 protected:
  MovableAnswerTest() {
    spdlog::set_level(spdlog::level::off);
    servers_ = ReplicaServers::Create("--replica-servers",
                                      absl::StrCat(first_.address, ",", second_.address), {})
                   .value();
    answer_ =
        std::make_shared<MovableAnswer>(MovableAnswer::Options{.servers = *servers_,
                                                               .on_move =
                                                                   [this](Outcome outcome) {
                                                                     kernels::MutexLock lock(mu_);
                                                                     outcomes_.push_back(outcome);
                                                                     changed_.NotifyAll();
                                                                   }},
                                        client_);
    ElsewhereRequest request = {.request = {}, .authorization = "Bearer of the client"};
    request.request.set_request_id("r1");
    request.request.mutable_token_ids()->add_ids(7);
    request.request.mutable_sampling()->set_max_tokens(kTokens);
    request.request.mutable_sampling()->set_min_tokens(kTokens);
    answer_->Begin(request, [this](const absl::Status& why) { cancelled_here_(why); });
  }

  // This server's request tells the next token.
  void Tell() {
    v1::GenerateResponse response;
    response.mutable_tokens()->set_index(told_);
    response.mutable_tokens()->add_token_ids(100 + told_++);
    answer_->Write(std::move(response));
  }
  std::vector<Outcome> AwaitOutcomes(size_t count) {
    kernels::MutexLock lock(mu_);
    while (outcomes_.size() < count) changed_.Wait(mu_);
    return outcomes_;
  }
  void ExpectWhole() {
    EXPECT_EQ(client_->got.status(), absl::OkStatus());
    std::vector<int32_t> expected;
    for (int32_t i = 0; i < static_cast<int32_t>(kTokens); ++i) expected.push_back(100 + i);
    EXPECT_EQ(client_->got.token_ids(), expected);
    EXPECT_EQ(client_->got.finish().reason(), v1::FINISH_REASON_LENGTH);
  }

  static constexpr uint32_t kTokens = 9;
  kernels::Mutex mu_;
  kernels::CondVar changed_;
  std::vector<Outcome> outcomes_ GUARDED_BY(mu_);
  // The request of this server tells a token more, and ends.
  std::function<void(const absl::Status&)> cancelled_here_ = [this](const absl::Status& why) {
    Tell();
    answer_->Close(why);
  };
  uint32_t told_ = 0;
  const std::shared_ptr<Client> client_ = std::make_shared<Client>();
  OtherServer first_, second_;
  std::unique_ptr<ReplicaServers> servers_;
  std::shared_ptr<MovableAnswer> answer_;
};

TEST_F(MovableAnswerTest, GoesOnElsewhereFromWhatWasToldMeanwhile) {
  for (int i = 0; i < 3; ++i) Tell();
  answer_->Move(0);
  ExpectWhole();
  EXPECT_THAT(AwaitOutcomes(1), ElementsAre(Outcome::kMoved));
  const std::vector<v1::GenerateRequest> requests = first_.requests();
  ASSERT_EQ(requests.size(), 2u);
  EXPECT_THAT(requests[0].resume().token_ids(), ElementsAre(100, 101, 102));
  EXPECT_EQ(requests[0].sampling().max_tokens(), 4u);
  EXPECT_EQ(requests[0].sampling().min_tokens(), 4u);
  EXPECT_EQ(requests[0].request_id(), "prepare-r1");
  EXPECT_THAT(requests[1].resume().token_ids(), ElementsAre(100, 101, 102, 103));
  EXPECT_EQ(requests[1].sampling().max_tokens(), kTokens);
  EXPECT_EQ(requests[1].request_id(), "r1");
  EXPECT_EQ(first_.authorization(), "Bearer of the client");
  EXPECT_TRUE(second_.requests().empty());
}

TEST_F(MovableAnswerTest, BeforeItsFirstTokenTheRequestIsAskedAnew) {
  cancelled_here_ = [this](const absl::Status& why) { answer_->Close(why); };
  answer_->Move(1);
  ExpectWhole();
  for (const v1::GenerateRequest& request : second_.requests()) EXPECT_FALSE(request.has_resume());
}

TEST_F(MovableAnswerTest, TheNextServerIsAskedAndWhereNoneTakesItItStays) {
  first_.refuses = true;
  Tell();
  second_.refuses = true;
  answer_->Move(0);
  EXPECT_THAT(AwaitOutcomes(1), ElementsAre(Outcome::kStays));
  Tell();
  second_.refuses = false;
  answer_->Move(0);
  ExpectWhole();
  EXPECT_THAT(AwaitOutcomes(2), ElementsAre(Outcome::kStays, Outcome::kMoved));
}

TEST_F(MovableAnswerTest, AnAnswerThatEndsMeanwhileDoesNotMove) {
  cancelled_here_ = [this](const absl::Status&) {
    while (told_ < kTokens) Tell();
    v1::GenerateResponse response;
    response.mutable_finish()->set_reason(v1::FINISH_REASON_LENGTH);
    answer_->Write(std::move(response));
    answer_->Close(absl::OkStatus());
  };
  Tell();
  answer_->Move(0);
  ExpectWhole();
  EXPECT_EQ(first_.requests().size(), 1u);
}

TEST_F(MovableAnswerTest, WhereTheOtherServerFailsTheNextGoesOn) {
  first_.breaks_at = 6;
  Tell();
  answer_->Move(0);
  ExpectWhole();
  EXPECT_EQ(second_.requests().back().resume().token_ids_size(), 6);
}

TEST_F(MovableAnswerTest, ServersThatFailOneAfterTheOtherEachGoOn) {
  first_.breaks_at = 5;
  second_.breaks_at = 7;
  second_.on_break = [this] { first_.breaks_at = UINT32_MAX; };
  Tell();
  answer_->Move(0);
  ExpectWhole();
  EXPECT_EQ(first_.requests().back().resume().token_ids_size(), 7);
}

TEST_F(MovableAnswerTest, WhereNobodyGoesOnTheClientHearsIt) {
  first_.breaks_at = 6;
  Tell();
  second_.refuses = true;
  answer_->Move(0);
  const absl::Status status = client_->got.status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr("the queue is full"));
  EXPECT_THAT(AwaitOutcomes(2), ElementsAre(Outcome::kMoved, Outcome::kLost));
  EXPECT_EQ(client_->got.token_ids().size(), 6u);
}

TEST_F(MovableAnswerTest, NothingGoesOnForAClientThatLeft) {
  first_.hangs_at = 5;
  Tell();
  answer_->Move(0);
  client_->got.AwaitMessages(5);
  answer_->Abandon(absl::CancelledError("the client left"));
  EXPECT_EQ(client_->got.status(), absl::CancelledError("the client left"));
  EXPECT_TRUE(second_.requests().empty());
}

TEST(ReplicaServersTest, WhatIsNoAddressIsRefused) {
  const absl::Status status = ReplicaServers::Create("--x", "a:1, b", {}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(status.message(), HasSubstr("--x: 'b' is no address"));
}

}  // namespace
}  // namespace kvasir::coordinator
