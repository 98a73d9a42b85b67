#include "coordinator/group/leader_worker_set.h"

#include <map>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::coordinator {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

absl::StatusOr<std::vector<std::string>> Workers(absl::string_view flag, const Variables& set) {
  return LeaderWorkerSetWorkers(flag, [&set](const char* name) {
    const auto found = set.find(name);
    return found == set.end() ? nullptr : found->second.c_str();
  });
}

TEST(LeaderWorkerSetTest, EachOtherPodOfTheGroupIsAWorker) {
  EXPECT_THAT(Workers("lws:50061", {{"LWS_LEADER_ADDRESS", "kvasir-group-0.kvasir-group.chat"},
                                    {"LWS_GROUP_SIZE", "3"}})
                  .value(),
              ElementsAre("kvasir-group-0-1.kvasir-group.chat:50061",
                          "kvasir-group-0-2.kvasir-group.chat:50061"));
}

TEST(LeaderWorkerSetTest, ALeaderWithoutDomainIsTaken) {
  EXPECT_THAT(Workers("lws:7", {{"LWS_LEADER_ADDRESS", "g-4"}, {"LWS_GROUP_SIZE", "2"}}).value(),
              ElementsAre("g-4-1:7"));
}

TEST(LeaderWorkerSetTest, OnlyItsPrefixNamesIt) {
  EXPECT_TRUE(NamesLeaderWorkerSet("lws:50061"));
  EXPECT_FALSE(NamesLeaderWorkerSet("lws-0.kvasir:50061"));
  EXPECT_FALSE(NamesLeaderWorkerSet(""));
}

TEST(LeaderWorkerSetTest, WhatIsMissingOrWrongIsNamed) {
  const auto refused = [](absl::string_view flag, const Variables& set) {
    const absl::Status status = Workers(flag, set).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  const Variables good = {{"LWS_LEADER_ADDRESS", "g-0.g.n"}, {"LWS_GROUP_SIZE", "3"}};
  for (const char* flag : {"lws:", "lws:0", "lws:65536", "lws:http", "lws:-1"}) {
    EXPECT_THAT(refused(flag, good), HasSubstr(flag));
  }
  EXPECT_THAT(refused("lws:1", {{"LWS_GROUP_SIZE", "3"}}), HasSubstr("LWS_LEADER_ADDRESS"));
  EXPECT_THAT(refused("lws:1", {{"LWS_LEADER_ADDRESS", "g-0"}}), HasSubstr("LWS_GROUP_SIZE"));
  for (const char* size : {"", "1", "-3", "1026", "many"}) {
    Variables bad = good;
    bad["LWS_GROUP_SIZE"] = size;
    EXPECT_THAT(refused("lws:1", bad), HasSubstr("LWS_GROUP_SIZE"));
  }
}

}  // namespace
}  // namespace kvasir::coordinator
