// Peers that do not keep to the messages of worker/peers/peer_messages.h.
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "gtest/gtest.h"

#include "kvstore/peers/peer_node.h"
#include "tests/worker/peers/peer_tier_fixture.h"
#include "worker/peers/peer_lender.h"
#include "worker/peers/peer_messages.h"

namespace kvasir::worker {
namespace {

using kvstore::PeerLink;
using kvstore::PeerNode;
using kvstore::TestBlock;
using kvstore::TierCompletion;
using proto::GroupSecret;

// A lender that knows the secret and says what the test wants.
class BadLender : public kvstore::PeerHandler {
 public:
  using Answer = std::function<void(PeerNode&, PeerLink, const WantedBlock&)>;
  BadLender(const char* transports, std::shared_ptr<const GroupSecret> secret, Answer answer)
      : secret_(std::move(secret)),
        answer_(std::move(answer)),
        node_(PeerNode::Create({.transports = transports}, *this).value()) {}

  void OnStart(PeerNode& node) override { caller_ = &node; }
  void OnLink(PeerLink link) override {
    nonces_.worker = GroupSecret::NewNonce();
    Send(link, {.kind = PeerMessage::kHello}, nonces_.worker);
  }
  std::optional<absl::Span<std::byte>> PlaceOf(PeerLink, absl::Span<const std::byte>,
                                               size_t bytes) override {
    body_.resize(bytes);
    return absl::MakeSpan(reinterpret_cast<std::byte*>(body_.data()), bytes);
  }
  void OnMessage(PeerLink link, absl::Span<const std::byte> header,
                 absl::Span<std::byte>) override {
    if (ReadPeerHeader(header)->kind == PeerMessage::kProof) {
      nonces_.coordinator = body_.substr(0, 32);
      Send(link, {.kind = PeerMessage::kWelcome},
           Welcome(secret_->Proof(GroupSecret::Side::kLender, nonces_), Format()));
      return;
    }
    for (size_t at = 0; at < body_.size(); at += sizeof(WantedBlock)) {
      WantedBlock wanted;
      std::memcpy(&wanted, body_.data() + at, sizeof(wanted));
      answer_(*caller_, link, wanted);
    }
  }
  void OnLost(PeerLink, const absl::Status&) override { is_lost_ = true; }
  void OnTick() override {}

  bool is_lost() const { return is_lost_; }
  void Send(PeerLink link, const PeerHeader& header, std::string body) {
    const auto kept = std::make_shared<std::string>(std::move(body));
    caller_->Send(link, header.bytes(),
                  {reinterpret_cast<const std::byte*>(kept->data()), kept->size()}, [kept] {});
  }
  const std::string& address() const { return node_->address(); }

 private:
  const std::shared_ptr<const GroupSecret> secret_;
  const Answer answer_;
  PeerNode* caller_ = nullptr;
  GroupSecret::Nonces nonces_;
  std::string body_;
  std::atomic<bool> is_lost_ = false;
  const std::unique_ptr<PeerNode> node_;  // last: it calls back
};

// Opens a link to a lender, and answers its greeting as the test wants.
class Stranger : public kvstore::PeerHandler {
 public:
  using Answer = std::function<void(PeerNode&, PeerLink, const std::string& nonce)>;
  Stranger(const char* transports, std::string address, Answer answer)
      : address_(std::move(address)),
        answer_(std::move(answer)),
        node_(PeerNode::Create({.transports = transports}, *this).value()) {}

  void OnStart(PeerNode& node) override {
    caller_ = &node;
    EXPECT_TRUE(node.Open(address_).ok());
  }
  void OnLink(PeerLink) override {}
  std::optional<absl::Span<std::byte>> PlaceOf(PeerLink, absl::Span<const std::byte>,
                                               size_t bytes) override {
    body_.resize(bytes);
    return absl::MakeSpan(reinterpret_cast<std::byte*>(body_.data()), bytes);
  }
  void OnMessage(PeerLink link, absl::Span<const std::byte>, absl::Span<std::byte>) override {
    if (++messages_ == 1) answer_(*caller_, link, body_);
  }
  void OnLost(PeerLink, const absl::Status&) override { is_lost_ = true; }
  void OnTick() override {}

  bool is_lost() const { return is_lost_; }
  int messages() const { return messages_; }

 private:
  const std::string address_;
  const Answer answer_;
  PeerNode* caller_ = nullptr;
  std::string body_;
  std::atomic<bool> is_lost_ = false;
  std::atomic<int> messages_ = 0;
  const std::unique_ptr<PeerNode> node_;  // last: it calls back
};

// A lender that greets its first link well, and says the same words to the second at once.
class Replayer : public kvstore::PeerHandler {
 public:
  Replayer(const char* transports, std::shared_ptr<const GroupSecret> secret)
      : secret_(std::move(secret)),
        node_(PeerNode::Create({.transports = transports}, *this).value()) {}

