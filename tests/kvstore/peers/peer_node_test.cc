#include "kvstore/peers/peer_node.h"

#include <chrono>
#include <cstdlib>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/mutex.h"
#include "tests/kvstore/peers/peer_process.h"

namespace kvasir::kvstore {
namespace {

using std::chrono::seconds;

// Keeps what arrives, for the test's thread.
class Collector : public PeerHandler {
 public:
  void OnStart(PeerNode&) override {}
  void OnLink(PeerLink) override {}
  std::optional<absl::Span<std::byte>> PlaceOf(PeerLink, absl::Span<const std::byte> header,
                                               size_t body_bytes) override {
    kernels::MutexLock lock(mu_);
    if (body_bytes > most_) return std::nullopt;
    Answered answer;
    std::memcpy(&answer, header.data(), sizeof(answer));
    std::vector<std::byte>& body = bodies_[answer.seed];
    body.resize(body_bytes);
    return absl::MakeSpan(body);
  }
  void OnMessage(PeerLink, absl::Span<const std::byte> header, absl::Span<std::byte>) override {
    kernels::MutexLock lock(mu_);
    Answered answer;
    std::memcpy(&answer, header.data(), sizeof(answer));
    arrived_.insert(answer.seed);
    changed_.NotifyAll();
  }
  void OnLost(PeerLink link, const absl::Status& why) override {
    kernels::MutexLock lock(mu_);
    lost_[link] = why;
    changed_.NotifyAll();
  }
  void OnTick() override {}

  void set_most_bytes(size_t most) {
    kernels::MutexLock lock(mu_);
    most_ = most;
  }
  bool AwaitArrivals(size_t count, seconds patience = seconds(30)) {
    return Await([&] { return arrived_.size() >= count; }, patience);
  }
  // Returns why the link was lost; OK when it was not within the time.
  absl::Status AwaitLoss(PeerLink link, seconds patience = seconds(30)) {
    if (!Await([&] { return lost_.contains(link); }, patience)) return absl::OkStatus();
    kernels::MutexLock lock(mu_);
    return lost_.at(link);
  }
  std::map<uint64_t, std::vector<std::byte>> TakeBodies() {
    kernels::MutexLock lock(mu_);
    arrived_.clear();
    return std::exchange(bodies_, {});
  }

 private:
  template <typename Condition>
  bool Await(Condition condition, seconds patience) {
    const auto deadline = std::chrono::steady_clock::now() + patience;
    kernels::MutexLock lock(mu_);
    while (!condition()) {
      if (!changed_.WaitUntil(mu_, deadline)) return condition();
    }
    return true;
  }

  kernels::Mutex mu_;
  kernels::CondVar changed_;
  size_t most_ = kMostBodyBytes;
  std::map<uint64_t, std::vector<std::byte>> bodies_;
  std::set<uint64_t> arrived_;
  std::map<PeerLink, absl::Status> lost_;
};

class PeerNodeTest : public testing::TestWithParam<const char*> {
 protected:
  // The peer is forked before this process has a node.
  PeerNodeTest() : peer_(std::make_unique<PeerProcess>(GetParam())) {
    auto node = PeerNode::Create({.transports = GetParam()}, collector_);
    EXPECT_TRUE(node.ok()) << node.status();
    if (node.ok()) node_ = *std::move(node);
  }

  template <typename Work>
  auto OnNode(Work work) {
    decltype(work()) result{};
    kernels::Mutex mu;
    kernels::CondVar done;
    bool is_done = false;
    node_->Post([&] {
      kernels::MutexLock lock(mu);
      result = work();
      is_done = true;
      done.NotifyAll();
    });
    kernels::MutexLock lock(mu);
    while (!is_done) done.Wait(mu);
    return result;
  }

  PeerLink Open() {
    return OnNode([&] { return node_->Open(peer_->address()).value(); });
  }
  void Ask(PeerLink link, const Asked& asked) {
    node_->Post([this, link, asked] { node_->Send(link, BytesOf(asked), {}, nullptr); });
  }
  std::unique_ptr<PeerProcess> peer_;
  Collector collector_;
  std::unique_ptr<PeerNode> node_;
};

TEST_P(PeerNodeTest, BringsBodiesOfEverySizeToTheirPlace) {
  const PeerLink link = Open();
  uint64_t seed = 100;
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{1}, uint64_t{4096}, uint64_t{16383},
                               uint64_t{16384}, uint64_t{1} << 20, (uint64_t{9} << 20) + 7}) {
    SCOPED_TRACE(bytes);
    Ask(link, {.seed = seed, .bytes = bytes, .count = 3});
    ASSERT_TRUE(collector_.AwaitArrivals(3));
    for (const auto& [which, body] : collector_.TakeBodies()) {
      EXPECT_TRUE(body == ContentsOf(which, bytes)) << "seed " << which;
    }
    seed += 10;
  }
}

