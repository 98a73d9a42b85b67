#include "coordinator/policy/quality_policy.h"

#include <cmath>
#include <limits>
#include <set>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "coordinator/policy/policy.h"
#include "proto/selector_field.h"

namespace kvasir::coordinator {
namespace {

using ::testing::HasSubstr;

v1::SparsityPolicy Policy(const std::string& selector, const std::string& on_violation,
                          uint32_t max_budget_tokens = 0) {
  v1::SparsityPolicy policy;
  policy.set_name("p");
  v1::AttentionPolicy& decode = *policy.mutable_decode();
  v1::SetSelector(selector, decode);
  decode.set_sink_tokens(128);
  decode.set_window_tokens(512);
  decode.set_token_budget(2048);
  decode.mutable_quality()->set_min_mass(0.9f);
  decode.mutable_quality()->set_on_violation(on_violation);
  decode.mutable_quality()->set_max_budget_tokens(max_budget_tokens);
  return policy;
}

absl::StatusOr<v1::QualityPolicy> Resolve(const v1::SparsityPolicy& policy,
                                          const v1::QualityPolicy& wish) {
  v1::PolicyChoice choice;
  *choice.mutable_decode_overrides()->mutable_quality() = wish;
  const absl::StatusOr<PolicyTable> table = PolicyTable::Create({policy});
  if (!table.ok()) return table.status();
  const absl::StatusOr<ResolvedPolicy> resolved = table->Resolve(choice);
  if (!resolved.ok()) return resolved.status();
  return resolved->decode.quality();
}

void ExpectInvalid(const absl::Status& status, absl::string_view message) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr(std::string(message)));
}

TEST(QualityPolicyTest, ARequestOverridesTheWish) {
  const v1::SparsityPolicy policy = Policy("quest", "widen", 8192);
  v1::QualityPolicy wish;
  EXPECT_EQ(Resolve(policy, wish)->on_violation(), "widen");
  wish.set_min_mass(0.98f);
  EXPECT_EQ(Resolve(policy, wish)->min_mass(), 0.98f);
  EXPECT_EQ(Resolve(policy, wish)->max_budget_tokens(), 8192u);
  wish.set_on_violation("dense");  // this action has no budget to limit
  EXPECT_EQ(Resolve(policy, wish)->on_violation(), "dense");
  EXPECT_EQ(Resolve(policy, wish)->max_budget_tokens(), 0u);
}

TEST(QualityPolicyTest, KeepingThePromiseIsTheDefault) {
  EXPECT_EQ(Resolve(Policy("quest", ""), {})->on_violation(), "dense");
}

TEST(QualityPolicyTest, WishesThatCannotBeAreRefused) {
  ExpectInvalid(Resolve(Policy("quest", "often"), {}).status(),
                "decode.quality.on_violation is 'often'; there are dense, widen, report");
  ExpectInvalid(Resolve(Policy("all", "dense"), {}).status(), "keeps it all");
  ExpectInvalid(Resolve(Policy("streaming", "widen"), {}).status(), "streaming has no budget");
  ExpectInvalid(Resolve(Policy("quest", "report", 4096), {}).status(), "only widen changes");
  ExpectInvalid(Resolve(Policy("quest", "widen", 2047), {}).status(),
                "less than the token_budget of 2048");
  v1::SparsityPolicy policy = Policy("quest", "dense");
  policy.mutable_decode()->mutable_quality()->clear_min_mass();
  ExpectInvalid(Resolve(policy, {}).status(), "quality has no min_mass");
  policy.mutable_decode()->mutable_quality()->set_min_mass(1.5f);
  ExpectInvalid(Resolve(policy, {}).status(), "must be in [0, 1]");
  policy = Policy("quest", "dense");
  *policy.mutable_prefill() = policy.decode();
  ExpectInvalid(Resolve(policy, {}).status(), "prefill.quality is set");
}

