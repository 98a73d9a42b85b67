#include "coordinator/group/step_replies.h"

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

v1::StepReply Reply() {
  v1::StepReply reply;
  reply.set_group_epoch(2);
  reply.set_step(7);
  reply.set_token_hash(99);
  v1::RowResult& row = *reply.add_results();
  row.set_slot(3);
  row.set_token_id(11);
  row.mutable_accounting()->mutable_decode()->set_blocks_total(10);
  row.mutable_accounting()->set_cached_device_tokens(128);
  reply.mutable_tiers()->set_host_blocks_used(4);
  reply.set_step_s(0.25);
  return reply;
}

TEST(MergeRepliesTest, SumsAccountingAndTakesTheLongestDuration) {
  v1::StepReply other = Reply();
  v1::RowAccounting& accounting = *other.mutable_results(0)->mutable_accounting();
  v1::MassSamples& mass = *accounting.mutable_decode()->mutable_measured_mass();
  mass.set_samples(2);
  mass.set_minimum(0.5f);
  accounting.mutable_prefill()->set_page_hits(3);
  accounting.set_attended_tokens(100);
  accounting.set_attending_rows(3);
  accounting.set_cached_device_tokens(64);
  accounting.set_cached_host_tokens(64);
  other.set_step_s(0.5);
  absl::StatusOr<v1::StepReply> merged = MergeReplies({Reply(), other});
  ASSERT_TRUE(merged.ok()) << merged.status();
  const v1::RowAccounting& row = merged->results(0).accounting();
  EXPECT_EQ(row.decode().blocks_total(), 20u);
  EXPECT_EQ(row.prefill().page_hits(), 3u);
  EXPECT_EQ(row.prefill().measured_mass().samples(), 0u);
  EXPECT_EQ(row.decode().measured_mass().samples(), 2u);
  EXPECT_FLOAT_EQ(row.decode().measured_mass().minimum(), 0.5f);  // a rank without samples has none
  EXPECT_EQ(row.attended_tokens(), 100u);
  EXPECT_EQ(row.attending_rows(), 3u);
  EXPECT_EQ(row.cached_device_tokens(), 64u);
  EXPECT_EQ(row.cached_host_tokens(), 64u);
  EXPECT_EQ(merged->results(0).token_id(), 11u);
  EXPECT_EQ(merged->tiers().host_blocks_used(), 8u);
  EXPECT_EQ(merged->step_s(), 0.5);
}

// Ranks that share KV heads with a lower one tell nothing of them.
TEST(MergeRepliesTest, SelectionsAreSummedOverRanksThatTellThem) {
  const auto with = [](std::vector<uint32_t> counts) {
    v1::StepReply reply = Reply();
    v1::SelectionMap& map = *reply.mutable_results(0)->mutable_selections();
    map.mutable_counts()->Add(counts.begin(), counts.end());
    map.set_num_heads(counts.empty() ? 0 : 2);
    return reply;
  };
  const auto merged = MergeReplies({with({1, 0, 2}), with({}), with({2, 0, 1})});
  ASSERT_TRUE(merged.ok()) << merged.status();
  EXPECT_THAT(merged->results(0).selections().counts(), ElementsAre(3, 0, 3));
  EXPECT_EQ(merged->results(0).selections().num_heads(), 4u);
  EXPECT_THAT(MergeReplies({with({}), with({5})})->results(0).selections().counts(),
              ElementsAre(5));
  EXPECT_FALSE(MergeReplies({Reply(), Reply()})->results(0).has_selections());
}

TEST(MergeRepliesTest, AnyDisagreementIsAnError) {
  const std::vector<std::pair<const char*, void (*)(v1::StepReply&)>> cases = {
      {"epoch", [](v1::StepReply& r) { r.set_group_epoch(1); }},
      {"step", [](v1::StepReply& r) { r.set_step(8); }},
      {"token hash", [](v1::StepReply& r) { r.set_token_hash(1); }},
      {"token", [](v1::StepReply& r) { r.mutable_results(0)->set_token_id(12); }},
      {"no token", [](v1::StepReply& r) { r.mutable_results(0)->clear_token_id(); }},
      {"slot", [](v1::StepReply& r) { r.mutable_results(0)->set_slot(4); }},
      {"rows", [](v1::StepReply& r) { r.clear_results(); }},
  };
  for (const auto& [name, corrupt] : cases) {
    SCOPED_TRACE(name);
    v1::StepReply other = Reply();
    corrupt(other);
    const absl::Status status = MergeReplies({Reply(), Reply(), other}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank 2"));
  }
}

TEST(MergeRepliesTest, ARowThatFailedOnAnyRankHasFailed) {
  for (const bool first : {true, false}) {
    std::vector<v1::StepReply> replies = {Reply(), Reply()};
    v1::RowResult& row = *replies[first ? 0 : 1].mutable_results(0);
    row.clear_token_id();
    row.set_error_code(15);
    row.set_error_message("not finite");
    absl::StatusOr<v1::StepReply> merged = MergeReplies(replies);
    ASSERT_TRUE(merged.ok()) << merged.status();
    EXPECT_EQ(merged->results(0).error_code(), 15);
    EXPECT_FALSE(merged->results(0).has_token_id());
  }
}

TEST(MergeRepliesTest, MissingBlocksAreUnited) {
  v1::StepReply first = Reply();
  first.clear_results();
  v1::StepReply second = first;
  first.add_missing_blocks(5);
  second.add_missing_blocks(5);
  second.add_missing_blocks(2);
  absl::StatusOr<v1::StepReply> merged = MergeReplies({first, second});
  ASSERT_TRUE(merged.ok()) << merged.status();
  EXPECT_THAT(merged->missing_blocks(), ElementsAre(2, 5));
}

TEST(MergeRepliesTest, MissingBlocksWithResultsAreAnError) {
  v1::StepReply reply = Reply();
  reply.add_missing_blocks(5);
  EXPECT_EQ(MergeReplies({reply, Reply()}).status().code(), absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace kvasir::coordinator
