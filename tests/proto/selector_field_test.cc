#include "proto/selector_field.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::v1 {
namespace {

TEST(SelectorFieldTest, ASelectorIsSetAndFoundByName) {
  AttentionPolicy policy;
  EXPECT_EQ(SelectorName(policy), "");
  SetSelector("quest", policy);
  EXPECT_TRUE(policy.has_quest());
  SetSelector("hip", policy);
  EXPECT_TRUE(policy.has_hip());
  EXPECT_EQ(SelectorName(policy), "hip");
  SetSelector("sink_tokens", policy);  // a field, but not of a selector
  EXPECT_EQ(SelectorName(policy), "");
}

TEST(SelectorFieldTest, OptionsAreTheFieldsThatAreSet) {
  AttentionPolicy policy;
  EXPECT_THAT(SelectorFields(policy), testing::IsEmpty());
  policy.mutable_infinitehip()->set_probe("centre");
  EXPECT_THAT(SelectorFields(policy), testing::ElementsAre(testing::Pair("probe", "centre")));
}

TEST(SelectorFieldTest, ATerminatorIsAsASelector) {
  AttentionPolicy policy;
  policy.mutable_quest();
  EXPECT_EQ(TerminatorName(policy), "");
  SetTerminator("art", policy);
  EXPECT_EQ(TerminatorName(policy), "art");
  policy.mutable_art()->set_guard("none");
  policy.mutable_art()->set_unread_mass(0.1f);
  EXPECT_THAT(TerminatorFields(policy),
              testing::ElementsAre(testing::Pair("guard", "none"),
                                   testing::Pair("unread_mass", "0.100000001")));
  EXPECT_TRUE(policy.has_quest());
  SetTerminator("none", policy);
  EXPECT_EQ(TerminatorName(policy), "");
}

}  // namespace
}  // namespace kvasir::v1
