// The worker as the coordinator sees it: a gRPC server on a unix socket, a real model, real plans.
#include "worker/service.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "prometheus/registry.h"
#include "prometheus/text_serializer.h"

#include "kernels/base/executor.h"
#include "proto/grpc_listener.h"
#include "proto/worker_protocol.h"
#include "tests/worker/model/test_files.h"
#include "tests/worker/prove_secret.h"
#include "tests/worker/random_model.h"
#include "tests/worker/test_coordinator.h"
#include "tests/worker/test_worker.h"
#include "worker/backend/cpu/cpu_backend.h"
#include "worker/group_member.h"
#include "worker/metrics.h"

namespace kvasir::worker {
namespace {

using testing::Contains;
using testing::HasSubstr;
using testing::Not;

// A worker process without the process.
class WorkerProcess {
 public:
  WorkerProcess()
      : metrics_(registry_),
        member_({.metrics_address = "127.0.0.1:1", .on_ready = [](bool) {}}, backend_, metrics_),
        listener_(
            proto::GrpcListener::Listen({.address = address(), .registry = &registry_}).value()),
        service_(
            {.secret = proto::GroupSecret::Read("").value()},
            [this](CoordinatorStream& stream) { return member_.Serve(stream); }, *listener_) {
    grpc::ServerBuilder builder;
    listener_->AddTo(builder);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    listener_->Start();
  }
  ~WorkerProcess() {
    Shutdown();
    listener_->Stop();
    server_->Shutdown();
  }
  void Shutdown() { service_.Shutdown(); }

  std::string address() const { return absl::StrCat("unix:", folder_.File("worker")); }
  std::string metrics() const {
    std::ostringstream text;
    prometheus::TextSerializer().Serialize(text, registry_.Collect());
    return text.str();
  }

 private:
  TemporaryFolder folder_;
  prometheus::Registry registry_;
  WorkerMetrics metrics_;
  kernels::SerialExecutor executor_;
  CpuBackend backend_{executor_};
  GroupMember member_;
  std::unique_ptr<proto::GrpcListener> listener_;
  WorkerService service_;
  std::unique_ptr<grpc::Server> server_;
};

// The coordinator's end of one stream.
class Stream {
 public:
  explicit Stream(const std::string& address)
      : stub_(
            v1::Worker::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()))),
        stream_(stub_->Run(&context_)) {
    ProveSecret(*stream_).IgnoreError();  // a worker that refuses says so in Finish
  }

  void Send(const v1::ShardPlan& plan) {
    v1::CoordinatorMessage message;
    *message.mutable_shard_plan() = plan;
    stream_->Write(message);
  }
  void Send(const v1::StepPlan& plan) {
    v1::CoordinatorMessage message;
    *message.mutable_step_plan() = plan;
    stream_->Write(message);
  }
  // Returns the next message that is not about loading; nothing when the stream has ended.
  std::optional<v1::WorkerMessage> Receive() {
    v1::WorkerMessage message;
    while (stream_->Read(&message)) {
      if (!message.has_load_progress()) return message;
      stages_.push_back(message.load_progress().stage());
    }
    return std::nullopt;
  }
  const std::vector<std::string>& stages() const { return stages_; }  // in its progress
  grpc::Status Finish() { return stream_->Finish(); }
  // Ends the sending side, and waits for the end of the stream.
  grpc::Status Leave() {
    stream_->WritesDone();
    while (Receive()) {
    }
    return Finish();
  }
  void Cancel() { context_.TryCancel(); }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<v1::Worker::Stub> stub_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::CoordinatorMessage, v1::WorkerMessage>> stream_;
  std::vector<std::string> stages_;
};

class WorkerServiceTest : public testing::Test {
 protected:
  v1::ShardPlan GoodPlan(uint64_t epoch = 1) const {
    v1::ShardPlan plan;
    plan.set_protocol_version(proto::kWorkerProtocolVersion);
    plan.set_group_epoch(epoch);
    plan.set_tensor_parallel_size(1);
    plan.mutable_model()->set_model(model_.folder());
    plan.mutable_model()->set_dtype("float32");
    plan.mutable_kv()->set_kv_device_size_gb(0.02);
    plan.mutable_kv()->set_kv_host_size_gb(0.02);
    plan.set_max_num_seqs(4);
    plan.set_max_num_batched_tokens(512);
    *plan.add_policies() = MakePolicy("all", "quest");
    plan.mutable_policies(0)->set_name("default");
    plan.set_mass_sample_rate(1);
    plan.set_collective_timeout_s(5);
    plan.set_ranks_on_machine(1);
    plan.set_served_model_name("served");
    plan.mutable_kv()->set_gpu_memory_utilization(0.9);
    return plan;
  }
  static TestRequest MakeRequest() {
    return {.prompt = std::vector<uint32_t>(300, 5),
            .max_tokens = 3,
            .prefill = MakeNumbers(0, 1, 0),
            .decode = MakeNumbers(16, 70, 64),
            .sampling = Greedy(),
            .cached_blocks = {}};
  }
  static grpc::Status StatusOf(const std::string& address, const v1::ShardPlan& plan) {
    Stream stream(address);
    stream.Send(plan);
    EXPECT_FALSE(stream.Receive().has_value());
    return stream.Finish();
  }

