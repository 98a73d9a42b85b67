// Peer tiers of one process, over shared memory and over TCP: what tests of good and of bad peers
// share.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "spdlog/spdlog.h"

#include "proto/security/group_secret.h"
#include "tests/kvstore/test_blocks.h"
#include "tests/support/scratch_directory.h"
#include "worker/peers/peer_tier.h"

namespace kvasir::worker {

inline constexpr std::chrono::milliseconds kPatience(300);

inline bool Await(const std::function<bool()>& condition,
                  std::chrono::seconds patience = std::chrono::seconds(20)) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

inline const kvstore::ExtentFormat& Format() {
  static const auto format = kvstore::ExtentFormat::Create(kvstore::SmallShard()).value();
  return format;
}

// A tier with what a test asks of it.
struct Asker {
  // Reads the block called `name`, and the memory it came to.
  kvstore::TierCompletion Read(uint32_t name) {
    memory.emplace(name, std::make_unique<kvstore::TestBlock>(Format(), 0, 0));
    tier->Read(
        {{.ticket = ++ticket, .hash = kvstore::HashOf(name), .extent = memory.at(name)->extent}});
    kvstore::TierCompletion found;
    EXPECT_TRUE(Await([&] {
      for (kvstore::TierCompletion& completion : tier->Poll().completions) {
        if (completion.ticket == ticket) found = std::move(completion);
      }
      return found.ticket == ticket;
    })) << "block "
        << name << " never ended";
    return found;
  }
  bool HasBytesOf(const kvstore::TestBlock& block, uint32_t name) const {
    return memory.at(name)->extent == absl::Span<const std::byte>(block.extent);
  }
  bool AwaitLinks(int64_t count) {
    return Await([&] { return tier->stats().peers.linked == count; });
  }

  std::unique_ptr<PeerTier> tier = {};
  uint64_t ticket = 0;
  std::map<uint32_t, std::unique_ptr<kvstore::TestBlock>> memory = {};
};

class PeerTierTest : public ::testing::TestWithParam<const char*> {
 protected:
  PeerTierTest() {
    spdlog::set_level(spdlog::level::off);
    for (const char* name : {"/ours", "/theirs"}) {
      EXPECT_TRUE(proto::GroupSecret::Make(scratch_.path() + name).ok());
    }
    secret_ = proto::GroupSecret::Read(scratch_.path() + "/ours").value();
    other_secret_ = proto::GroupSecret::Read(scratch_.path() + "/theirs").value();
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
  static void Lend(PeerTier& tier, const kvstore::TestBlock& block) {
    tier.lent_blocks()->Add(block.identity.hash, block.extent);
  }

  // A peer with these options has a block, and is not asked for it.
  void ExpectNotAsked(const PeerTierOptions& options) {
    const auto owner = Make(options);
    const auto right = Make(Options());
    Asker asker{.tier = Make(Options({owner->address(), right->address()}))};
    ASSERT_TRUE(asker.AwaitLinks(1));
    const kvstore::TestBlock block(Format(), 2, 1);
    Lend(*owner, block);
    EXPECT_TRUE(absl::IsNotFound(asker.Read(2).status));
    EXPECT_EQ(owner->stats().peers.lent_blocks, 0);
    EXPECT_EQ(asker.tier->stats().peers.configured, 2);
  }

  testing::ScratchDirectory scratch_;
  std::shared_ptr<const proto::GroupSecret> secret_, other_secret_;
};

inline std::string NameOfTransports(const ::testing::TestParamInfo<const char*>& test) {
  return std::string(test.param) == "tcp" ? "tcp" : "sm";
}

}  // namespace kvasir::worker
