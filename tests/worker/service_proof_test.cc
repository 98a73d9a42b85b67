// Who may open a worker's stream: a real gRPC server whose streams are served by a test's function.
#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "prometheus/registry.h"

#include "proto/grpc_listener.h"
#include "tests/worker/model/test_files.h"
#include "tests/worker/prove_secret.h"
#include "worker/service.h"

namespace kvasir::worker {
namespace {

using Secret = std::shared_ptr<const proto::GroupSecret>;

// A worker that tells "stored" to whoever it serves.
class Served {
 public:
  // `end`: what remains to be done at the end of each stream. `leaving` has the limit of that.
  Served(
      const TemporaryFolder& folder, Secret secret, absl::Duration proof_time,
      std::function<void()> end = [] {}, const WorkerServiceOptions& leaving = {})
      : address_(absl::StrCat("unix:", folder.File("worker"))),
        listener_(
            proto::GrpcListener::Listen({.address = address_, .registry = &registry_}).value()),
        service_(
            {.secret = std::move(secret),
             .proof_time = proof_time,
             .leave_time = leaving.leave_time,
             .on_stuck = leaving.on_stuck},
            [end = std::move(end)](CoordinatorStream& stream) {
              v1::WorkerMessage stored;
              stored.mutable_tier_report()->add_forgotten("stored");
              stream.Write(std::move(stored));
              while (stream.Read()) {
              }
              end();
              return absl::OkStatus();
            },
            *listener_) {
    grpc::ServerBuilder builder;
    listener_->AddTo(builder);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    listener_->Start();
  }
  ~Served() {
    service_.Shutdown();
    listener_->Stop();
    server_->Shutdown(std::chrono::system_clock::now());
    server_->Wait();
  }
  const std::string& address() const { return address_; }

 private:
  const std::string address_;
  prometheus::Registry registry_;
  std::unique_ptr<proto::GrpcListener> listener_;
  WorkerService service_;
  std::unique_ptr<grpc::Server> server_;
};

struct Client {
  explicit Client(const std::string& address)
      : stub(v1::Worker::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()))),
        stream(stub->Run(&context)) {}
  ~Client() {
    context.TryCancel();
    if (!finished) Finish();
  }
  // Returns the messages until the end of the stream.
  std::vector<v1::WorkerMessage> ReadAll() {
    std::vector<v1::WorkerMessage> all;
    v1::WorkerMessage message;
    while (stream->Read(&message)) all.push_back(message);
    return all;
  }
  grpc::StatusCode Finish() {
    finished = true;
    return stream->Finish().error_code();
  }

  grpc::ClientContext context;
  std::unique_ptr<v1::Worker::Stub> stub;
  std::unique_ptr<CoordinatorEnd> stream;
  bool finished = false;
};

class ServiceProofTest : public ::testing::Test {
 protected:
  const absl::Duration kLong = absl::Hours(1);

  Secret MakeSecret() {
    const std::string path = folder_.File(absl::StrCat("secret", ++secrets_));
    EXPECT_TRUE(proto::GroupSecret::Make(path).ok());
    return proto::GroupSecret::Read(path).value();
  }
  // Proves the secret and returns true when the worker then serves the stream.
  static bool IsServed(Client& client, const Secret& secret) {
    v1::WorkerMessage message;
    if (!ProveSecret(*client.stream, secret).ok()) return false;
    while (client.stream->Read(&message)) {
      if (message.has_tier_report()) return true;
    }
    return false;
  }
  // Returns a stream that the worker admits, null when it admits none for 10 s. It learns of the
  // end of another stream a little after its client.
  std::unique_ptr<Client> Admitted(const Served& worker) const {
    const absl::Time deadline = absl::Now() + absl::Seconds(10);
    while (absl::Now() < deadline) {
      auto client = std::make_unique<Client>(worker.address());
      v1::WorkerMessage message;
      if (ProveSecret(*client->stream, secret_).ok() && client->stream->Read(&message)) {
        return client;
      }
    }
    return nullptr;
  }
  // Expects the stream to end with `code` and to have told a challenge only.
  static void ExpectToldNothing(Client& client, grpc::StatusCode code) {
    for (const v1::WorkerMessage& message : client.ReadAll()) {
      EXPECT_TRUE(message.has_challenge()) << message.DebugString();
    }
    EXPECT_EQ(client.Finish(), code);
  }

  TemporaryFolder folder_;
  int secrets_ = 0;
  const Secret secret_ = MakeSecret();
};

