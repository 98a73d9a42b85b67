// A worker process within the test's own: a real gRPC server on a unix socket with a FakeRank
// behind it. Its destruction is the death of the worker. Thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <unistd.h>
#include <utility>

#include "absl/strings/str_cat.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "gtest/gtest.h"

#include "kernels/base/mutex.h"
#include "proto/grpc_status.h"
#include "proto/kvasir/v1/worker.grpc.pb.h"
#include "proto/security/group_handshake.h"
#include "proto/worker_protocol.h"
#include "tests/support/fake_rank.h"

namespace kvasir::testing {

class FakeWorkerService final : public v1::Worker::Service {
 public:
  explicit FakeWorkerService(FakeRankOptions options)
      : FakeWorkerService(std::move(options), FreshAddress()) {}
  // Without `secret`: the empty one.
  FakeWorkerService(FakeRankOptions options, std::string address,
                    std::shared_ptr<const proto::GroupSecret> secret = nullptr)
      : options_(std::move(options)), address_(std::move(address)), secret_(std::move(secret)) {
    if (secret_ == nullptr) secret_ = proto::GroupSecret::Read("").value();
    grpc::ServerBuilder builder;
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                               proto::kWorkerMinPingIntervalMs);
    builder.SetMaxReceiveMessageSize(proto::kMaxWorkerMessageBytes);
    // A synchronous server's threads notice its end only when they time out: 10 s by default.
    builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::CQ_TIMEOUT_MSEC, 50);
    builder.AddListeningPort(address_, grpc::InsecureServerCredentials());
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    EXPECT_NE(server_, nullptr) << address_;
  }
  ~FakeWorkerService() override { server_->Shutdown(std::chrono::system_clock::now()); }

  static std::string FreshAddress() {
    const ::testing::TestInfo& test = *::testing::UnitTest::GetInstance()->current_test_info();
    static std::atomic<int> count = 0;
    return absl::StrCat("unix:", ::testing::TempDir(), "/", test.name(), ".", getpid(), ".",
                        ++count);
  }
  const std::string& address() const { return address_; }
  // Messages after the proofs.
  int64_t messages() const { return messages_.load(); }
  int64_t streams() const { return streams_.load(); }

  grpc::Status Run(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<v1::WorkerMessage, v1::CoordinatorMessage>* stream) override {
    ++streams_;
    v1::CoordinatorMessage message;
    proto::WorkerHandshake handshake(secret_);
    stream->Write(handshake.Challenge());
    if (!stream->Read(&message)) return grpc::Status::CANCELLED;
    absl::StatusOr<v1::WorkerMessage> proof = handshake.Answer(message);
    if (!proof.ok()) return proto::ToGrpcStatus(proof.status());
    if (!options_.proves) proof->mutable_proof()->set_proof(std::string(32, 'x'));
    stream->Write(*proof);
    FakeRank rank(options_);
    while (stream->Read(&message)) {
      ++messages_;
      absl::StatusOr<std::vector<v1::WorkerMessage>> answers = rank.Answer(message);
      if (!answers.ok()) return proto::ToGrpcStatus(answers.status());
      for (const v1::WorkerMessage& answer : *answers) stream->Write(answer);
    }
    return grpc::Status::OK;
  }

 private:
  const FakeRankOptions options_;
  const std::string address_;
  std::shared_ptr<const proto::GroupSecret> secret_;
  std::atomic<int64_t> streams_ = 0;
  std::atomic<int64_t> messages_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace kvasir::testing
