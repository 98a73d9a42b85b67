// A subscriber that reads as routers do, from the positions of arrays and with replays, and knows
// the cache exactly.
#include <chrono>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "coordinator/events/kv_event_publisher.h"
#define MSGPACK_NO_BOOST
#include "coordinator/events/event_batch.h"
#include "kvstore/index/prefix_index.h"
#include "msgpack.hpp"
#include "zmq.hpp"

namespace kvasir::coordinator {
namespace {

using kvstore::Block;
using kvstore::kBlockTokens;
using kvstore::PrefixHash;
using kvstore::PrefixIndex;
using testing::HasSubstr;
using Tokens = std::vector<int32_t>;

constexpr std::chrono::milliseconds kPatience{10000};

std::string BigEndian(uint64_t number) {
  std::string bytes(8, '\0');
  for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(number >> (56 - 8 * i));
  return bytes;
}

int64_t FromBigEndian(const std::string& bytes) {
  uint64_t number = 0;
  for (const char byte : bytes) number = number << 8 | static_cast<uint8_t>(byte);
  return static_cast<int64_t>(number);
}

struct Stored {
  bool first = false;
  uint64_t parent = 0;
  Tokens tokens;
};

class Subscriber {
 public:
  Subscriber(const KvEventPublisher& publisher, const std::string& topic) {
    events_.set(zmq::sockopt::subscribe, topic);
    events_.set(zmq::sockopt::rcvtimeo, 100);
    events_.connect(publisher.endpoint());
    replay_.set(zmq::sockopt::rcvtimeo, static_cast<int>(kPatience.count()));
    replay_.connect(publisher.replay_endpoint());
  }

  // Reads one message, if one comes within 100 ms, and what was missed before it.
  void Read() {
    const std::vector<std::string> frames = Receive(events_);
    if (frames.empty()) return;
    ASSERT_EQ(frames.size(), 3u);
    topic_ = frames[0];
    const int64_t number = FromBigEndian(frames[1]);
    if (number > next_) Replay();
    if (number == next_) Take(frames[2]);
  }
  // Asks for everything from the next number on.
  void Replay() {
    replay_.send(zmq::buffer(std::string()), zmq::send_flags::sndmore);
    replay_.send(zmq::buffer(BigEndian(static_cast<uint64_t>(next_))), zmq::send_flags::none);
    while (true) {
      const std::vector<std::string> frames = Receive(replay_);
      ASSERT_EQ(frames.size(), 3u);
      ASSERT_EQ(frames[0], "");
      const int64_t number = FromBigEndian(frames[1]);
      if (number == -1) return;
      ASSERT_EQ(number, next_);
      Take(frames[2]);
    }
  }
  // The publisher takes up events before it looks for questions: the second answer has all events
  // that happened before the first question.
  void CatchUp() {
    Replay();
    Replay();
  }
  // Number of blocks at the start of the prompt that the subscriber believes cached.
  size_t Hits(const PrefixHash& scope, const Tokens& prompt) const {
    size_t hits = 0;
    PrefixHash chain = scope;
    while ((hits + 1) * kBlockTokens < prompt.size()) {
      const auto tokens = absl::MakeConstSpan(prompt).subspan(hits * kBlockTokens, kBlockTokens);
      const uint64_t parent = EventHash(chain);
      chain = kvstore::HashBlock(chain, tokens, "");
      const auto found = blocks_.find(EventHash(chain));
      if (found == blocks_.end()) break;
      EXPECT_EQ(found->second.first, hits == 0);
      if (hits > 0) {
        EXPECT_EQ(found->second.parent, parent);
      }
      EXPECT_EQ(found->second.tokens, Tokens(tokens.begin(), tokens.end()));
      ++hits;
    }
    return hits;
  }
  size_t size() const { return blocks_.size(); }
  const std::string& topic() const { return topic_; }

 private:
  static std::vector<std::string> Receive(zmq::socket_t& socket) {
    std::vector<std::string> frames;
    zmq::message_t part;
    do {
      if (!socket.recv(part)) return {};
      frames.push_back(part.to_string());
    } while (part.more());
    return frames;
  }

  void Take(const std::string& batch) {
    ++next_;
    const msgpack::object_handle handle = msgpack::unpack(batch.data(), batch.size());
    const auto fields = handle.get().as<std::vector<msgpack::object>>();
    ASSERT_EQ(fields.size(), 3u);
    EXPECT_GT(fields[0].as<double>(), 1.7e9);  // seconds since 1970
    for (const msgpack::object& event : fields[1].as<std::vector<msgpack::object>>()) Apply(event);
  }
  void Apply(const msgpack::object& object) {
    const auto event = object.as<std::vector<msgpack::object>>();
    const auto kind = event.at(0).as<std::string>();
    if (kind == "AllBlocksCleared") {
      blocks_.clear();
      return;
    }
    const auto hashes = event.at(1).as<std::vector<uint64_t>>();
    ASSERT_EQ(hashes.size(), 1u);
    if (kind == "BlockRemoved") {
      EXPECT_EQ(blocks_.erase(hashes[0]), 1u);
      EXPECT_EQ(event.at(2).as<std::string>(), "CPU");
      return;
    }
    ASSERT_EQ(kind, "BlockStored");
    ASSERT_EQ(event.size(), 7u);
    const bool first = event[2].is_nil();
    EXPECT_EQ(event[4].as<int64_t>(), kBlockTokens);
    EXPECT_TRUE(event[5].is_nil());
    EXPECT_EQ(event[6].as<std::string>(), "CPU");
    EXPECT_TRUE(blocks_
                    .emplace(hashes[0], Stored{.first = first,
                                               .parent = first ? 0 : event[2].as<uint64_t>(),
                                               .tokens = event[3].as<Tokens>()})
                    .second);
  }