  RandomModel model_;
  WorkerProcess process_;
};

TEST_F(WorkerServiceTest, HandshakeThenPlansInOrder) {
  Stream stream(process_.address());
  stream.Send(GoodPlan());
  const auto ready = stream.Receive();
  ASSERT_TRUE(ready && ready->has_ready());
  EXPECT_EQ(ready->ready().weights_hash().size(), 32u);
  EXPECT_EQ(ready->ready().kv_form(), "rotated/float32");
  EXPECT_EQ(ready->ready().vocab_size(), 101u);
  EXPECT_EQ(ready->ready().max_model_len(), 4096u);
  EXPECT_EQ(ready->ready().trained_window(), 0u);
  EXPECT_EQ(ready->ready().mass_unmeasured(), v1::MASS_UNMEASURED_UNSPECIFIED);
  EXPECT_GT(ready->ready().attention_parity_tokens(), 0u);
  EXPECT_EQ(ready->ready().metrics_address(), "127.0.0.1:1");
  // K and V of 64 tokens in 3 layers and 4 heads of 16 floats.
  EXPECT_EQ(ready->ready().block_bytes(), 2u * 64 * 3 * 4 * 16 * 4);
  EXPECT_EQ(ready->ready().device_blocks(), 20'000'000 / ready->ready().block_bytes());
  EXPECT_THAT(stream.stages(), Contains("accepted"));

  TestCoordinator coordinator({.chunk = 128});
  const size_t r = coordinator.Add(MakeRequest());
  while (!coordinator.done()) {
    const v1::StepPlan plan = coordinator.NextPlan();
    stream.Send(plan);
    const auto reply = stream.Receive();
    ASSERT_TRUE(reply && reply->has_step_reply());
    coordinator.Apply(plan, reply->step_reply());
  }
  EXPECT_EQ(coordinator.result(r).tokens.size(), 3u);
  EXPECT_TRUE(coordinator.result(r).status.ok());
  EXPECT_EQ(stream.Leave().error_code(), grpc::StatusCode::CANCELLED);

  const std::string metrics = process_.metrics();
  EXPECT_THAT(metrics, HasSubstr("kvasir_attention_blocks_total{"));
  EXPECT_THAT(metrics, HasSubstr("kvasir_attention_mass_kept_ratio_count{model_name=\"served\","
                                 "phase=\"decode\",policy=\"default\",rank=\"0\"}"));
}

