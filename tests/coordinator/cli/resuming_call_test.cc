#include "coordinator/cli/calls/resuming_call.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "gmock/gmock.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "gtest/gtest.h"

namespace kvasir::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

v1::GenerateResponse Progress() {
  v1::GenerateResponse response;
  response.mutable_progress()->set_request_id("r1");
  return response;
}

v1::GenerateResponse Tokens(uint32_t index, std::vector<uint32_t> ids) {
  v1::GenerateResponse response;
  response.mutable_tokens()->set_index(index);
  for (const uint32_t id : ids) response.mutable_tokens()->add_token_ids(id);
  return response;
}

v1::GenerateResponse End() {
  v1::GenerateResponse response;
  response.mutable_finish();
  return response;
}

// Answers each call with the next stream of a script, and then with the last one.
class ScriptedServer final : public v1::Generation::Service {
 public:
  struct Stream {
    std::vector<v1::GenerateResponse> responses;
    grpc::StatusCode end = grpc::StatusCode::UNAVAILABLE;
  };

  explicit ScriptedServer(std::vector<Stream> script) : script_(std::move(script)) {
    grpc::ServerBuilder builder;
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    stub_ = v1::Generation::NewStub(server_->InProcessChannel({}));
  }
  ~ScriptedServer() override { server_->Shutdown(); }

  grpc::Status Generate(grpc::ServerContext*, const v1::GenerateRequest* request,
                        grpc::ServerWriter<v1::GenerateResponse>* writer) override {
    const Stream& stream = script_[std::min(requests.size(), script_.size() - 1)];
    requests.push_back(*request);
    for (const v1::GenerateResponse& response : stream.responses) writer->Write(response);
    return {stream.end, "scripted"};
  }

  absl::Status Run(absl::Duration resume_timeout = absl::Seconds(60)) {
    v1::GenerateRequest request;
    request.set_text("prompt");
    ResumingCall call(*stub_, std::move(request), {.resume_timeout = resume_timeout});
    return call.Run([this](const v1::GenerateResponse& response) {
      tokens.insert(tokens.end(), response.tokens().token_ids().begin(),
                    response.tokens().token_ids().end());
    });
  }

  std::vector<v1::GenerateRequest> requests;
  std::vector<uint32_t> tokens;

 private:
  const std::vector<Stream> script_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<v1::Generation::Stub> stub_;
};

TEST(ResumingCallTest, AnAnswerGoesOnAfterTheTokensThatCame) {
  ScriptedServer server({{{Progress(), Tokens(0, {5}), Tokens(1, {6, 7})}},
                         ScriptedServer::Stream(),
                         {{}, grpc::StatusCode::ALREADY_EXISTS},
                         {{Progress(), Tokens(3, {8}), End()}, grpc::StatusCode::OK}});
  EXPECT_EQ(server.Run(), absl::OkStatus());
  EXPECT_THAT(server.tokens, ElementsAre(5, 6, 7, 8));
  ASSERT_EQ(server.requests.size(), 4u);
  EXPECT_FALSE(server.requests[0].has_resume());
  for (size_t i = 1; i < 4; ++i) {
    EXPECT_THAT(server.requests[i].resume().token_ids(), ElementsAre(5, 6, 7)) << i;
    EXPECT_EQ(server.requests[i].request_id(), "r1");
    EXPECT_EQ(server.requests[i].text(), "prompt");
  }
}

// Bug: the answer of a server that does not know `resume` was appended to what had come.
TEST(ResumingCallTest, AServerThatBeginsAnewIsToldApart) {
  for (const uint32_t index : {0u, 2u}) {
    ScriptedServer server(
        {{{Tokens(0, {5})}}, {{Progress(), Tokens(index, {5, 6}), End()}, grpc::StatusCode::OK}});
    const absl::Status status = server.Run();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(absl::StrContains(status.message(), "older release"), index == 0) << status;
    EXPECT_THAT(server.tokens, ElementsAre(5));
    EXPECT_EQ(server.requests.size(), 2u);
  }
}

TEST(ResumingCallTest, AServerThatNeverBeganIsNotAskedAgain) {
  ScriptedServer server({ScriptedServer::Stream()});
  EXPECT_EQ(server.Run().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(server.requests.size(), 1u);
}

TEST(ResumingCallTest, OtherErrorsEndTheCall) {
  ScriptedServer server({{{Tokens(0, {5})}, grpc::StatusCode::FAILED_PRECONDITION}});
  EXPECT_EQ(server.Run().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(server.requests.size(), 1u);
}

TEST(ResumingCallTest, WithoutTimeToResumeALossEndsTheCall) {
  ScriptedServer server({{{Tokens(0, {5})}}});
  EXPECT_EQ(server.Run(absl::ZeroDuration()).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(server.requests.size(), 1u);
}

TEST(ResumingCallTest, ARequestThatBreaksEveryServerEnds) {
  ScriptedServer server({{{Progress(), Tokens(0, {5})}}, {{Progress()}}});
  EXPECT_EQ(server.Run().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(server.requests.size(), 4u);  // one with a token, three without
}

TEST(ResumingCallTest, ALossAfterTheFinishIsNone) {
  ScriptedServer server({{{Tokens(0, {5}), End()}}});
  EXPECT_EQ(server.Run(), absl::OkStatus());
  EXPECT_EQ(server.requests.size(), 1u);
}

TEST(ResumingCallTest, AStreamWithoutAFinishIsAFault) {
  ScriptedServer server({{{}, grpc::StatusCode::OK}});
  EXPECT_EQ(server.Run().code(), absl::StatusCode::kInternal);
  EXPECT_THAT(server.tokens, IsEmpty());
}

}  // namespace
}  // namespace kvasir::coordinator
