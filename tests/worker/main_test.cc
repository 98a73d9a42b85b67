// The kvasir-worker program: flags, health, SIGTERM.
#include <chrono>
#include <signal.h>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "absl/strings/str_cat.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/impl/codegen/client_unary_call.h"
#include "grpcpp/support/byte_buffer.h"
#include "gtest/gtest.h"

#include "proto/kvasir/v1/worker.grpc.pb.h"
#include "proto/worker_protocol.h"
#include "tests/worker/model/test_files.h"
#include "tests/worker/prove_secret.h"
#include "tests/worker/random_model.h"
#include "tests/worker/test_worker.h"

namespace kvasir::worker {
namespace {

class Process {
 public:
  explicit Process(const std::vector<std::string>& arguments) {
    std::vector<char*> argv = {const_cast<char*>(KVASIR_WORKER_BINARY)};
    for (const std::string& argument : arguments)
      argv.push_back(const_cast<char*>(argument.c_str()));
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      execv(KVASIR_WORKER_BINARY, argv.data());
      _exit(127);
    }
  }
  ~Process() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      Wait();
    }
  }
  void Signal(int signal) { kill(pid_, signal); }
  // Returns the exit code, or minus the signal that ended it.
  int Wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  pid_t pid_ = -1;
};

// grpc.health.v1.Health/Check without its generated code: {1: service} -> {1: status}.
enum class Health { kUnknown = 0, kServing = 1, kNotServing = 2 };
Health CheckHealth(grpc::Channel& channel, const std::string& service) {
  const std::string request =
      service.empty()
          ? ""
          : absl::StrCat("\x0a", std::string(1, static_cast<char>(service.size())), service);
  const grpc::Slice slice(request);
  const grpc::ByteBuffer in(&slice, 1);
  grpc::ByteBuffer out;
  grpc::ClientContext context;
  const grpc::internal::RpcMethod method("/grpc.health.v1.Health/Check",
                                         grpc::internal::RpcMethod::NORMAL_RPC);
  const grpc::Status status = grpc::internal::BlockingUnaryCall<grpc::ByteBuffer, grpc::ByteBuffer>(
      &channel, method, &context, in, &out);
  EXPECT_TRUE(status.ok()) << status.error_message();
  std::vector<grpc::Slice> slices;
  if (!out.Dump(&slices).ok() || slices.empty() || slices[0].size() < 2) return Health::kUnknown;
  return static_cast<Health>(slices[0].begin()[1]);
}

class WorkerMainTest : public testing::Test {
 protected:
  std::shared_ptr<grpc::Channel> Connect() const {
    auto channel = grpc::CreateChannel(address_, grpc::InsecureChannelCredentials());
    EXPECT_TRUE(
        channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(60)));
    return channel;
  }

  TemporaryFolder folder_;
  const std::string address_ = absl::StrCat("unix:", folder_.File("worker"));
  const std::vector<std::string> arguments_ = {"--listen", address_,    "--metrics-port",
                                               "0",        "--threads", "1"};
};

TEST_F(WorkerMainTest, IsLiveAtOnceReadyInAGroupAndExitsCleanlyOnSigterm) {
  RandomModel model;
  Process process(arguments_);
  const auto channel = Connect();
  EXPECT_EQ(CheckHealth(*channel, ""), Health::kServing);
  EXPECT_EQ(CheckHealth(*channel, proto::kWorkerServiceName), Health::kNotServing);

  grpc::ClientContext context;
  const auto stub = v1::Worker::NewStub(channel);
  const auto stream = stub->Run(&context);
  ASSERT_TRUE(ProveSecret(*stream).ok());
  v1::CoordinatorMessage message;
  v1::ShardPlan& plan = *message.mutable_shard_plan();
  plan.set_protocol_version(proto::kWorkerProtocolVersion);
  plan.set_tensor_parallel_size(1);
  plan.mutable_model()->set_model(model.folder());
  plan.mutable_kv()->set_kv_device_size_gb(0.01);
  plan.mutable_kv()->set_kv_host_size_gb(0.01);
  plan.set_max_num_seqs(1);
  plan.set_max_num_batched_tokens(64);
  *plan.add_policies() = MakePolicy("all", "all");
  plan.set_collective_timeout_s(5);
  plan.set_ranks_on_machine(1);
  plan.mutable_kv()->set_gpu_memory_utilization(0.9);
  stream->Write(message);
  v1::WorkerMessage answer;
  while (stream->Read(&answer) && !answer.has_ready()) {
  }
  ASSERT_TRUE(answer.has_ready());
  // Ready is sent a moment before health is reported.
  while (CheckHealth(*channel, proto::kWorkerServiceName) != Health::kServing) {
  }

  process.Signal(SIGTERM);
  EXPECT_FALSE(stream->Read(&answer));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(WorkerMainTest, WithoutASecretItListensForItsOwnMachineOnly) {
  for (const char* open : {"0.0.0.0:0", "[::]:0"}) {
    EXPECT_EQ(Process({"--listen", open, "--metrics-port", "0"}).Wait(), 2) << open;
  }
}

TEST_F(WorkerMainTest, WrongFlagsAreExitCode2) {
  EXPECT_EQ(Process({"--threads", "many"}).Wait(), 2);
  EXPECT_EQ(Process({"--no-such-flag", "1"}).Wait(), 2);
  EXPECT_EQ(Process({"--help"}).Wait(), 0);
}

TEST_F(WorkerMainTest, AddressInUseIsAnErrorAtOnce) {
  Process first(arguments_);
  Connect();
  EXPECT_EQ(Process({"--listen", "256.0.0.1:1", "--metrics-port", "0"}).Wait(), 1);
}

}  // namespace
}  // namespace kvasir::worker
