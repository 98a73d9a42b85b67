#include "proto/selector_field.h"

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "proto/kvasir/v1/config.pb.h"

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
  SetSelector("sink_tokens", policy);  // a field, but no selector
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

TEST(SelectorFieldTest, TheFlagOffersEveryTerminator) {
  const auto* terminators = AttentionPolicy::descriptor()->FindOneofByName("terminator");
  const auto& flag = SparseConfig::descriptor()
                         ->FindFieldByName("sparse_terminate")
                         ->options()
                         .GetExtension(v1::flag);
  ASSERT_EQ(flag.choices_size(), 1 + terminators->field_count());
  EXPECT_EQ(flag.choices(0), "none");
  for (int i = 0; i < terminators->field_count(); ++i) {
    EXPECT_EQ(flag.choices(1 + i), terminators->field(i)->name());
  }
}

TEST(SelectorFieldTest, TheFlagsOfferEverySelector) {
  std::vector<std::string> names;
  const auto* selectors = AttentionPolicy::descriptor()->FindOneofByName("selector");
  for (int i = 0; i < selectors->field_count(); ++i) names.push_back(selectors->field(i)->name());
  for (const char* field : {"sparse_selector", "sparse_prefill_selector"}) {
    const auto& flag =
        SparseConfig::descriptor()->FindFieldByName(field)->options().GetExtension(v1::flag);
    EXPECT_THAT(flag.choices(), testing::ElementsAreArray(names)) << field;
  }
}

}  // namespace
}  // namespace kvasir::v1