  zmq::context_t context_;
  zmq::socket_t events_{context_, zmq::socket_type::sub};
  zmq::socket_t replay_{context_, zmq::socket_type::dealer};
  std::map<uint64_t, Stored> blocks_;
  int64_t next_ = 0;
  std::string topic_;
};

std::unique_ptr<KvEventPublisher> StartPublisher() {
  return KvEventPublisher::Start({.endpoint = "tcp://127.0.0.1:*",
                                  .replay_endpoint = "tcp://127.0.0.1:*",
                                  .topic = "kv@test"})
      .value();
}

// Reads until the condition holds; false after the longest wait.
template <typename Condition>
bool ReadUntil(Subscriber& subscriber, const Condition& condition) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    subscriber.Read();
  }
  return true;
}

class KvEventsTest : public testing::Test {
 protected:
  static constexpr int64_t kCapacity = 40;

  // Serves a request as the scheduler does: finds what is cached, publishes the rest.
  void Serve(const Tokens& prompt) {
    kvstore::PrefixMatch match = index_->Match(scope_, prompt);
    while ((match.blocks.size() + 1) * kBlockTokens <= prompt.size()) {
      absl::StatusOr<Block> block = index_->Allocate();
      if (!block.ok()) return;
      const size_t at = match.blocks.size();
      const auto tokens = absl::MakeConstSpan(prompt).subspan(at * kBlockTokens, kBlockTokens);
      const PrefixHash parent = at == 0 ? scope_ : match.hashes.back();
      const PrefixHash hash = kvstore::HashBlock(parent, tokens, "");
      const Block none;
      index_->Publish({.block = *block,
                       .before = at == 0 ? none : match.blocks.back(),
                       .parent = parent,
                       .hash = hash,
                       .tokens = tokens});
      match.hashes.push_back(hash);
      match.blocks.push_back(*std::move(block));
    }
    if (!match.blocks.empty() && random_() % 50 == 0) {
      index_->Lost(match.blocks[random_() % match.blocks.size()].id());
    }
  }
  // Prompts that share beginnings: each block is one of two.
  Tokens RandomPrompt() {
    Tokens prompt;
    const size_t blocks = 1 + random_() % 8;
    for (size_t i = 0; i < blocks; ++i) {
      prompt.insert(prompt.end(), kBlockTokens, static_cast<int32_t>(random_() % 2));
    }
    prompt.push_back(7);
    return prompt;
  }
  const PrefixHash scope_ = kvstore::HashScope(
      {.tenant = "a", .weights_hash = "w", .kv_form = "rotated/float32", .prefill_policy = "all"});
  std::mt19937 random_{20261126};
  const std::unique_ptr<KvEventPublisher> publisher_ = StartPublisher();
  std::unique_ptr<PrefixIndex> index_ =
      PrefixIndex::Create(kCapacity, kvstore::HashBlock, publisher_.get());
};

TEST_F(KvEventsTest, ASubscriberKnowsTheCacheExactlyAfterAThousandRequests) {
  Subscriber subscriber(*publisher_, "kv@");
  for (int i = 0; i < 1000; ++i) {
    Serve(RandomPrompt());
    if (i % 100 == 0) subscriber.Read();
  }
  EXPECT_GT(index_->stats().evictions, 100);
  subscriber.CatchUp();
  EXPECT_EQ(subscriber.size(), static_cast<size_t>(index_->stats().cached_blocks));
  for (int i = 0; i < 200; ++i) {
    const Tokens prompt = RandomPrompt();
    EXPECT_EQ(subscriber.Hits(scope_, prompt), index_->Match(scope_, prompt).blocks.size());
  }
  EXPECT_EQ(subscriber.topic(), "kv@test");
}

TEST_F(KvEventsTest, WhoComesLateAsksForWhatWasMissed) {
  for (int i = 0; i < 20; ++i) Serve(RandomPrompt());
  Subscriber subscriber(*publisher_, "kv@test");
  subscriber.CatchUp();
  EXPECT_EQ(subscriber.size(), static_cast<size_t>(index_->stats().cached_blocks));
  EXPECT_GT(subscriber.size(), 0u);
}

TEST_F(KvEventsTest, AnIndexThatIsGoneClearsTheCache) {
  Serve(RandomPrompt());
  Subscriber subscriber(*publisher_, "kv@test");
  subscriber.CatchUp();
  EXPECT_GT(subscriber.size(), 0u);
  index_.reset();
  subscriber.CatchUp();
  EXPECT_EQ(subscriber.size(), 0u);
}

TEST_F(KvEventsTest, MessagesComeWithoutBeingAskedFor) {
  Subscriber subscriber(*publisher_, "kv@test");
  // The first ones may be sent before the subscription has arrived.
  EXPECT_TRUE(ReadUntil(subscriber, [&] {
    Serve(RandomPrompt());
    return subscriber.size() > 0;
  }));
}

TEST(KvEventPublisherTest, AnAddressThatIsTakenIsRefusedWithItsName) {
  const auto first = StartPublisher();
  const absl::Status taken =
      KvEventPublisher::Start({.endpoint = first->endpoint(), .replay_endpoint = "", .topic = ""})
          .status();
  EXPECT_EQ(taken.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(taken.message()), HasSubstr(first->endpoint()));
  EXPECT_FALSE(
      KvEventPublisher::Start({.endpoint = "nowhere", .replay_endpoint = "", .topic = ""}).ok());
}

}  // namespace
}  // namespace kvasir::coordinator
