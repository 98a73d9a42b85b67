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

TEST(SelectorFieldTest, FactsAreThoseOfTheFieldAndItsOptions) {
  AttentionPolicy policy;
  EXPECT_FALSE(FactsOf(policy).lists());
  EXPECT_EQ(FactsOf(policy).chunk_tokens(), 1);
  EXPECT_EQ(FactsOf(policy).min_window_tokens(), 1);
  SetSelector("streaming", policy);
  EXPECT_FALSE(FactsOf(policy).lists());
  SetSelector("quest", policy);
  EXPECT_TRUE(FactsOf(policy).lists());
  EXPECT_EQ(FactsOf(policy).chunk_tokens(), 64);
  policy.mutable_infinitehip()->set_preset("3k-fast");
  EXPECT_EQ(FactsOf(policy).chunk_tokens(), 8);
  EXPECT_EQ(FactsOf(policy).min_window_tokens(), 512);
  policy.mutable_infinitehip()->set_preset("5k");
  EXPECT_EQ(FactsOf(policy).chunk_tokens(), 16);
  EXPECT_EQ(FactsOf(policy).min_window_tokens(), 128);
  EXPECT_TRUE(FactsOf(policy).own_intervals());
  EXPECT_TRUE(FactsOf(policy).window_holds_reach());
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
