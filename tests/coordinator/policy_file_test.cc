#include "coordinator/policy/policy_file.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::coordinator {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

TEST(PolicyFileTest, ReadsAListOfPolicies) {
  absl::StatusOr<std::vector<v1::SparsityPolicy>> policies = ParsePolicies(R"(
- name: quest-small
  decode: {quest: {}, sink_tokens: 64, window_tokens: 256, token_budget: 512}
  tail_tokens: 0
- name: "7"
  prefill:
    streaming: {}
    window_tokens: 1024
)");
  ASSERT_TRUE(policies.ok()) << policies.status();
  ASSERT_THAT(*policies, SizeIs(2));
  EXPECT_EQ((*policies)[0].name(), "quest-small");
  EXPECT_TRUE((*policies)[0].decode().has_quest());
  EXPECT_EQ((*policies)[0].decode().token_budget(), 512u);
  EXPECT_TRUE((*policies)[0].has_tail_tokens());
  EXPECT_EQ((*policies)[1].name(), "7");
  EXPECT_TRUE((*policies)[1].prefill().has_streaming());
}

TEST(PolicyFileTest, LayersMayHaveBudgetsOfTheirOwn) {
  const auto policies = ParsePolicies(R"(
- name: generous-at-first
  decode:
    quest: {}
    token_budget: 512
    layer_budgets:
      - {first_layer: 0, last_layer: 1, token_budget: 4096}
      - {first_layer: 5, last_layer: 5, token_budget: 128}
)");
  ASSERT_TRUE(policies.ok()) << policies.status();
  const v1::AttentionPolicy& decode = policies->front().decode();
  ASSERT_EQ(decode.layer_budgets_size(), 2);
  EXPECT_EQ(decode.layer_budgets(0).last_layer(), 1u);
  EXPECT_EQ(decode.layer_budgets(1).token_budget(), 128u);
}

TEST(PolicyFileTest, AnythingElseIsRefusedWithItsPlace) {
  const std::pair<const char*, const char*> cases[] = {
      {"name: x", "not a list"},
      {"- 5", "line 1: a policy is expected"},
      {"- name: x\n  nonsense: 1", "nonsense"},
      {"- name: x\n  decode: {quest: {}, token_budget: lots}", "line 1"},
      {"- name: x\n  decode: [1, 2]", "line 1"},
      {"- {name: x", "line"},
      {"- &a {decode: {quest: *a}}", ""},
  };
  for (const auto& [yaml, message] : cases) {
    const absl::Status status = ParsePolicies(yaml).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << yaml;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message)) << yaml;
  }
}

TEST(PolicyFileTest, AFolderIsNoFile) {
  const absl::Status status = LoadPolicyFile(::testing::TempDir()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("Is a directory"));
}

TEST(PolicyFileTest, AMissingFileIsNamed) {
  const absl::Status status = LoadPolicyFile("/nonexistent/policies.yaml").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("/nonexistent/policies.yaml"));
}

}  // namespace
}  // namespace kvasir::coordinator
