// Parts of a policy besides its selector: pruning, reuse, terminators and budgets of layers.
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "coordinator/policy/policy.h"
#include "proto/selector_field.h"
#include "tests/coordinator/test_policy.h"

namespace kvasir::coordinator {
namespace {

TEST(PolicyTableTest, PruningIsDeclaredForDecodingAndOverriddenByRequests) {
  v1::SparsityPolicy policy = Policy("p");
  v1::PolicyChoice choice;
  choice.mutable_decode_overrides()->set_top_p(0.5f);
  ExpectInvalid(PolicyTable::Create({policy})->Resolve(choice).status(), "declares no pruning");
  policy.mutable_decode()->set_top_p(0.9f);
  absl::StatusOr<PolicyTable> table = PolicyTable::Create({policy});
  ASSERT_TRUE(table.ok()) << table.status();
  EXPECT_EQ(table->Resolve({})->decode.top_p(), 0.9f);
  EXPECT_EQ(table->Resolve(choice)->decode.top_p(), 0.5f);
  policy.mutable_prefill()->mutable_quest();
  policy.mutable_prefill()->set_top_p(0.9f);
  ExpectInvalid(PolicyTable::Create({policy}).status(), "only decoding is pruned");
  policy = Policy("p");
  policy.mutable_decode()->mutable_streaming();
  policy.mutable_decode()->set_top_p(0.9f);
  ExpectInvalid(PolicyTable::Create({policy}).status(), "only what a selector chose");
}

v1::SparsityPolicy ReusingPolicy(const std::string& rule) {
  v1::SparsityPolicy policy = Policy("p");
  policy.mutable_decode()->mutable_reuse()->set_rule(rule);
  return policy;
}

TEST(PolicyTableTest, ReuseIsDeclaredForDecodingAndItsNumbersOverriddenByRequests) {
  v1::PolicyChoice choice;
  v1::ReusePolicy& overrides = *choice.mutable_decode_overrides()->mutable_reuse();
  overrides.set_interval(4);
  ExpectInvalid(PolicyTable::Create({Policy("p")})->Resolve(choice).status(), "declares no reuse");
  absl::StatusOr<PolicyTable> table = PolicyTable::Create({ReusingPolicy("both")});
  ASSERT_TRUE(table.ok()) << table.status();
  v1::ReusePolicy reuse = table->Resolve({})->decode.reuse();
  EXPECT_EQ(reuse.rule(), "both");
  EXPECT_EQ(reuse.interval(), 8u);
  EXPECT_EQ(reuse.theta(), 0.9f);
  EXPECT_EQ(reuse.theta_force(), 0.5f);
  EXPECT_EQ(reuse.max_age(), 64u);
  overrides.set_theta(0.8f);
  reuse = table->Resolve(choice)->decode.reuse();
  EXPECT_EQ(reuse.rule(), "both");
  EXPECT_EQ(reuse.interval(), 4u);
  EXPECT_EQ(reuse.theta(), 0.8f);
  EXPECT_EQ(reuse.theta_force(), 0.5f);
  overrides.set_rule("cosine");
  ExpectInvalid(table->Resolve(choice).status(), "decode_overrides.reuse sets a rule");
}

TEST(PolicyTableTest, ReuseThatCannotBeIsRefused) {
  ExpectInvalid(PolicyTable::Create({ReusingPolicy("often")}).status(),
                "decode.reuse.rule is 'often'; the rules are interval, cosine, both");
  v1::SparsityPolicy policy = Policy("p");
  policy.mutable_decode()->mutable_reuse()->set_interval(4);
  ExpectInvalid(PolicyTable::Create({policy}).status(), "numbers and no rule");
  policy = ReusingPolicy("interval");
  policy.mutable_decode()->mutable_streaming();
  ExpectInvalid(PolicyTable::Create({policy}).status(), "only what a selector chose");
  policy = Policy("p");
  policy.mutable_prefill()->mutable_quest();
  policy.mutable_prefill()->mutable_reuse()->set_rule("interval");
  ExpectInvalid(PolicyTable::Create({policy}).status(), "only decoding reuses");
}

TEST(PolicyTableTest, ReuseNeedsAWindowThatHoldsWhatLeavesIt) {
  v1::SparsityPolicy policy = ReusingPolicy("interval");
  policy.mutable_decode()->set_window_tokens(7);
  ExpectInvalid(PolicyTable::Create({policy}).status(), "a selection that serves 8 steps");
  policy.mutable_decode()->mutable_reuse()->set_interval(7);
  EXPECT_TRUE(PolicyTable::Create({policy}).ok());
  policy.mutable_decode()->mutable_reuse()->set_rule("both");
  ExpectInvalid(PolicyTable::Create({policy}).status(), "serves 28 steps");
  policy.mutable_decode()->mutable_reuse()->set_interval(60);
  ExpectInvalid(PolicyTable::Create({policy}).status(), "serves 64 steps");
  policy.mutable_decode()->mutable_reuse()->set_rule("cosine");
  EXPECT_TRUE(PolicyTable::Create({policy}).ok());
}

TEST(CanonicalBytesTest, ReuseCountsByTheNumbersThatItsRuleReads) {
  const auto bytes = [](const std::string& rule, uint32_t interval, float theta, float force,
                        uint32_t max_age) {
    v1::AttentionPolicy policy = MakeNumbers();
    policy.mutable_hip();
    v1::ReusePolicy& reuse = *policy.mutable_reuse();
    reuse.set_rule(rule);
    reuse.set_interval(interval);
    reuse.set_theta(theta);
    reuse.set_theta_force(force);
    reuse.set_max_age(max_age);
    return CanonicalBytes(policy);
  };
  EXPECT_EQ(bytes("interval", 8, 0.9f, 0.5f, 64), bytes("interval", 8, 0.8f, 0.4f, 32));
  EXPECT_EQ(bytes("cosine", 8, 0.9f, 0.5f, 64), bytes("cosine", 4, 0.9f, 0.4f, 64));
  EXPECT_EQ(bytes("both", 8, 0.9f, 0.5f, 64), bytes("both", 8, 0.9f, 0.5f, 32));
  std::set<std::string> found;
  for (const std::string& some :
       {bytes("", 8, 0.9f, 0.5f, 64), bytes("interval", 8, 0.9f, 0.5f, 64),
        bytes("interval", 9, 0.9f, 0.5f, 64), bytes("cosine", 8, 0.9f, 0.5f, 64),
        bytes("cosine", 8, 0.8f, 0.5f, 64), bytes("cosine", 8, 0.9f, 0.5f, 63),
        bytes("both", 8, 0.9f, 0.5f, 64), bytes("both", 9, 0.9f, 0.5f, 64),
        bytes("both", 8, 0.8f, 0.5f, 64), bytes("both", 8, 0.9f, 0.4f, 64)}) {
    EXPECT_TRUE(found.insert(some).second) << some;
  }
}

TEST(PolicyTableTest, TerminatorsAreDeclaredForDecodingAndTheirPatienceOverriddenByRequests) {
  v1::SparsityPolicy policy = Policy("p");
  v1::PolicyChoice choice;
  choice.mutable_decode_overrides()->set_patience(9);
  ExpectInvalid(PolicyTable::Create({policy})->Resolve(choice).status(), "declares no terminator");
  policy.mutable_decode()->mutable_art();
  absl::StatusOr<PolicyTable> table = PolicyTable::Create({policy});
  ASSERT_TRUE(table.ok()) << table.status();
  EXPECT_EQ(table->Resolve({})->decode.patience(), 5u);
  EXPECT_EQ(table->Resolve(choice)->decode.patience(), 9u);
  choice.mutable_decode_overrides()->mutable_art();
  ExpectInvalid(table->Resolve(choice).status(), "sets a terminator; a request may override");
  choice.mutable_decode_overrides()->clear_art();
  choice.mutable_decode_overrides()->mutable_hip();
  ExpectInvalid(table->Resolve(choice).status(), "sets a selector; a request may override");
  policy.mutable_prefill()->mutable_art();
  ExpectInvalid(PolicyTable::Create({policy}).status(), "prefill.art is set; only decoding");
  policy = Policy("p");
  policy.mutable_decode()->set_patience(3);
  ExpectInvalid(PolicyTable::Create({policy}).status(), "decode.patience is set");
}

TEST(PolicyTableTest, TerminatorsNeedSomethingToEndAmong) {
  v1::SparsityPolicy policy = Policy("p");
  policy.mutable_decode()->mutable_streaming();
  policy.mutable_decode()->mutable_art();
  ExpectInvalid(PolicyTable::Create({policy}).status(), "streaming leaves nothing");
  policy.mutable_decode()->mutable_all();
  EXPECT_TRUE(PolicyTable::Create({policy}).ok());
  policy.mutable_decode()->mutable_art()->set_order("importance");
  ExpectInvalid(PolicyTable::Create({policy}).status(), "all gives no scores");
  policy.mutable_decode()->mutable_quest();
  EXPECT_TRUE(PolicyTable::Create({policy}).ok());
  policy.mutable_decode()->mutable_art()->set_unread_mass(1.5f);
  ExpectInvalid(PolicyTable::Create({policy}).status(), "decode.art.unread_mass is 1.5");
  policy.mutable_decode()->mutable_all();
  policy.mutable_decode()->mutable_art()->Clear();
  policy.mutable_decode()->mutable_reuse()->set_rule("interval");
  ExpectInvalid(PolicyTable::Create({policy}).status(), "only what a selector chose");
  policy.mutable_decode()->clear_reuse();
  policy.mutable_decode()->mutable_quest();
  policy.mutable_decode()->mutable_quality()->set_min_mass(0.9f);
  ExpectInvalid(PolicyTable::Create({policy}).status(), "min_mass");
  policy.mutable_decode()->clear_quality();
  policy.mutable_decode()->mutable_all();
  policy.mutable_decode()->clear_window_tokens();
  ExpectInvalid(PolicyTable::Create({policy}).status(), "art needs a window");
}

TEST(PolicyTableTest, AllThatMayEndEarlyIsSparse) {
  v1::SparsityPolicy policy = Policy("p");
  policy.mutable_decode()->mutable_all();
  EXPECT_EQ(PolicyTable::Create({policy})->Resolve({})->tail_tokens, 0u);
  policy.mutable_decode()->mutable_art();
  const absl::StatusOr<ResolvedPolicy> resolved = PolicyTable::Create({policy})->Resolve({});
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  EXPECT_EQ(resolved->tail_tokens, 64u);
  EXPECT_EQ(PrivateBegin(*resolved, 1000), 936);
  EXPECT_NE(CanonicalBytes(resolved->decode), CanonicalBytes(resolved->prefill));
}

TEST(PolicyFromFlagsTest, TerminatesDecodingOnly) {
  v1::SparseConfig config;
  config.set_sparse_selector("quest");
  config.set_sparse_prefill_selector("quest");
  config.set_sparse_terminate("none");
  config.set_sparse_patience(7);
  EXPECT_EQ(PolicyFromFlags(config).decode().patience(), 0u);
  config.set_sparse_terminate("art");
  const v1::SparsityPolicy policy = PolicyFromFlags(config);
  EXPECT_TRUE(policy.decode().has_art());
  EXPECT_EQ(policy.decode().patience(), 7u);
  EXPECT_FALSE(policy.prefill().has_art());
}

v1::LayerBudget Layers(uint32_t first, uint32_t last, uint32_t budget) {
  v1::LayerBudget layers;
  layers.set_first_layer(first);
  layers.set_last_layer(last);
  layers.set_token_budget(budget);
  return layers;
}

TEST(LayerBudgetsTest, ARequestsReplaceThoseOfThePolicy) {
  v1::SparsityPolicy policy = Policy("p");
  *policy.mutable_decode()->add_layer_budgets() = Layers(0, 1, 4096);
  *policy.mutable_decode()->add_layer_budgets() = Layers(2, 2, 1024);
  const absl::StatusOr<PolicyTable> table = PolicyTable::Create({policy});
  ASSERT_TRUE(table.ok()) << table.status();
  EXPECT_EQ(table->Resolve({})->decode.layer_budgets_size(), 2);
  v1::PolicyChoice choice;
  *choice.mutable_decode_overrides()->add_layer_budgets() = Layers(3, 1023, 512);
  const absl::StatusOr<ResolvedPolicy> resolved = table->Resolve(choice);
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  ASSERT_EQ(resolved->decode.layer_budgets_size(), 1);
  EXPECT_EQ(resolved->decode.layer_budgets(0).first_layer(), 3u);
}

TEST(LayerBudgetsTest, AreOfLayersInOrderAndOfSelectorsWithABudget) {
  const auto check = [](const std::string& selector, std::vector<v1::LayerBudget> budgets) {
    v1::SparsityPolicy policy = Policy("p");
    v1::SetSelector(selector, *policy.mutable_decode());
    for (const v1::LayerBudget& layers : budgets) {
      *policy.mutable_decode()->add_layer_budgets() = layers;
    }
    return PolicyTable::Create({policy}).status();
  };
  EXPECT_TRUE(check("quest", {Layers(0, 0, 1), Layers(1, 7, 64)}).ok());
  ExpectInvalid(check("quest", {Layers(0, 3, 64), Layers(3, 7, 64)}),
                "decode.layer_budgets[1] are of layers 3 to 7, where the first may be 4");
  ExpectInvalid(check("quest", {Layers(4, 3, 64)}), "the last is not before it");
  ExpectInvalid(check("streaming", {Layers(0, 0, 64)}), "streaming has no budget");
  ExpectInvalid(check("all", {Layers(0, 0, 64)}), "attends to everything has no budget");
  ExpectInvalid(check("quest", {Layers(0, 0, 0)}), "layer_budgets[0].token_budget");
  ExpectInvalid(check("quest", {Layers(0, 1024, 64)}), "layer_budgets[0].last_layer");
  ExpectInvalid(check("quest", std::vector<v1::LayerBudget>(17)), "layer_budgets");
}

TEST(LayerBudgetsTest, AreCanonicalInBlocks) {
  const auto bytes = [](const std::vector<v1::LayerBudget>& budgets) {
    v1::AttentionPolicy policy = Policy("p").decode();
    for (const v1::LayerBudget& layers : budgets) *policy.add_layer_budgets() = layers;
    return CanonicalBytes(policy);
  };
  const std::string none = bytes({});
  EXPECT_EQ(bytes({Layers(0, 3, 2048)}), none) << "that of all layers";
  EXPECT_EQ(bytes({Layers(0, 3, 100)}), bytes({Layers(0, 3, 128)}));
  const std::set<std::string> all = {none, bytes({Layers(0, 3, 128)}), bytes({Layers(0, 2, 128)}),
                                     bytes({Layers(1, 3, 128)}), bytes({Layers(0, 3, 192)})};
  EXPECT_EQ(all.size(), 5u);
}

TEST(LayerBudgetsTest, TheLargestMustFitTheTrainedWindow) {
  ResolvedPolicy policy = Resolved("quest", "quest");
  ASSERT_TRUE(CheckTrainedWindow(policy, 9000, 8192).ok());
  *policy.decode.add_layer_budgets() = Layers(2, 2, 8192);
  ExpectInvalid(CheckTrainedWindow(policy, 9000, 8192), "selected 8192");
}

}  // namespace
}  // namespace kvasir::coordinator