// Bug: short bodies that were sent before UCX had set up shared memory ended the link.
TEST_P(PeerNodeTest, BodiesGoBothWaysFromTheFirstMomentOn) {
  for (const size_t bytes : {size_t{200}, size_t{5'000}, size_t{300'000}}) {
    SCOPED_TRACE(bytes);
    const PeerLink link = Open();
    std::vector<std::vector<std::byte>> sent;
    for (uint64_t seed = 0; seed < 20; ++seed) sent.push_back(ContentsOf(seed, bytes));
    OnNode([&] {
      for (uint64_t seed = 0; seed < sent.size(); ++seed) {
        node_->Send(link, BytesOf(Answered{.seed = seed}), sent[seed], nullptr);
      }
      return true;
    });
    ASSERT_TRUE(collector_.AwaitArrivals(sent.size()));
    const auto bodies = collector_.TakeBodies();
    for (uint64_t seed = 0; seed < sent.size(); ++seed) {
      EXPECT_TRUE(bodies.at(seed) == sent[seed]) << "seed " << seed;
    }
  }
}

TEST_P(PeerNodeTest, AKilledPeerIsLostInTheMiddleOfATransfer) {
  const PeerLink link = Open();
  Ask(link, {.seed = 1, .bytes = 8 << 20, .count = 64});
  ASSERT_TRUE(collector_.AwaitArrivals(2));
  peer_->Kill();
  EXPECT_TRUE(absl::IsUnavailable(collector_.AwaitLoss(link)));
}

TEST_P(PeerNodeTest, AStoppedPeerIsLetGoAtOnce) {
  const PeerLink link = Open();
  Ask(link, {.seed = 1, .bytes = 8 << 20, .count = 64});
  ASSERT_TRUE(collector_.AwaitArrivals(2));
  peer_->Signal(SIGSTOP);
  node_->Post([this, link] { node_->Close(link, absl::DeadlineExceededError("silent")); });
  EXPECT_TRUE(absl::IsDeadlineExceeded(collector_.AwaitLoss(link)));
}