TEST_F(WorkerServiceTest, ExtendedPositionsLengthenTheContextAndNameTheKvForm) {
  v1::ShardPlan plan = GoodPlan();
  plan.mutable_model()->set_max_model_len(10'000);
  EXPECT_EQ(StatusOf(process_.address(), plan).error_code(), grpc::StatusCode::INVALID_ARGUMENT)
      << "the model was trained for 4,096 tokens";
  plan.mutable_model()->set_position_extension("streaming");
  Stream stream(process_.address());
  stream.Send(plan);
  const auto ready = stream.Receive();
  ASSERT_TRUE(ready && ready->has_ready());
  EXPECT_EQ(ready->ready().kv_form(), "unrotated/float32");
  EXPECT_EQ(ready->ready().max_model_len(), 10'000u);
  EXPECT_EQ(ready->ready().trained_window(), 4096u);
  EXPECT_EQ(ready->ready().mass_unmeasured(), v1::MASS_UNMEASURED_COMPACT_POSITIONS);
  stream.Leave();
  plan.mutable_model()->set_position_extension("other");
  EXPECT_EQ(StatusOf(process_.address(), plan).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(WorkerServiceTest, GroupedPositionsLengthenTheContextByTheirSize) {
  v1::ShardPlan plan = GoodPlan();
  plan.mutable_model()->set_position_extension("self_extend");
  plan.set_mass_sample_rate(0);
  plan.mutable_model()->set_self_extend_group_size(8);
  plan.mutable_model()->set_self_extend_window(1024);
  constexpr uint32_t kLongest = (4096 - 1024) * 8 + 1024;
  plan.mutable_model()->set_max_model_len(kLongest);
  Stream stream(process_.address());
  stream.Send(plan);
  const auto ready = stream.Receive();
  ASSERT_TRUE(ready && ready->has_ready());
  EXPECT_EQ(ready->ready().kv_form(), "unrotated, groups of 8 behind 1024/float32");
  EXPECT_EQ(ready->ready().max_model_len(), kLongest);
  EXPECT_EQ(ready->ready().mass_unmeasured(), v1::MASS_UNMEASURED_OFF);
  EXPECT_EQ(ready->ready().trained_window(), 0u) << "dense attention is no worse than another";
  stream.Leave();
  const auto expect_refused = [&](const auto& edit, const char* message) {
    v1::ShardPlan bad = plan;
    edit(*bad.mutable_model());
    const grpc::Status status = StatusOf(process_.address(), bad);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr(message));
  };
  expect_refused([](auto& model) { model.set_max_model_len(kLongest + 1); },
                 "is beyond the 25600 tokens that groups of 8 behind a window of 1024");
  expect_refused([](auto& model) { model.set_self_extend_group_size(1); }, "groups are of 2");
  expect_refused([](auto& model) { model.set_self_extend_window(4096); }, "less than the 4096");
}

TEST_F(WorkerServiceTest, SecondStreamIsRefusedAndTheFirstGoesOn) {
  Stream first(process_.address());
  first.Send(GoodPlan());
  ASSERT_TRUE(first.Receive()->has_ready());
  EXPECT_EQ(StatusOf(process_.address(), GoodPlan()).error_code(),
            grpc::StatusCode::ALREADY_EXISTS);
  TestCoordinator coordinator({});
  first.Send(coordinator.NextPlan());
  EXPECT_TRUE(first.Receive()->has_step_reply());
}

TEST_F(WorkerServiceTest, BrokenStreamFreesTheWorkerAndKeepsTheWeights) {
  {
    Stream first(process_.address());
    first.Send(GoodPlan());
    ASSERT_TRUE(first.Receive()->has_ready());
    EXPECT_THAT(first.stages(), Contains("loading weights"));
    first.Cancel();
    EXPECT_EQ(first.Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  // The worker notices the end a little after the coordinator.
  for (;;) {
    Stream second(process_.address());
    second.Send(GoodPlan(/*epoch=*/2));
    const auto ready = second.Receive();
    if (!ready) {
      ASSERT_EQ(second.Finish().error_code(), grpc::StatusCode::ALREADY_EXISTS);
      continue;
    }
    ASSERT_TRUE(ready->has_ready());
    EXPECT_THAT(second.stages(), Not(Contains(HasSubstr("weights"))));
    TestCoordinator coordinator({.group_epoch = 2});
    second.Send(coordinator.NextPlan());
    EXPECT_TRUE(second.Receive()->has_step_reply());
    return;
  }
}

TEST_F(WorkerServiceTest, PlanOfAnotherEpochEndsTheStream) {
  Stream stream(process_.address());
  stream.Send(GoodPlan(/*epoch=*/7));
  ASSERT_TRUE(stream.Receive()->has_ready());
  TestCoordinator coordinator({.group_epoch = 6});
  stream.Send(coordinator.NextPlan());
  EXPECT_FALSE(stream.Receive().has_value());
  EXPECT_EQ(stream.Finish().error_code(), grpc::StatusCode::FAILED_PRECONDITION);
}

TEST_F(WorkerServiceTest, ModelThatDoesNotDivideIsRefusedByName) {
  v1::ShardPlan plan = GoodPlan();
  plan.set_tensor_parallel_size(3);
  const grpc::Status status = StatusOf(process_.address(), plan);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), testing::AllOf(HasSubstr("heads"), HasSubstr("3")));
}

TEST_F(WorkerServiceTest, AContextBeyondTheModelsIsServedWhenItIsAllowed) {
  v1::ShardPlan plan = GoodPlan();
  plan.mutable_model()->set_max_model_len(5000);
  plan.mutable_model()->set_allow_long_max_model_len(true);
  Stream stream(process_.address());
  stream.Send(plan);
  const auto ready = stream.Receive();
  ASSERT_TRUE(ready && ready->has_ready());
  EXPECT_EQ(ready->ready().max_model_len(), 5000u);
}

TEST_F(WorkerServiceTest, WrongShardPlansAreRefused) {
  using Spoil = std::function<void(v1::ShardPlan&)>;
  const std::vector<std::pair<Spoil, grpc::StatusCode>> cases = {
      {[](auto& p) { p.set_protocol_version(99); }, grpc::StatusCode::FAILED_PRECONDITION},
      {[](auto& p) { p.set_tensor_parallel_rank(1); }, grpc::StatusCode::INVALID_ARGUMENT},
      {[](auto& p) { p.set_tensor_parallel_size(0); }, grpc::StatusCode::INVALID_ARGUMENT},
      {[](auto& p) { p.mutable_model()->set_model("/nowhere"); }, grpc::StatusCode::NOT_FOUND},
      {[](auto& p) { p.mutable_model()->set_dtype("int3"); }, grpc::StatusCode::INVALID_ARGUMENT},
      {[](auto& p) { p.mutable_model()->set_max_model_len(5000); },
       grpc::StatusCode::INVALID_ARGUMENT},
      {[](auto& p) { p.mutable_kv()->set_kv_host_size_gb(-1); },
       grpc::StatusCode::INVALID_ARGUMENT},
      {[](auto& p) { p.mutable_kv()->set_kv_device_size_gb(1e-6); },
       grpc::StatusCode::RESOURCE_EXHAUSTED},
      {[](auto& p) { p.mutable_kv()->set_gpu_memory_utilization(0); },
       grpc::StatusCode::INVALID_ARGUMENT},
      {[](auto& p) { p.set_ranks_on_machine(0); }, grpc::StatusCode::INVALID_ARGUMENT},
      {[](auto& p) { p.set_ranks_on_machine(2); }, grpc::StatusCode::INVALID_ARGUMENT},
      {[](auto& p) { p.set_max_num_seqs(0); }, grpc::StatusCode::INVALID_ARGUMENT},
      {[](auto& p) { p.set_max_num_batched_tokens(0xffffffffu); },
       grpc::StatusCode::INVALID_ARGUMENT},
      {[](auto& p) { p.clear_policies(); }, grpc::StatusCode::INVALID_ARGUMENT},
      {[](auto& p) { p.add_policies(); }, grpc::StatusCode::INVALID_ARGUMENT},
      {[](auto& p) { p.set_mass_sample_rate(std::nan("")); }, grpc::StatusCode::INVALID_ARGUMENT},
      {[](auto& p) { p.set_collective_timeout_s(0); }, grpc::StatusCode::INVALID_ARGUMENT},
  };
  for (const auto& [spoil, code] : cases) {
    v1::ShardPlan plan = GoodPlan();
    spoil(plan);
    const grpc::Status status = StatusOf(process_.address(), plan);
    EXPECT_EQ(status.error_code(), code) << status.error_message() << "\n" << plan.DebugString();
  }
}

TEST_F(WorkerServiceTest, StreamWithoutShardPlanIsRefused) {
  Stream stream(process_.address());
  stream.Send(v1::StepPlan());
  EXPECT_FALSE(stream.Receive().has_value());
  EXPECT_EQ(stream.Finish().error_code(), grpc::StatusCode::FAILED_PRECONDITION);
}

TEST_F(WorkerServiceTest, ShutdownEndsTheStreamAndRefusesOthers) {
  Stream stream(process_.address());
  stream.Send(GoodPlan());
  ASSERT_TRUE(stream.Receive()->has_ready());
  process_.Shutdown();
  EXPECT_FALSE(stream.Receive().has_value());
  EXPECT_EQ(stream.Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(StatusOf(process_.address(), GoodPlan()).error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(WorkerServiceTest, LeavingDuringRendezvousFreesTheWorker) {
  v1::ShardPlan plan = GoodPlan();
  plan.set_tensor_parallel_size(2);
  {
    Stream stream(process_.address());
    stream.Send(plan);
    const auto entry = stream.Receive();
    ASSERT_TRUE(entry && entry->has_rendezvous());  // and nobody answers
    EXPECT_EQ(stream.Leave().error_code(), grpc::StatusCode::CANCELLED);
  }
  Stream next(process_.address());
  next.Send(GoodPlan());
  const auto ready = next.Receive();
  EXPECT_TRUE(ready && ready->has_ready());
}

}  // namespace
}  // namespace kvasir::worker
