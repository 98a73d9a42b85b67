#include "worker/peers/peer_tier.h"

#include <chrono>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "spdlog/spdlog.h"

#include "kvstore/peers/peer_node.h"
#include "tests/kvstore/test_blocks.h"
#include "tests/support/memory_tier.h"
#include "tests/support/scratch_directory.h"
#include "worker/peers/peer_messages.h"

namespace kvasir::worker {
namespace {

using kvstore::ExtentFormat;
using kvstore::HashOf;
using kvstore::PeerLink;
using kvstore::PeerNode;
using kvstore::TestBlock;
using kvstore::TierCompletion;
using proto::GroupSecret;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr milliseconds kPatience(300);

bool Await(const std::function<bool()>& condition, seconds patience = seconds(20)) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

const ExtentFormat& Format() {
  static const ExtentFormat format = ExtentFormat::Create(kvstore::SmallShard()).value();
  return format;
}

// A tier with what a test asks of it.
struct Asker {
  // Reads the block called `name`, and the memory it came to.
  TierCompletion Read(uint32_t name) {
    memory.emplace(name, std::make_unique<TestBlock>(Format(), 0, 0));
    tier->Read({{.ticket = ++ticket, .hash = HashOf(name), .extent = memory.at(name)->extent}});
    TierCompletion found;
    EXPECT_TRUE(Await([&] {
      for (TierCompletion& completion : tier->Poll().completions) {
        if (completion.ticket == ticket) found = std::move(completion);
      }
      return found.ticket == ticket;
    })) << "block "
        << name << " never ended";
    return found;
  }
  bool HasBytesOf(const TestBlock& block, uint32_t name) const {
    return memory.at(name)->extent == absl::Span<const std::byte>(block.extent);
  }
  bool AwaitLinks(int64_t count) {
    return Await([&] { return tier->stats().peers.linked == count; });
  }

  std::unique_ptr<PeerTier> tier = {};
  uint64_t ticket = 0;
  std::map<uint32_t, std::unique_ptr<TestBlock>> memory = {};
};

class PeerTierTest : public ::testing::TestWithParam<const char*> {
 protected:
  PeerTierTest() {
    spdlog::set_level(spdlog::level::off);
    for (const char* name : {"/ours", "/theirs"}) {
      EXPECT_TRUE(GroupSecret::Make(scratch_.path() + name).ok());
    }
    secret_ = GroupSecret::Read(scratch_.path() + "/ours").value();
    other_secret_ = GroupSecret::Read(scratch_.path() + "/theirs").value();
  }

  PeerTierOptions Options(std::vector<std::string> peers = {}) const {
    return {.transports = GetParam(),
            .shard = kvstore::SmallShard(),
            .peers = std::move(peers),
            .secret = secret_,
            .patience = kPatience};
  }
  static std::unique_ptr<PeerTier> Make(const PeerTierOptions& options,
                                        std::unique_ptr<kvstore::Tier> disk = nullptr) {
    auto tier = PeerTier::Create(options, std::move(disk));
    EXPECT_TRUE(tier.ok()) << tier.status();
    return *std::move(tier);
  }
  static void Lend(PeerTier& tier, const TestBlock& block) {
    tier.lent_blocks()->Add(block.identity.hash, block.extent);
  }

  // A peer with these options has a block, and is not asked for it.
  void ExpectNotAsked(const PeerTierOptions& options) {
    const auto owner = Make(options);
    const auto right = Make(Options());
    Asker asker{.tier = Make(Options({owner->address(), right->address()}))};
    ASSERT_TRUE(asker.AwaitLinks(1));
    const TestBlock block(Format(), 2, 1);
    Lend(*owner, block);
    EXPECT_TRUE(absl::IsNotFound(asker.Read(2).status));
    EXPECT_EQ(owner->stats().peers.lent_blocks, 0);
    EXPECT_EQ(asker.tier->stats().peers.configured, 2);
  }

