#include "proto/grpc_listener.h"

#include <chrono>
#include <filesystem>
#include <linux/tcp.h>
#include <memory>
#include <netinet/in.h>
#include <string>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/server.h"
#include "gtest/gtest.h"
#include "prometheus/text_serializer.h"

#include "tests/support/health_client.h"

namespace kvasir::proto {
namespace {

using kvasir::testing::CheckHealth;
using kvasir::testing::Health;

// A server with only the health service, and at most two connections.
class GrpcListenerTest : public ::testing::Test {
 protected:
  void Serve(const std::string& address) {
    auto listener =
        GrpcListener::Listen({.address = address, .registry = &registry_, .most_connections = 2});
    ASSERT_TRUE(listener.ok()) << listener.status();
    listener_ = *std::move(listener);
    grpc::EnableDefaultHealthCheckService(true);
    grpc::ServerBuilder builder;
    listener_->AddTo(builder);
    builder.RegisterCallbackGenericService(&others_);
    server_ = builder.BuildAndStart();
    ASSERT_NE(server_, nullptr);
    listener_->Start();
  }
  ~GrpcListenerTest() override {
    if (server_ == nullptr) return;
    listener_->Stop();
    server_->Shutdown(std::chrono::system_clock::now());
  }
  std::shared_ptr<grpc::Channel> NewChannel(const std::string& address) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  }
  struct Connected {
    int socket;
    std::string peer;  // as the server names it
  };
  static Connected Connect(int port) {
    const int client = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in where = {};
    where.sin_family = AF_INET;
    where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    where.sin_port = htons(static_cast<uint16_t>(port));
    EXPECT_EQ(connect(client, reinterpret_cast<const sockaddr*>(&where), sizeof(where)), 0);
    socklen_t length = sizeof(where);
    getsockname(client, reinterpret_cast<sockaddr*>(&where), &length);
    return {client, absl::StrCat("ipv4:127.0.0.1:", ntohs(where.sin_port))};
  }
  std::string metrics() { return prometheus::TextSerializer().Serialize(registry_.Collect()); }
  // Waits until it holds; by default for a generous time.
  template <typename Condition>
  bool Eventually(Condition condition, std::chrono::seconds patience = std::chrono::seconds(10)) {
    const auto deadline = std::chrono::steady_clock::now() + patience;
    while (!condition()) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return true;
  }

  prometheus::Registry registry_;
  std::unique_ptr<GrpcListener> listener_;
  grpc::CallbackGenericService others_;  // a server without a callback service does not start
  std::unique_ptr<grpc::Server> server_;
};

TEST_F(GrpcListenerTest, TheOldestConnectionWithoutACallGivesWay) {
  Serve("[::1]:0");
  std::vector<std::shared_ptr<grpc::Channel>> channels;
  for (int i = 0; i < 6; ++i) {
    channels.push_back(NewChannel(absl::StrCat("[::1]:", listener_->port())));
    EXPECT_EQ(CheckHealth(channels.back(), ""), Health::kServing);
  }
  EXPECT_THAT(metrics(),
              ::testing::HasSubstr("kvasir_connections_dropped_total{reason=\"idle\"} 4"));
  EXPECT_EQ(listener_->status(), absl::OkStatus());
}

// The listener does not see the calls of a health watcher; it sees these.
TEST_F(GrpcListenerTest, WhereAllConnectionsCarryCallsANewOneIsRefused) {
  Serve("127.0.0.1:0");
  std::vector<int> sockets;
  std::vector<std::unique_ptr<GrpcListener::Call>> calls;
  for (int i = 0; i < 2; ++i) {
    const Connected connected = Connect(listener_->port());
    sockets.push_back(connected.socket);
    std::unique_ptr<GrpcListener::Call> call;
    EXPECT_TRUE(Eventually([&] {
      call = listener_->BeginCall(connected.peer);
      return call != nullptr;
    }));
    calls.push_back(std::move(call));
  }
  sockets.push_back(Connect(listener_->port()).socket);
  EXPECT_TRUE(Eventually([&] { return !listener_->status().ok(); }));
  EXPECT_THAT(metrics(),
              ::testing::HasSubstr("kvasir_connections_refused_total{reason=\"full\"} 1"));
  calls.pop_back();
  EXPECT_TRUE(Eventually([&] { return listener_->status().ok(); }));
  for (const int socket : sockets) close(socket);
}

// As when a network is cut, one end gives up, and what it says of that is lost on the way. Once, a
// worker waited for such a coordinator for ever, and refused others.
TEST_F(GrpcListenerTest, AConnectionThatTheOtherHostForgotEndsSoon) {
  Serve("127.0.0.1:0");
  const Connected connected = Connect(listener_->port());
  std::unique_ptr<GrpcListener::Call> call;
  ASSERT_TRUE(Eventually([&] {
    call = listener_->BeginCall(connected.peer);
    return call != nullptr;
  }));
  const int silent = 1;  // from here on closing it sends nothing
  if (setsockopt(connected.socket, IPPROTO_TCP, TCP_REPAIR, &silent, sizeof(silent)) != 0) {
    close(connected.socket);
    GTEST_SKIP() << "closing a socket without a word needs CAP_NET_ADMIN";
  }
  close(connected.socket);
  // Before 10 s, when it ends because it does not begin to speak HTTP/2.
  EXPECT_TRUE(Eventually([&] { return listener_->BeginCall(connected.peer) == nullptr; },
                         std::chrono::seconds(5)));
}

TEST_F(GrpcListenerTest, APortInUseIsNotShared) {
  Serve("127.0.0.1:0");
  const auto second = GrpcListener::Listen(
      {.address = absl::StrCat("127.0.0.1:", listener_->port()), .registry = &registry_});
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), ::testing::HasSubstr("in use"));
}

TEST_F(GrpcListenerTest, AUnixSocketThatWasLeftBehindIsReplaced) {
  const std::string path =
      (std::filesystem::temp_directory_path() / absl::StrCat("kvasir-listener-", getpid()))
          .string();
  const std::string address = absl::StrCat("unix:", path);
  Serve(address);
  EXPECT_EQ(CheckHealth(NewChannel(address), ""), Health::kServing);
  listener_->Stop();
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_THAT(
      std::string(GrpcListener::Listen({.address = absl::StrCat("unix:/", std::string(110, 'x')),
                                        .registry = &registry_})
                      .status()
                      .message()),
      ::testing::HasSubstr("111 bytes"));
}

}  // namespace
}  // namespace kvasir::proto
