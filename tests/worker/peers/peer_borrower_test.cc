#include "worker/peers/peer_borrower.h"

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "spdlog/spdlog.h"

#include "tests/kvstore/test_blocks.h"

namespace kvasir::worker {
namespace {

using kvstore::PeerLink;

// Keeps what it is asked to do, and does nothing.
class IdleNode : public kvstore::PeerNode {
 public:
  const std::string& address() const override { return address_; }
  void Post(std::function<void()>) override {}
  absl::StatusOr<PeerLink> Open(const std::string& address) override {
    address_opened = address;
    return opened = PeerLink(++links_);
  }
  void Send(PeerLink, absl::Span<const std::byte>, absl::Span<const std::byte>,
            std::function<void()>) override {
    ++sent;
  }
  void Close(PeerLink link, const absl::Status& why) override { closed = {link, why}; }

  PeerLink opened;
  std::string address_opened;
  std::pair<PeerLink, absl::Status> closed;
  int64_t sent = 0;

 private:
  const std::string address_ = "127.0.0.1:1";
  int64_t links_ = 0;
};

class PeerBorrowerTest : public ::testing::Test {
 protected:
  PeerBorrowerTest() {
    spdlog::set_level(spdlog::level::off);
    options_.secret = proto::GroupSecret::Read("").value();
    options_.first_pause = options_.longest_pause = {};
  }
  // A message comes on the link that was opened last. Returns whether it was given a place.
  bool Receive(PeerBorrower& borrower, PeerMessage kind, size_t bytes) {
    const PeerHeader header = {.kind = kind};
    const std::optional<absl::Span<std::byte>> place =
        borrower.PlaceOf(node_.opened, header, bytes);
    if (place.has_value()) borrower.OnMessage(node_.opened, header, *place);
    return place.has_value();
  }

  const kvstore::ExtentFormat format_ =
      kvstore::ExtentFormat::Create(kvstore::SmallShard()).value();
  IdleNode node_;
  PeerBorrowerOptions options_;
};

// Bug: what it had greeted with stood in the way of each greeting after that.
TEST_F(PeerBorrowerTest, APeerThatGreetedWronglyIsHeardWhenItGreetsAgain) {
  options_.peers = {"127.0.0.1:2"};
  PeerBorrower borrower(options_, format_, nullptr);
  borrower.OnStart(node_);
  borrower.OnTick();
  const PeerLink first = node_.opened;
  EXPECT_TRUE(Receive(borrower, PeerMessage::kWhole, 5));
  ASSERT_EQ(node_.closed.first, first);
  borrower.OnLost(first, node_.closed.second);
  borrower.OnTick();
  ASSERT_NE(node_.opened, first);
  EXPECT_TRUE(Receive(borrower, PeerMessage::kHello, 32));
  EXPECT_EQ(node_.sent, 1) << "it is not answered";
}

// Bug: the end of an engine waited for a name server.
TEST_F(PeerBorrowerTest, ItsEndWaitsForNoNameServer) {
  struct NameServer {
    std::promise<void> asked, answers, answered;
  };
  const auto server = std::make_shared<NameServer>();
  options_.peers = {"replica:2"};
  options_.resolve = [server](const std::string& name) -> absl::StatusOr<std::string> {
    server->asked.set_value();
    server->answers.get_future().wait_for(std::chrono::seconds(20));
    server->answered.set_value();
    return name;
  };
  auto borrower = std::make_unique<PeerBorrower>(options_, format_, nullptr);
  borrower->OnStart(node_);
  borrower->OnTick();
  server->asked.get_future().wait();
  std::future<void> answered = server->answered.get_future();
  borrower.reset();
  EXPECT_EQ(answered.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  server->answers.set_value();
  answered.wait();
}

TEST_F(PeerBorrowerTest, APeerIsReachedAtTheAddressOfItsName) {
  options_.peers = {"replica:2"};
  options_.resolve = [](const std::string&) { return "127.0.0.1:2"; };
  PeerBorrower borrower(options_, format_, nullptr);
  borrower.OnStart(node_);
  while (node_.opened == PeerLink()) borrower.OnTick();
  EXPECT_EQ(node_.address_opened, "127.0.0.1:2");
}

}  // namespace
}  // namespace kvasir::worker
