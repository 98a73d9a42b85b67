#include "worker/checkpoint/shard_plan.h"

#include <cstdlib>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <set>
#include <utility>

namespace kvasir::worker {
namespace {

using ::testing::HasSubstr;

ModelConfig ConfigOf(int64_t heads, int64_t kv_heads, int64_t intermediate, int64_t vocab) {
  ModelConfig config;
  config.num_heads = heads;
  config.num_kv_heads = kv_heads;
  config.intermediate_size = intermediate;
  config.vocab_size = vocab;
  return config;
}

std::string Refusal(const ModelConfig& config, int64_t rank, int64_t num_ranks) {
  const auto plan = ShardPlan::Make(config, rank, num_ranks);
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(plan.status().message());
}

// Every split of many shapes: parts tile the model, and each query head lies with its KV head.
TEST(ShardPlan, PartsCoverTheModelOnce) {
  int num_plans = 0;
  for (const int64_t kv_heads : {1, 2, 3, 4, 8}) {
    for (const int64_t group : {1, 2, 4, 6}) {
      const ModelConfig config = ConfigOf(kv_heads * group, kv_heads, 192, 1001);
      for (int64_t num_ranks = 1; num_ranks <= 32; ++num_ranks) {
        if (!ShardPlan::Make(config, 0, num_ranks).ok()) continue;
        ++num_plans;
        int64_t next_query = 0, next_column = 0, next_token = 0;
        std::vector<int64_t> copies(static_cast<size_t>(kv_heads));
        for (int64_t rank = 0; rank < num_ranks; ++rank) {
          const ShardPlan plan = ShardPlan::Make(config, rank, num_ranks).value();
          EXPECT_EQ(plan.query_heads.begin, next_query);
          EXPECT_EQ(plan.intermediate.begin, next_column);
          EXPECT_EQ(plan.vocab.begin, next_token);
          EXPECT_EQ(plan.vocab.begin, rank * plan.vocab_rows_per_rank);
          EXPECT_GT(plan.vocab.size(), 0);
          next_query = plan.query_heads.end;
          next_column = plan.intermediate.end;
          next_token = plan.vocab.end;
          std::set<int64_t> needed;
          for (int64_t q = plan.query_heads.begin; q < plan.query_heads.end; ++q) {
            needed.insert(q / group);
          }
          std::set<int64_t> held;
          for (int64_t h = plan.kv_heads.begin; h < plan.kv_heads.end; ++h) {
            held.insert(h);
            ++copies[static_cast<size_t>(h)];
          }
          EXPECT_EQ(held, needed) << kv_heads << " " << group << " " << rank << "/" << num_ranks;
        }
        EXPECT_EQ(next_query, config.num_heads);
        EXPECT_EQ(next_column, config.intermediate_size);
        EXPECT_EQ(next_token, config.vocab_size);
        const int64_t replicas = ShardPlan::Make(config, 0, num_ranks)->kv_replicas;
        for (const int64_t n : copies) EXPECT_EQ(n, replicas);
      }
    }
  }
  EXPECT_GT(num_plans, 50);
}

TEST(ShardPlan, MoreRanksThanKvHeadsReplicateThem) {
  const ModelConfig config = ConfigOf(8, 2, 16, 100);
  const ShardPlan plan = ShardPlan::Make(config, 2, 4).value();
  EXPECT_EQ(plan.kv_replicas, 2);
  EXPECT_EQ(plan.kv_heads.begin, 1);
  EXPECT_EQ(plan.kv_heads.end, 2);
  EXPECT_EQ(plan.query_heads.begin, 4);
  EXPECT_EQ(plan.query_heads.end, 6);
}

// 8,960 columns are 140 times 64, 190 are 95 times 2.
TEST(ShardPlan, ColumnsThatRanksDoNotDivideAreSharedUnevenly) {
  for (const auto& [columns, unit] : {std::pair<int64_t, int64_t>{8960, 64}, {190, 2}, {7, 1}}) {
    const ModelConfig config = ConfigOf(6, 3, columns, 1000);
    int64_t next = 0;
    for (int64_t rank = 0; rank < 3; ++rank) {
      const IndexRange part = ShardPlan::Make(config, rank, 3).value().intermediate;
      EXPECT_EQ(part.begin, next);
      EXPECT_EQ(part.begin % unit, 0);
      EXPECT_LE(std::abs(part.size() - columns / 3), unit);
      next = part.end;
    }
    EXPECT_EQ(next, columns);
  }
}

TEST(ShardPlan, APlanThatDoesNotDivideIsRefusedWithTheNumbers) {
  EXPECT_THAT(Refusal(ConfigOf(32, 8, 192, 1000), 0, 3),
              HasSubstr("cannot be split over 3 ranks: it has 8 KV heads"));
  EXPECT_THAT(Refusal(ConfigOf(32, 8, 192, 1000), 0, 12),
              HasSubstr("over 12 ranks: more than its 8 KV heads, so expected a multiple of 8"));
  EXPECT_THAT(Refusal(ConfigOf(6, 2, 192, 1000), 0, 4),
              HasSubstr("each KV head would lie on 2 ranks, but its query heads are 3"));
  EXPECT_THAT(Refusal(ConfigOf(32, 8, 3, 1000), 0, 4), HasSubstr("intermediate_size is 3"));
  EXPECT_THAT(Refusal(ConfigOf(32, 8, 192, 5), 0, 4),
              HasSubstr("with 2 of its 5 tokens each, the last rank has none"));
  EXPECT_THAT(Refusal(ConfigOf(32, 8, 192, 1000), 4, 4), HasSubstr("rank 4 of 4 ranks"));
  EXPECT_THAT(Refusal(ConfigOf(32, 8, 192, 1000), -1, 4), HasSubstr("rank -1 of 4 ranks"));
  EXPECT_THAT(Refusal(ConfigOf(32, 8, 192, 1000), 0, 0), HasSubstr("rank 0 of 0 ranks"));
}

}  // namespace
}  // namespace kvasir::worker