  void OnStart(PeerNode& node) override { caller_ = &node; }
  void OnLink(PeerLink link) override {
    const bool is_first = ++links_ == 1;
    nonces_.worker = GroupSecret::NewNonce();
    SendCopy(*caller_, link, is_first ? PeerMessage::kHello : PeerMessage::kWelcome,
             is_first ? nonces_.worker : welcome_);
  }
  std::optional<absl::Span<std::byte>> PlaceOf(PeerLink, absl::Span<const std::byte>,
                                               size_t bytes) override {
    body_.resize(bytes);
    return absl::MakeSpan(reinterpret_cast<std::byte*>(body_.data()), bytes);
  }
  void OnMessage(PeerLink link, absl::Span<const std::byte>, absl::Span<std::byte>) override {
    nonces_.coordinator = body_.substr(0, 32);
    welcome_ = Welcome(secret_->Proof(GroupSecret::Side::kLender, nonces_), Format());
    SendCopy(*caller_, link, PeerMessage::kWelcome, welcome_);
    link_ = link;
  }
  void OnLost(PeerLink, const absl::Status&) override { ++lost_; }
  void OnTick() override {
    if (ends_) caller_->Close(link_, absl::UnavailableError("the test ends it"));
  }

  void EndFirst() { ends_ = true; }
  int links() const { return links_; }
  int lost() const { return lost_; }
  const std::string& address() const { return node_->address(); }

 private:
  const std::shared_ptr<const GroupSecret> secret_;
  PeerNode* caller_ = nullptr;
  GroupSecret::Nonces nonces_;
  std::string welcome_, body_;
  PeerLink link_;
  std::atomic<bool> ends_ = false;
  std::atomic<int> links_ = 0, lost_ = 0;
  const std::unique_ptr<PeerNode> node_;  // last: it calls back
};

class BadPeerTest : public PeerTierTest {
 protected:
  // Asks a lender that answers so, and then a good peer that has the block.
  TierCompletion Ask(BadLender::Answer answer) {
    const BadLender bad(GetParam(), secret_, std::move(answer));
    const auto good = Make(Options());
    Lend(*good, block_);
    Asker asker{.tier = Make(Options({bad.address(), good->address()}))};
    EXPECT_TRUE(asker.AwaitLinks(2));
    TierCompletion completion = asker.Read(2);
    if (completion.status.ok()) {
      EXPECT_TRUE(asker.HasBytesOf(block_, 2));
    }
    left_linked_ = asker.tier->stats().peers.linked;
    return completion;
  }
  static void Say(PeerNode& node, PeerLink link, PeerMessage kind, uint64_t ticket) {
    node.Send(link, PeerHeader{.kind = kind, .ticket = ticket}.bytes(), {}, nullptr);
  }