TEST(QualityPolicyTest, AWishNeedsAPolicyThatDeclaresOne) {
  v1::SparsityPolicy policy = Policy("quest", "");
  policy.mutable_decode()->clear_quality();
  v1::QualityPolicy wish;
  wish.set_min_mass(0.9f);
  ExpectInvalid(Resolve(policy, wish).status(),
                "policy.decode_overrides sets quality, but the policy declares no min_mass");
  EXPECT_TRUE(Resolve(policy, {}).ok());
}

TEST(QualityPolicyTest, TheFlagsDescribeIt) {
  v1::SparseConfig config;
  config.set_sparse_selector("quest");
  config.set_sparse_on_violation("dense");
  EXPECT_FALSE(PolicyFromFlags(config).decode().has_quality());
  config.set_sparse_min_mass(0.75);
  config.set_sparse_on_violation("widen");
  config.set_sparse_max_budget_tokens(4096);
  const v1::QualityPolicy quality = PolicyFromFlags(config).decode().quality();
  EXPECT_EQ(quality.min_mass(), 0.75f);
  EXPECT_EQ(quality.on_violation(), "widen");
  EXPECT_EQ(quality.max_budget_tokens(), 4096u);
}

TEST(QualityPolicyTest, BeyondTheTrainedWindowNothingTurnsDense) {
  const auto check = [](const std::string& action, int64_t tokens, int64_t trained_window) {
    const v1::SparsityPolicy policy = Policy("quest", action);
    return CheckTrainedWindow({.prefill = policy.decode(), .decode = policy.decode()}, tokens,
                              trained_window);
  };
  ExpectInvalid(check("dense", 10000, 8192),
                "dense attention is what fails there; set policy.decode_overrides.quality");
  EXPECT_EQ(check("dense", 8192, 8192), absl::OkStatus());
  EXPECT_EQ(check("dense", 10000, 0), absl::OkStatus());
  EXPECT_EQ(check("widen", 10000, 8192), absl::OkStatus());
  EXPECT_EQ(check("report", 10000, 8192), absl::OkStatus());
}

TEST(QualityPolicyTest, WideningEndsWithTheTrainedWindow) {
  const auto limit = [](v1::AttentionPolicy policy, int64_t trained_window) {
    LimitWidening(trained_window, policy);
    return policy.quality().max_budget_tokens();
  };
  EXPECT_EQ(limit(Policy("quest", "widen").decode(), 0), 0u);
  // 8192 - 128 - 512 = 7552 = 118 pages.
  EXPECT_EQ(limit(Policy("quest", "widen").decode(), 8192), 7552u);
  EXPECT_EQ(limit(Policy("quest", "widen").decode(), 8191), 7488u);
  EXPECT_EQ(limit(Policy("quest", "widen", 4096).decode(), 8192), 4096u);
  EXPECT_EQ(limit(Policy("quest", "dense").decode(), 8192), 0u);
  v1::SparsityPolicy growing = Policy("tokenselect", "widen");
  growing.mutable_decode()->mutable_reuse()->set_rule("cosine");
  EXPECT_EQ(limit(growing.decode(), 8192), 7552u - 63u);
}

TEST(CanonicalBytesTest, AContractCountsWhereItChangesAttention) {
  std::set<std::string> all;
  for (const std::string selector : {"quest", "streaming"}) {
    v1::AttentionPolicy policy = Policy(selector, "report").decode();
    const std::string reported = CanonicalBytes(policy);
    policy.clear_quality();
    EXPECT_EQ(CanonicalBytes(policy), reported);
    all.insert(reported);
    policy = Policy(selector, "dense").decode();
    all.insert(CanonicalBytes(policy));
    policy.mutable_quality()->set_min_mass(
        std::nextafter(policy.quality().min_mass(), std::numeric_limits<float>::infinity()));
    all.insert(CanonicalBytes(policy));
  }
  all.insert(CanonicalBytes(Policy("quest", "widen").decode()));
  all.insert(CanonicalBytes(Policy("quest", "widen", 4096).decode()));
  EXPECT_EQ(all.size(), 8u);
}

}  // namespace
}  // namespace kvasir::coordinator
