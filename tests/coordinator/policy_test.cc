#include "coordinator/policy/policy.h"

#include <cmath>
#include <limits>
#include <set>
#include <string>

#include "gtest/gtest.h"

#include "proto/selector_field.h"
#include "tests/coordinator/test_policy.h"

namespace kvasir::coordinator {
namespace {

TEST(PolicyTableTest, TheFirstPolicyIsTheDefault) {
  absl::StatusOr<PolicyTable> table = PolicyTable::Create({Policy("default"), Policy("other")});
  ASSERT_TRUE(table.ok()) << table.status();
  EXPECT_EQ(table->Resolve({})->index, 0u);
  v1::PolicyChoice choice;
  choice.set_name("other");
  absl::StatusOr<ResolvedPolicy> resolved = table->Resolve(choice);
  ASSERT_TRUE(resolved.ok());
  EXPECT_EQ(resolved->index, 1u);
  EXPECT_EQ(resolved->decode.token_budget(), 2048u);
  EXPECT_EQ(resolved->tail_tokens, 64u);
}

TEST(PolicyTableTest, AnUnknownNameListsTheDeclaredOnes) {
  absl::StatusOr<PolicyTable> table = PolicyTable::Create({Policy("a"), Policy("b")});
  v1::PolicyChoice choice;
  choice.set_name("c");
  ExpectInvalid(table->Resolve(choice).status(), "'c'; this server declares a, b");
}

TEST(PolicyTableTest, ARequestOverridesNumbersOfOnePart) {
  absl::StatusOr<PolicyTable> table = PolicyTable::Create({Policy("default")});
  v1::PolicyChoice choice;
  choice.mutable_decode_overrides()->set_token_budget(64);
  absl::StatusOr<ResolvedPolicy> resolved = table->Resolve(choice);
  ASSERT_TRUE(resolved.ok());
  EXPECT_EQ(resolved->decode.token_budget(), 64u);
  EXPECT_EQ(resolved->decode.sink_tokens(), 128u);
  EXPECT_EQ(resolved->prefill.token_budget(), 2048u);
}

TEST(PolicyTableTest, ARequestCannotOverrideTheSelector) {
  absl::StatusOr<PolicyTable> table = PolicyTable::Create({Policy("default")});
  v1::PolicyChoice choice;
  choice.mutable_prefill_overrides()->mutable_quest();
  ExpectInvalid(table->Resolve(choice).status(), "policy.prefill_overrides sets a selector");
}

TEST(PolicyTableTest, BadDeclarationsAreRefused) {
  ExpectInvalid(PolicyTable::Create({}).status(), "0 policies");
  const v1::SparsityPolicy p = Policy("p");
  ExpectInvalid(PolicyTable::Create({p, p}).status(), "declared twice");
  ExpectInvalid(
      PolicyTable::Create({Policy("a"), Policy("b"), Policy("c"), Policy("d"), Policy("e")})
          .status(),
      "5 policies");
  ExpectInvalid(PolicyTable::Create({Policy("A b")}).status(), "[a-z0-9_-]");
  ExpectInvalid(PolicyTable::Create({Policy("")}).status(), "length");
  v1::SparsityPolicy no_budget = Policy("p");
  no_budget.mutable_decode()->clear_token_budget();
  ExpectInvalid(PolicyTable::Create({no_budget}).status(), "decode.token_budget is not set");
  v1::SparsityPolicy no_window = Policy("p");
  no_window.mutable_decode()->clear_window_tokens();
  ExpectInvalid(PolicyTable::Create({no_window}).status(),
                "decode.window_tokens is 0; quest needs a window of at least 1");
  v1::SparsityPolicy huge = Policy("p");
  huge.mutable_decode()->set_sink_tokens(4294967295u);
  ExpectInvalid(PolicyTable::Create({huge}).status(), "decode.sink_tokens");
}

TEST(PolicyTableTest, APartWithoutSelectorAttendsToAll) {
  v1::SparsityPolicy policy;
  policy.set_name("plain");
  absl::StatusOr<PolicyTable> table = PolicyTable::Create({policy});
  ASSERT_TRUE(table.ok()) << table.status();
  EXPECT_TRUE(table->declared()[0].decode().has_all());
  EXPECT_TRUE(table->Resolve({})->prefill.has_all());
  EXPECT_EQ(table->Resolve({})->tail_tokens, 0u);  // ignored when decoding is dense
}

TEST(TrainedWindowTest, LongSequencesNeedSelectorsInAllLayers) {
  EXPECT_TRUE(CheckTrainedWindow(Resolved("all", "all"), 1'000'000, 0).ok()) << "not extended";
  EXPECT_TRUE(CheckTrainedWindow(Resolved("all", "all"), 8192, 8192).ok());
  EXPECT_TRUE(CheckTrainedWindow(Resolved("streaming", "tokenselect"), 100'000, 8192).ok());
  ExpectInvalid(CheckTrainedWindow(Resolved("all", "quest"), 8193, 8192),
                "prompt and answer may have 8193 tokens and the model was trained for 8192: the "
                "prefill part of the policy must be sparse in all layers, but the policy attends");
  ExpectInvalid(CheckTrainedWindow(Resolved("quest", "all"), 8193, 8192), "the decode part");
  ResolvedPolicy dense_layers = Resolved("quest", "quest");
  dense_layers.decode.set_dense_layers(2);
  ExpectInvalid(CheckTrainedWindow(dense_layers, 8193, 8192), "the first 2 attend to everything");
  ResolvedPolicy ends_early = Resolved("quest", "all");
  ends_early.decode.mutable_art();
  ExpectInvalid(CheckTrainedWindow(ends_early, 8193, 8192), "the policy attends to everything");
}

TEST(TrainedWindowTest, SinkSelectionAndWindowOfAllQueriesMustFit) {
  const int64_t decode = 100 + 32 * 64 + 1000;
  EXPECT_TRUE(CheckTrainedWindow(Resolved("streaming", "quest"), 9000, decode).ok());
  ExpectInvalid(CheckTrainedWindow(Resolved("streaming", "quest"), 9000, decode - 1),
                "the decode part of the policy attends to 3148 tokens");
  EXPECT_TRUE(CheckTrainedWindow(Resolved("quest", "quest"), 9000, decode + 63).ok());
  ExpectInvalid(CheckTrainedWindow(Resolved("quest", "quest"), 9000, decode + 62),
                "window 1000 of each of 64 queries");
  // Streaming has no use for the budget.
  EXPECT_TRUE(CheckTrainedWindow(Resolved("streaming", "streaming"), 9000, 1163).ok());
  EXPECT_FALSE(CheckTrainedWindow(Resolved("streaming", "streaming"), 9000, 1162).ok());
}

TEST(CanonicalBytesTest, NumbersThatASelectorDoesNotReadDoNotMatter) {
  v1::AttentionPolicy a;
  a.mutable_all();
  v1::AttentionPolicy b = a;
  b.set_token_budget(1000);
  b.set_window_tokens(7);
  EXPECT_EQ(CanonicalBytes(a), CanonicalBytes(b));
  a.mutable_streaming();
  b = a;
  b.set_token_budget(1000);
  EXPECT_EQ(CanonicalBytes(a), CanonicalBytes(b));
}

TEST(CanonicalBytesTest, NoTwoSelectorsAreAlike) {
  std::set<std::string> found;
  for (const std::string name :
       {"all", "streaming", "quest", "tokenselect", "hip", "infinitehip"}) {
    v1::AttentionPolicy policy = MakeNumbers();
    v1::SetSelector(name, policy);
    ASSERT_EQ(v1::SelectorName(policy), name);
    EXPECT_TRUE(found.insert(CanonicalBytes(policy)).second) << name;
  }
}

TEST(CanonicalBytesTest, ABudgetCountsInTheBlocksThatAreSelected) {
  const auto bytes = [](const std::string& name, uint32_t budget) {
    v1::AttentionPolicy policy = MakeNumbers();
    v1::SetSelector(name, policy);
    policy.set_token_budget(budget);
    return CanonicalBytes(policy);
  };
  EXPECT_EQ(bytes("quest", 65), bytes("quest", 128));
  EXPECT_EQ(bytes("hip", 65), bytes("hip", 66));
  EXPECT_NE(bytes("hip", 66), bytes("hip", 67));
  EXPECT_NE(bytes("tokenselect", 65), bytes("tokenselect", 66));
}

TEST(CanonicalBytesTest, OptionsPruningAndTerminatingCount) {
  v1::AttentionPolicy policy = MakeNumbers();
  policy.mutable_infinitehip();
  std::set<std::string> found = {CanonicalBytes(policy)};
  policy.mutable_infinitehip()->set_probe("centre");
  EXPECT_TRUE(found.insert(CanonicalBytes(policy)).second);
  policy.mutable_infinitehip()->set_preset("5k");
  EXPECT_TRUE(found.insert(CanonicalBytes(policy)).second);
  policy.set_top_p(0.95f);
  EXPECT_TRUE(found.insert(CanonicalBytes(policy)).second);
  policy.set_top_p(std::nextafter(0.95f, 1.0f));
  EXPECT_TRUE(found.insert(CanonicalBytes(policy)).second);
  policy.mutable_art();
  EXPECT_TRUE(found.insert(CanonicalBytes(policy)).second);
  policy.set_patience(4);
  EXPECT_TRUE(found.insert(CanonicalBytes(policy)).second);
  policy.mutable_art()->set_probe("raw");
  EXPECT_TRUE(found.insert(CanonicalBytes(policy)).second);
  policy.mutable_art()->set_unread_mass(0.1f);
  EXPECT_TRUE(found.insert(CanonicalBytes(policy)).second);
  policy.mutable_art()->set_unread_mass(std::nextafter(0.1f, 1.0f));
  EXPECT_TRUE(found.insert(CanonicalBytes(policy)).second);
}

TEST(PolicyTableTest, InfiniteHipNeedsItsWindow) {
  v1::SparsityPolicy policy = Policy("p");
  policy.mutable_decode()->mutable_infinitehip();
  absl::StatusOr<PolicyTable> table = PolicyTable::Create({policy});
  ASSERT_TRUE(table.ok()) << table.status();
  v1::PolicyChoice choice;
  choice.mutable_decode_overrides()->set_window_tokens(511);
  ExpectInvalid(table->Resolve(choice).status(), "infinitehip needs a window of at least 512");
  policy.mutable_decode()->mutable_infinitehip()->set_preset("5k");
  EXPECT_TRUE(PolicyTable::Create({policy})->Resolve(choice).ok());
  policy.mutable_decode()->set_window_tokens(127);
  ExpectInvalid(PolicyTable::Create({policy}).status(), "decode.window_tokens is 127");
}

TEST(PolicyTableTest, SelectorsWithABudgetNeedOne) {
  for (const std::string name : {"quest", "tokenselect", "hip", "infinitehip"}) {
    v1::SparsityPolicy policy = Policy("p");
    v1::SetSelector(name, *policy.mutable_decode());
    policy.mutable_decode()->clear_token_budget();
    ExpectInvalid(PolicyTable::Create({policy}).status(), name + " needs the tokens");
  }
}

TEST(CanonicalBytesTest, NumbersThatItReadsDo) {
  v1::AttentionPolicy a;
  a.mutable_quest();
  a.set_token_budget(100);
  v1::AttentionPolicy b = a;
  b.set_token_budget(128);  // the same number of whole pages
  EXPECT_EQ(CanonicalBytes(a), CanonicalBytes(b));
  b.set_token_budget(129);
  EXPECT_NE(CanonicalBytes(a), CanonicalBytes(b));
  for (auto set : {&v1::AttentionPolicy::set_sink_tokens, &v1::AttentionPolicy::set_window_tokens,
                   &v1::AttentionPolicy::set_dense_layers}) {
    b = a;
    (b.*set)(9);
    EXPECT_NE(CanonicalBytes(a), CanonicalBytes(b));
  }
  b = a;
  b.mutable_streaming();
  EXPECT_NE(CanonicalBytes(a), CanonicalBytes(b));
}

TEST(PrivateBeginTest, IsWhereAttentionStopsBeingThePrefills) {
  ResolvedPolicy policy;
  policy.prefill.mutable_all();
  policy.decode.mutable_all();
  policy.tail_tokens = 64;
  EXPECT_EQ(PrivateBegin(policy, 1000), std::numeric_limits<int64_t>::max());
  policy.decode.mutable_quest();
  EXPECT_EQ(PrivateBegin(policy, 1000), 936);
  EXPECT_EQ(PrivateBegin(policy, 10), 0);
  policy.prefill.mutable_quest();
  policy.decode.mutable_all();
  EXPECT_EQ(PrivateBegin(policy, 1000), 1000);
}

}  // namespace
}  // namespace kvasir::coordinator
