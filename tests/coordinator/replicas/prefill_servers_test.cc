#include "coordinator/replicas/prefill_servers.h"

#include <arpa/inet.h>
#include <cstdint>
#include <memory>
#include <netinet/in.h>
#include <string>
#include <sys/socket.h>
#include <unistd.h>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"
#include "spdlog/spdlog.h"

namespace kvasir::coordinator {
namespace {

class Client final : public ResponseSink {
 public:
  void Write(v1::GenerateResponse /*response*/) override {}
  void Close(const absl::Status& /*status*/) override {}
};

std::unique_ptr<PrefillServers> Make(const std::string& address) {
  v1::ServeConfig config;
  config.set_prefill_servers(address);
  config.set_peers("127.0.0.1:1");
  return PrefillServers::Create(config, {}).value();
}

TEST(PrefillServersTest, APromptThatComesAfterTheStopIsReadHere) {
  spdlog::set_level(spdlog::level::off);
  const std::unique_ptr<PrefillServers> servers = Make("127.0.0.1:1");  // nobody is there
  servers->Stop();
  absl::Status end;
  servers->Read({}, std::make_shared<AnswerReadElsewhere>(std::make_shared<Client>()),
                {.on_sealed = [](int64_t) {},
                 .on_end = [&end](const absl::Status& status) { end = status; }});
  EXPECT_EQ(end.code(), absl::StatusCode::kCancelled);  // not later, when the servers may be gone
  servers->Stop();
}

// A port that takes connections and never says a word.
class SilentPort {
 public:
  SilentPort() : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    address_.sin_family = AF_INET;
    address_.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof(address_);
    auto* const address = reinterpret_cast<sockaddr*>(&address_);
    EXPECT_EQ(bind(socket_, address, bytes), 0);
    EXPECT_EQ(listen(socket_, 8), 0);
    EXPECT_EQ(getsockname(socket_, address, &bytes), 0);
  }
  ~SilentPort() { close(socket_); }
  std::string address() const { return absl::StrCat("127.0.0.1:", ntohs(address_.sin_port)); }

 private:
  const int socket_;
  sockaddr_in address_ = {};
};

TEST(PrefillServersTest, AnAnswerThatHasEndedEndsItsReading) {
  const SilentPort server;
  const std::unique_ptr<PrefillServers> servers = Make(server.address());
  const auto answer = std::make_shared<AnswerReadElsewhere>(std::make_shared<Client>());
  absl::Status end;
  absl::Notification ended;
  answer->Close(absl::OkStatus());
  servers->Read({}, answer,
                {.on_sealed = [](int64_t) {},
                 .on_end =
                     [&](const absl::Status& status) {
                       end = status;
                       ended.Notify();
                     }});
  EXPECT_TRUE(ended.WaitForNotificationWithTimeout(absl::Seconds(10)));
  EXPECT_EQ(end.code(), absl::StatusCode::kCancelled);
  servers->Stop();
}

TEST(PrefillServersTest, StopEndsWhatIsRead) {
  const SilentPort server;
  const std::unique_ptr<PrefillServers> servers = Make(server.address());
  absl::Status end;
  servers->Read({}, std::make_shared<AnswerReadElsewhere>(std::make_shared<Client>()),
                {.on_sealed = [](int64_t) {},
                 .on_end = [&end](const absl::Status& status) { end = status; }});
  servers->Stop();
  EXPECT_EQ(end.code(), absl::StatusCode::kCancelled);
}

}  // namespace
}  // namespace kvasir::coordinator