  testing::ScratchDirectory scratch_;
  std::shared_ptr<const GroupSecret> secret_, other_secret_;
};

TEST_P(PeerTierTest, ABlockThatAPeerLendsIsFetchedAndVerified) {
  const auto owner = Make(Options());
  Asker asker{.tier = Make(Options({owner->address()}))};
  ASSERT_TRUE(asker.AwaitLinks(1));
  const TestBlock block(Format(), 7, 3);
  EXPECT_FALSE(asker.tier->Holds(HashOf(7)));
  EXPECT_TRUE(asker.tier->MayRead(HashOf(7)));
  const TierCompletion absent = asker.Read(7);
  EXPECT_TRUE(absl::IsNotFound(absent.status)) << absent.status;
  EXPECT_TRUE(absent.from_peer);
  Lend(*owner, block);
  const TierCompletion found = asker.Read(7);
  ASSERT_TRUE(found.status.ok()) << found.status;
  EXPECT_TRUE(found.from_peer);
  EXPECT_EQ(found.block.generation, 3u);
  EXPECT_TRUE(asker.HasBytesOf(block, 7));
  const kvstore::PeerStats stats = asker.tier->stats().peers;
  EXPECT_EQ(stats.fetched_blocks, 1);
  EXPECT_EQ(stats.fetched_bytes, Format().extent_bytes());
  EXPECT_EQ(stats.absent_blocks, 1);
  EXPECT_TRUE(Await([&] { return owner->stats().peers.lent_blocks == 1; }));
  owner->lent_blocks()->Remove(HashOf(7), block.extent);
  EXPECT_TRUE(absl::IsNotFound(asker.Read(7).status));
}

TEST_P(PeerTierTest, ManyBlocksAtATimeComeEachToItsPlace) {
  constexpr uint32_t kBlocks = 700;  // more than one message names
  const auto owner = Make(Options());
  Asker asker{.tier = Make(Options({owner->address()}))};
  ASSERT_TRUE(asker.AwaitLinks(1));
  std::vector<std::unique_ptr<TestBlock>> blocks, places;
  std::vector<kvstore::TierRead> reads;
  for (uint32_t name = 0; name < kBlocks; ++name) {
    blocks.push_back(std::make_unique<TestBlock>(Format(), name, 1));
    places.push_back(std::make_unique<TestBlock>(Format(), 0, 0));
    if (name % 5 != 0) Lend(*owner, *blocks.back());
    reads.push_back({.ticket = name, .hash = HashOf(name), .extent = places.back()->extent});
  }
  asker.tier->Read(reads);
  size_t ended = 0;
  EXPECT_TRUE(Await([&] {
    for (const TierCompletion& completion : asker.tier->Poll().completions) {
      const uint64_t name = completion.ticket;
      EXPECT_EQ(completion.status.code(),
                name % 5 == 0 ? absl::StatusCode::kNotFound : absl::StatusCode::kOk);
      EXPECT_EQ(blocks[name]->extent == places[name]->extent, name % 5 != 0);
      ++ended;
    }
    return ended == kBlocks;
  }));
}

TEST_P(PeerTierTest, PeersAreAskedOneAfterTheOtherAndItselfNever) {
  const auto first = Make(Options());
  const auto second = Make(Options());
  Asker asker{.tier = Make(Options({first->address(), second->address()}))};
  ASSERT_TRUE(asker.AwaitLinks(2));
  const TestBlock block(Format(), 7, 1);
  Lend(*second, block);
  EXPECT_TRUE(asker.Read(7).status.ok());
  EXPECT_TRUE(absl::IsNotFound(asker.Read(8).status));
  EXPECT_EQ(asker.tier->stats().peers.absent_blocks, 1);

  PeerTierOptions own = Options({asker.tier->address(), second->address()});
  own.listen = asker.tier->address();
  asker.tier.reset();
  asker.tier = Make(own);
  ASSERT_TRUE(asker.AwaitLinks(1));
  EXPECT_TRUE(asker.Read(7).status.ok());
}

TEST_P(PeerTierTest, WrongBytesAreRefusedAndTheirSenderIsNotAskedAgain) {
  const auto owner = Make(Options());
  Asker asker{.tier = Make(Options({owner->address()}))};
  ASSERT_TRUE(asker.AwaitLinks(1));
  const TestBlock good(Format(), 1, 1);
  TestBlock wrong(Format(), 2, 1);
  wrong.extent[static_cast<size_t>(Format().page_offset(0))] ^= std::byte{1};
  Lend(*owner, good);
  Lend(*owner, wrong);
  const TierCompletion refused = asker.Read(2);
  EXPECT_TRUE(absl::IsDataLoss(refused.status)) << refused.status;
  EXPECT_EQ(asker.tier->stats().peers.refused_blocks, 1);
  ASSERT_TRUE(asker.AwaitLinks(0));
  EXPECT_TRUE(absl::IsNotFound(asker.Read(1).status));
  EXPECT_FALSE(asker.tier->MayRead(HashOf(1)));
}

TEST_P(PeerTierTest, AnotherBlockUnderTheHashIsRefused) {
  const auto owner = Make(Options());
  Asker asker{.tier = Make(Options({owner->address()}))};
  ASSERT_TRUE(asker.AwaitLinks(1));
  const TestBlock block(Format(), 2, 1);
  owner->lent_blocks()->Add(HashOf(3), block.extent);
  EXPECT_TRUE(absl::IsDataLoss(asker.Read(3).status));
}

TEST_P(PeerTierTest, APeerOfAnotherModelIsNotAsked) {
  PeerTierOptions options = Options();
  options.shard.weights_hash = std::string(32, 'x');
  ExpectNotAsked(options);
}

TEST_P(PeerTierTest, APeerWithAnotherSecretIsNotAskedAndGivesNothing) {
  PeerTierOptions options = Options();
  options.secret = other_secret_;
  ExpectNotAsked(options);
}

TEST_P(PeerTierTest, APeerThatComesBackIsAskedAgain) {
  auto owner = Make(Options());
  PeerTierOptions again = Options();
  again.listen = owner->address();
  Asker asker{.tier = Make(Options({owner->address()}))};
  ASSERT_TRUE(asker.AwaitLinks(1));
  owner.reset();
  ASSERT_TRUE(asker.AwaitLinks(0));
  EXPECT_TRUE(absl::IsNotFound(asker.Read(2).status));
  owner = Make(again);
  ASSERT_TRUE(asker.AwaitLinks(1));
  const TestBlock block(Format(), 2, 1);
  Lend(*owner, block);
  EXPECT_TRUE(asker.Read(2).status.ok());
}

TEST_P(PeerTierTest, BlocksOnDiskAreReadThereAndNoPeerIsAsked) {
  const auto owner = Make(Options());
  Asker asker{.tier = Make(Options({owner->address()}),
                           std::make_unique<kvstore::MemoryTier>(Format(), 1))};
  ASSERT_TRUE(asker.AwaitLinks(1));
  const TestBlock on_disk(Format(), 1, 1), at_peer(Format(), 2, 1);
  Lend(*owner, on_disk);
  Lend(*owner, at_peer);
  asker.tier->Write({{.ticket = 1, .block = on_disk.identity, .extent = on_disk.extent}});
  asker.ticket = 1;
  EXPECT_TRUE(Await([&] { return !asker.tier->Poll().completions.empty(); }));
  EXPECT_TRUE(asker.tier->Holds(HashOf(1)));
  EXPECT_FALSE(asker.Read(1).from_peer);
  EXPECT_TRUE(asker.Read(2).from_peer);
  EXPECT_EQ(asker.tier->stats().peers.fetched_blocks, 1);
}

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
           secret_->Proof(GroupSecret::Side::kLender, nonces_) + Format().Fingerprint());
      return;
    }
    for (size_t at = 0; at < body_.size(); at += sizeof(WantedBlock)) {
      WantedBlock wanted;
      std::memcpy(&wanted, body_.data() + at, sizeof(wanted));
      answer_(*caller_, link, wanted);
    }
  }
  void OnLost(PeerLink, const absl::Status&) override {}
  void OnTick() override {}

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

INSTANTIATE_TEST_SUITE_P(Transports, PeerTierTest, ::testing::Values("sm,tcp", "tcp"),
                         [](const auto& test) {
                           return std::string(test.param) == "tcp" ? "tcp" : "sm";
                         });
INSTANTIATE_TEST_SUITE_P(Transports, BadPeerTest, ::testing::Values("sm,tcp", "tcp"),
                         [](const auto& test) {
                           return std::string(test.param) == "tcp" ? "tcp" : "sm";
                         });

}  // namespace
}  // namespace kvasir::worker