TEST_P(PeerNodeTest, ARefusedBodyEndsTheLinkAndNoOther) {
  const PeerLink refused = Open();
  Ask(refused, {.seed = 1, .bytes = 100, .count = 1});
  ASSERT_TRUE(collector_.AwaitArrivals(1));
  collector_.set_most_bytes(1000);
  Ask(refused, {.seed = 2, .bytes = 100'000, .count = 1});
  EXPECT_TRUE(absl::IsInvalidArgument(collector_.AwaitLoss(refused)));
  collector_.TakeBodies();
  const PeerLink second = Open();
  Ask(second, {.seed = 3, .bytes = 1000, .count = 1});
  EXPECT_TRUE(collector_.AwaitArrivals(1));
}

TEST_P(PeerNodeTest, APeerThatIsNotThereIsLost) {
  const std::string address = peer_->address();
  peer_->Kill();
  const PeerLink link = OnNode([&] { return node_->Open(address).value(); });
  EXPECT_TRUE(absl::IsUnavailable(collector_.AwaitLoss(link)));
}

// Bug: UCX ended the process when a link over shared memory was destroyed before it was set up.
TEST_P(PeerNodeTest, ALinkMayEndBeforeItIsSetUp) {
  const auto open_and_close = [&] {
    const PeerLink link = OnNode([&] {
      const PeerLink opened = node_->Open(peer_->address()).value();
      node_->Close(opened, absl::CancelledError("early"));
      return opened;
    });
    EXPECT_TRUE(absl::IsCancelled(collector_.AwaitLoss(link)));
  };
  for (int i = 0; i < 20; ++i) open_and_close();
  Ask(Open(), {.seed = 3, .bytes = 1000, .count = 1});
  EXPECT_TRUE(collector_.AwaitArrivals(1));
  Open();
  node_.reset();
}

TEST_P(PeerNodeTest, EndsWhileBodiesArrive) {
  const PeerLink link = Open();
  Ask(link, {.seed = 1, .bytes = 8 << 20, .count = 64});
  ASSERT_TRUE(collector_.AwaitArrivals(2));
  node_.reset();
  // Nobody writes to memory that was given to the node.
  auto bodies = collector_.TakeBodies();
  for (auto& [seed, body] : bodies) std::fill(body.begin(), body.end(), std::byte{7});
  for (auto& [seed, body] : bodies) {
    EXPECT_EQ(std::count(body.begin(), body.end(), std::byte{7}),
              static_cast<ptrdiff_t>(body.size()));
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, PeerNodeTest, testing::Values("sm,tcp", "tcp"),
                         [](const auto& transports) {
                           return std::string(transports.index == 0 ? "sm" : "tcp");
                         });

// A process of its own, because what UCX keeps then would spoil the forks of other tests.
TEST(PeerNodeEndTest, ANodeEndsThoughALinkIsNeverSetUp) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto end_beside_a_stopped_peer = [] {
    PeerProcess peer("sm,tcp");
    Collector collector;
    auto node = PeerNode::Create({.transports = "sm,tcp"}, collector).value();
    peer.Signal(SIGSTOP);
    PeerNode& opener = *node;
    opener.Post([&] { std::ignore = opener.Open(peer.address()); });
    node.reset();
    peer.Kill();
    std::_Exit(0);
  };
  EXPECT_EXIT(end_beside_a_stopped_peer(), testing::ExitedWithCode(0), "");
}

// Bug: without the right to read the other process's memory, a link to one that had stopped in the
// middle of a body never ended, nor did the node.
TEST(PeerNodeEndTest, ALinkAndItsNodeEndThoughABodyNeverDoes) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto end_beside_a_stopped_peer = [](bool is_closed_first) {
    PeerProcess peer("posix,tcp");
    Collector collector;
    auto node = PeerNode::Create({.transports = "posix,tcp"}, collector).value();
    PeerNode& opener = *node;
    PeerLink link;
    opener.Post([&] {
      link = opener.Open(peer.address()).value();
      opener.Send(link, BytesOf(Asked{.seed = 1, .bytes = 8 << 20, .count = 64}), {}, nullptr);
    });
    if (!collector.AwaitArrivals(2)) std::_Exit(1);
    peer.Signal(SIGSTOP);
    if (is_closed_first) {
      opener.Post([&] { opener.Close(link, absl::DeadlineExceededError("silent")); });
      if (!absl::IsDeadlineExceeded(collector.AwaitLoss(link, seconds(10)))) std::_Exit(2);
    }
    const auto begin = std::chrono::steady_clock::now();
    node.reset();
    if (std::chrono::steady_clock::now() > begin + seconds(10)) std::_Exit(3);
    // Nobody writes to memory that was given to the node, though the peer goes on.
    auto bodies = collector.TakeBodies();
    for (auto& [seed, body] : bodies) std::fill(body.begin(), body.end(), std::byte{7});
    peer.Signal(SIGCONT);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    for (auto& [seed, body] : bodies) {
      if (std::count(body.begin(), body.end(), std::byte{7}) != std::ssize(body)) std::_Exit(4);
    }
    peer.Kill();
    std::_Exit(0);
  };
  EXPECT_EXIT(end_beside_a_stopped_peer(true), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(end_beside_a_stopped_peer(false), testing::ExitedWithCode(0), "");
}

// Bug: an owner that was killed could not listen for a minute, until its connections were
// forgotten.
TEST(PeerNodeAddressTest, ANodeListensWhereOneBeforeItDid) {
  Collector listening, opening;
  auto first = PeerNode::Create({.transports = "tcp"}, listening);
  auto other = PeerNode::Create({.transports = "tcp"}, opening);
  ASSERT_TRUE(first.ok() && other.ok());
  const std::string address = (*first)->address();
  PeerNode& opener = **other;
  opener.Post([&] {
    opener.Send(opener.Open(address).value(), BytesOf(Answered{.seed = 1}), {}, nullptr);
  });
  ASSERT_TRUE(listening.AwaitArrivals(1));
  first->reset();
  const int port = std::stoi(address.substr(address.rfind(':') + 1));
  const auto again = PeerNode::Create({.port = port, .transports = "tcp"}, listening);
  EXPECT_TRUE(again.ok()) << again.status();
}

TEST(PeerNodeAddressTest, HostsOfOtherMachinesAndUnknownTransportsAreRefused) {
  Collector collector;
  EXPECT_TRUE(absl::IsInvalidArgument(PeerNode::Create({.host = "192.0.2.1"}, collector).status()));
  const absl::Status unknown = PeerNode::Create({.transports = "pigeons"}, collector).status();
  EXPECT_TRUE(absl::IsUnavailable(unknown)) << unknown;
  EXPECT_THAT(std::string(unknown.message()), testing::HasSubstr("pigeons"));
}

}  // namespace
}  // namespace kvasir::kvstore
