#include "coordinator/replicas/prefill_servers.h"

#include <memory>
#include <utility>

#include "gtest/gtest.h"
#include "spdlog/spdlog.h"

namespace kvasir::coordinator {
namespace {

class Client final : public ClientSink {
 public:
  void Write(v1::GenerateResponse /*response*/) override {}
  void Close(const absl::Status& /*status*/) override {}
};

TEST(PrefillServersTest, APromptThatComesAfterTheStopIsReadHere) {
  spdlog::set_level(spdlog::level::off);
  v1::ServeConfig config;
  config.set_prefill_servers("127.0.0.1:1");  // nobody is there
  config.set_peers("127.0.0.1:1");
  std::unique_ptr<PrefillServers> servers = PrefillServers::Create(config, {}).value();
  servers->Stop();
  bool ended = false;
  servers->Read({}, std::make_shared<Client>(), [&ended] { ended = true; });
  EXPECT_TRUE(ended);  // not later, when the servers may be gone
  servers->Stop();
}

}  // namespace
}  // namespace kvasir::coordinator