  const TestBlock block_{Format(), 2, 1};
  const TestBlock wrong_{Format(), 3, 1};
  int64_t left_linked_ = 0;
};

TEST_P(BadPeerTest, OneThatIsSilentIsGivenUpForTheNext) {
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TRUE(Ask([](PeerNode&, PeerLink, const WantedBlock&) {}).status.ok());
  EXPECT_GE(std::chrono::steady_clock::now() - begin, kPatience);
  EXPECT_EQ(left_linked_, 1);
}

TEST_P(BadPeerTest, OneWhoseBlockGaveWayIsLeftForTheNext) {
  EXPECT_TRUE(Ask([this](PeerNode& node, PeerLink link, const WantedBlock& wanted) {
                node.Send(
                    link, PeerHeader{.kind = PeerMessage::kBlock, .ticket = wanted.ticket}.bytes(),
                    wrong_.extent,
                    [&node, link, wanted] { Say(node, link, PeerMessage::kGone, wanted.ticket); });
              }).status.ok());
  EXPECT_EQ(left_linked_, 2);
}

TEST_P(BadPeerTest, OneThatSaysWholeWithoutABlockGivesNothing) {
  EXPECT_TRUE(Ask([](PeerNode& node, PeerLink link, const WantedBlock& wanted) {
                Say(node, link, PeerMessage::kWhole, wanted.ticket);
              }).status.ok());
  EXPECT_EQ(left_linked_, 1);
}

TEST_P(BadPeerTest, OneThatSendsWhatNobodyAskedForLosesItsLink) {
  EXPECT_TRUE(Ask([this](PeerNode& node, PeerLink link, const WantedBlock& wanted) {
                node.Send(
                    link,
                    PeerHeader{.kind = PeerMessage::kBlock, .ticket = wanted.ticket + 1}.bytes(),
                    wrong_.extent, nullptr);
              }).status.ok());
  EXPECT_EQ(left_linked_, 1);
}

TEST_P(BadPeerTest, OneThatSendsABlockOfAnotherLengthLosesItsLink) {
  EXPECT_TRUE(Ask([this](PeerNode& node, PeerLink link, const WantedBlock& wanted) {
                node.Send(link,
                          PeerHeader{.kind = PeerMessage::kBlock, .ticket = wanted.ticket}.bytes(),
                          absl::MakeConstSpan(wrong_.extent).first(4096), nullptr);
              }).status.ok());
  EXPECT_EQ(left_linked_, 1);
}

TEST_P(BadPeerTest, OneThatDoesNotProveTheSecretIsNeverAsked) {
  std::atomic<int> asked = 0;
  const BadLender bad(GetParam(), other_secret_,
                      [&](PeerNode&, PeerLink, const WantedBlock&) { ++asked; });
  const auto good = Make(Options());
  Lend(*good, block_);
  Asker asker{.tier = Make(Options({bad.address(), good->address()}))};
  EXPECT_TRUE(Await([&] { return bad.is_lost(); }));
  ASSERT_TRUE(asker.AwaitLinks(1));
  EXPECT_TRUE(asker.Read(2).status.ok());
  EXPECT_EQ(asked, 0);
}

TEST_P(BadPeerTest, AProofOfAnEarlierLinkProvesNothing) {
  Replayer replayer(GetParam(), secret_);
  const Asker asker{.tier = Make(Options({replayer.address()}))};
  ASSERT_TRUE(Await([&] { return asker.tier->stats().peers.linked == 1; }));
  replayer.EndFirst();
  ASSERT_TRUE(Await([&] { return replayer.links() == 2; }));
  EXPECT_TRUE(Await([&] { return replayer.lost() == 2; }));
  EXPECT_EQ(asker.tier->stats().peers.linked, 0);
}

class StrangerTest : public PeerTierTest {
 protected:
  // Proves the secret, if it is given, and asks for a block in so many bytes. Returns the number of
  // messages that came until the link was lost, or the block was whole.
  int Ask(const GroupSecret* knows, size_t bytes,
          WireHeads wants = WireHeads::Of(kvstore::HeadsOf(Format().shard()))) {
    const auto owner = Make(Options());
    const TestBlock block(Format(), 2, 1);
    Lend(*owner, block);
    const Stranger stranger(
        GetParam(), owner->address(), [&](PeerNode& node, PeerLink link, const std::string& nonce) {
          if (knows != nullptr) {
            const GroupSecret::Nonces nonces = {.worker = nonce,
                                                .coordinator = GroupSecret::NewNonce()};
            SendCopy(node, link, PeerMessage::kProof,
                     nonces.coordinator + knows->Proof(GroupSecret::Side::kBorrower, nonces));
          }
          const WantedBlock wanted = {.ticket = 1, .hash = kvstore::HashOf(2), .heads = wants};
          SendCopy(node, link, PeerMessage::kWant,
                   std::string(reinterpret_cast<const char*>(&wanted), bytes));
        });
    EXPECT_TRUE(Await([&] { return stranger.is_lost() || stranger.messages() == 4; }));
    EXPECT_EQ(owner->stats().peers.lent_blocks > 0, stranger.messages() == 4);
    return stranger.messages();
  }
};

TEST_P(StrangerTest, WhoProvesTheSecretIsGivenABlock) {
  EXPECT_EQ(Ask(secret_.get(), sizeof(WantedBlock)), 4);  // hello, welcome, block, whole
}

TEST_P(StrangerTest, WhoProvesNothingIsToldARandomNumberOnly) {
  EXPECT_EQ(Ask(nullptr, sizeof(WantedBlock)), 1);
  EXPECT_EQ(Ask(other_secret_.get(), sizeof(WantedBlock)), 1);
}

TEST_P(StrangerTest, HalfAQuestionEndsTheLink) {
  EXPECT_LE(Ask(secret_.get(), 39), 2);  // hello, and welcome unless the end overtakes it
}

TEST_P(StrangerTest, WhoAsksForHeadsThatAreNotThereLosesTheLink) {
  for (const WireHeads heads : {WireHeads{0, 0}, WireHeads{1, 2}, WireHeads{7, 1},
                                WireHeads{1, 0xffffffff}, WireHeads{0xffffffff, 2}}) {
    EXPECT_LE(Ask(secret_.get(), sizeof(WantedBlock), heads), 2);
  }
}

TEST_P(StrangerTest, WhoWantsSomeOfTheHeadsIsGivenThese) {
  EXPECT_EQ(Ask(secret_.get(), sizeof(WantedBlock), {1, 1}), 4);
}

INSTANTIATE_TEST_SUITE_P(Transports, StrangerTest, ::testing::Values("sm,tcp", "tcp"),
                         NameOfTransports);
INSTANTIATE_TEST_SUITE_P(Transports, BadPeerTest, ::testing::Values("sm,tcp", "tcp"),
                         NameOfTransports);

}  // namespace
}  // namespace kvasir::worker
