#include "coordinator/group/peer_list.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(PeerListTest, EachRankHasItsOwnOfEachReplica) {
  const auto peers = ParsePeers("a:7000, b:7000", 2);
  ASSERT_TRUE(peers.ok()) << peers.status();
  EXPECT_THAT(*peers,
              ElementsAre(ElementsAre("a:7000", "b:7000"), ElementsAre("a:7001", "b:7001")));
  const auto named = ParsePeers("a:1+c:9,[::1]:5", 2);
  ASSERT_TRUE(named.ok()) << named.status();
  EXPECT_THAT(*named, ElementsAre(ElementsAre("a:1", "[::1]:5"), ElementsAre("c:9", "[::1]:6")));
}

TEST(PeerListTest, OfAReplicaOfAnotherDegreeARankAsksThoseThatMayHaveItsHeads) {
  const auto more = ParsePeers("a:1*4,b:1+b:5+b:7+b:9", 2);
  ASSERT_TRUE(more.ok()) << more.status();
  EXPECT_THAT(*more, ElementsAre(ElementsAre("a:1", "a:2", "b:1", "b:5"),
                                 ElementsAre("a:3", "a:4", "b:7", "b:9")));
  const auto fewer = ParsePeers("a:1*1,[::1]:7*2", 4);
  ASSERT_TRUE(fewer.ok()) << fewer.status();
  EXPECT_THAT(*fewer, ElementsAre(ElementsAre("a:1", "[::1]:7"), ElementsAre("a:1", "[::1]:7"),
                                  ElementsAre("a:1", "[::1]:8"), ElementsAre("a:1", "[::1]:8")));
  EXPECT_THAT(ParsePeers("a:1*3", 2).value(),
              ElementsAre(ElementsAre("a:1", "a:2"), ElementsAre("a:2", "a:3")));
  EXPECT_THAT(ParsePeers("a:1*2", 2).value(), ElementsAre(ElementsAre("a:1"), ElementsAre("a:2")));
}

TEST(PeerListTest, NoPeersAreNone) { EXPECT_THAT(ParsePeers(" ", 2).value(), IsEmpty()); }

TEST(PeerListTest, WhatIsNoReplicaIsRefusedWithItsName) {
  const std::pair<const char*, const char*> bad[] = {
      {"a", "'a' is no address"},        {"a:1,b:x", "'b:x' is no address"},
      {":7", "':7' is no address"},      {"a:65536", "'a:65536' is no address"},
      {"a:65535", "no port for rank 1"}, {"a:1*0", "'a:1*0' is no replica"},
      {"a:1*x", "HOST:PORT*N"},          {"a:1+b:1*2", "HOST:PORT*N"},
      {"a:-1", "'a:-1' is no address"}};
  for (const auto& [text, why] : bad) {
    const auto peers = ParsePeers(text, 2);
    EXPECT_TRUE(absl::IsInvalidArgument(peers.status())) << text;
    EXPECT_THAT(peers.status().message(), HasSubstr(why));
  }
}

TEST(PeerListTest, FreePortsStayFreePorts) {
  EXPECT_EQ(PeerAddressOfRank("127.0.0.1:0", 3).value(), "127.0.0.1:0");
  EXPECT_EQ(PeerAddressOfRank("127.0.0.1:7", 3).value(), "127.0.0.1:10");
}

}  // namespace
}  // namespace kvasir::coordinator