TEST_F(ServiceProofTest, OnlyTheSecretOpensAWorker) {
  Served worker(folder_, secret_, kLong);
  {
    Client stranger(worker.address());
    EXPECT_FALSE(IsServed(stranger, MakeSecret()));
    EXPECT_EQ(stranger.Finish(), grpc::StatusCode::UNAUTHENTICATED);
  }
  {
    Client without(worker.address());
    EXPECT_FALSE(IsServed(without, nullptr));
    EXPECT_EQ(without.Finish(), grpc::StatusCode::UNAUTHENTICATED);
  }
  {
    Client older(worker.address());
    v1::CoordinatorMessage plan;
    plan.mutable_shard_plan()->mutable_kv()->set_kv_disk_path("/var/lib/kvasir");
    older.stream->Write(plan);
    ExpectToldNothing(older, grpc::StatusCode::FAILED_PRECONDITION);
  }
  Client coordinator(worker.address());
  EXPECT_TRUE(IsServed(coordinator, secret_));
  Client second(worker.address());
  EXPECT_FALSE(IsServed(second, secret_));
  EXPECT_EQ(second.Finish(), grpc::StatusCode::ALREADY_EXISTS);
}

// The end of the first stream takes long, and the coordinator tries again and again meanwhile.
TEST_F(ServiceProofTest, AStreamThatEndedWhileItWaitedKeepsNobodyOut) {
  std::promise<void> may_end;
  const std::shared_future<void> end(may_end.get_future());
  Served worker(folder_, secret_, kLong, [end] { end.wait(); });
  ASSERT_NE(Admitted(worker), nullptr);
  ASSERT_NE(Admitted(worker), nullptr);
  const std::unique_ptr<Client> waiting = Admitted(worker);
  may_end.set_value();
  ASSERT_NE(waiting, nullptr);
  v1::WorkerMessage message;
  ASSERT_TRUE(waiting->stream->Read(&message));
  EXPECT_TRUE(message.has_tier_report());
}

TEST_F(ServiceProofTest, ASilentStreamKeepsNobodyOut) {
  Served worker(folder_, secret_, kLong);
  Client silent(worker.address());
  v1::WorkerMessage challenge;
  ASSERT_TRUE(silent.stream->Read(&challenge));
  Client coordinator(worker.address());
  EXPECT_TRUE(IsServed(coordinator, secret_));
}

TEST_F(ServiceProofTest, ASilentStreamEndsInTime) {
  Served worker(folder_, secret_, absl::Milliseconds(50));
  Client silent(worker.address());
  ExpectToldNothing(silent, grpc::StatusCode::DEADLINE_EXCEEDED);
}

TEST_F(ServiceProofTest, TheOldestOfManySilentStreamsGivesWay) {
  Served worker(folder_, secret_, kLong);
  std::vector<std::unique_ptr<Client>> silent;
  v1::WorkerMessage challenge;
  for (size_t i = 0; i <= WorkerService::kMostUnproven; ++i) {
    silent.push_back(std::make_unique<Client>(worker.address()));
    ASSERT_TRUE(silent.back()->stream->Read(&challenge));
  }
  ExpectToldNothing(*silent.front(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  Client coordinator(worker.address());
  EXPECT_TRUE(IsServed(coordinator, secret_));
}

TEST_F(ServiceProofTest, ShutdownEndsSilentStreams) {
  auto worker = std::make_unique<Served>(folder_, secret_, kLong);
  Client silent(worker->address());
  v1::WorkerMessage challenge;
  ASSERT_TRUE(silent.stream->Read(&challenge));
  worker.reset();
  ExpectToldNothing(silent, grpc::StatusCode::UNAVAILABLE);
}

// A stream that waits for its turn longer than that is a sign that only a new process helps.
TEST_F(ServiceProofTest, AGroupThatIsNotLeftInTimeIsTold) {
  std::promise<void> may_end, stuck;
  std::future<void> is_stuck = stuck.get_future();
  Served worker(folder_, secret_, kLong, [ended = may_end.get_future().share()] { ended.wait(); },
                {.secret = nullptr, .leave_time = absl::Milliseconds(200), .on_stuck = [&stuck] {
                   stuck.set_value();
                 }});
  {
    Client first(worker.address());
    ASSERT_TRUE(IsServed(first, secret_));
    EXPECT_EQ(is_stuck.wait_for(std::chrono::milliseconds(400)), std::future_status::timeout)
        << "though its coordinator is there";
    first.context.TryCancel();
    first.Finish();
  }
  const std::unique_ptr<Client> second = Admitted(worker);
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(is_stuck.wait_for(std::chrono::seconds(10)), std::future_status::ready);
  may_end.set_value();
}

TEST_F(ServiceProofTest, AGroupThatIsLeftInTimeIsNotTold) {
  std::promise<void> may_end;
  std::atomic<bool> is_stuck = false;
  Served worker(folder_, secret_, kLong, [ended = may_end.get_future().share()] { ended.wait(); },
                {.secret = nullptr, .leave_time = absl::Milliseconds(500), .on_stuck = [&is_stuck] {
                   is_stuck = true;
                 }});
  {
    Client first(worker.address());
    ASSERT_TRUE(IsServed(first, secret_));
    first.context.TryCancel();
    first.Finish();
  }
  const std::unique_ptr<Client> second = Admitted(worker);
  ASSERT_NE(second, nullptr);
  may_end.set_value();
  absl::SleepFor(absl::Seconds(1));  // longer than leave_time
  EXPECT_FALSE(is_stuck);
}

}  // namespace
}  // namespace kvasir::worker
