#include "coordinator/server_info.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "coordinator/cli/status_command.h"

namespace kvasir::coordinator {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// Two ranks of 1,000 and 500 blocks of 2 MB.
GroupInfo TwoRanks() {
  GroupInfo group;
  group.addresses = {"host-a:50061", "host-b:50061"};
  for (const uint64_t blocks : {1000u, 500u}) {
    v1::Ready& rank = group.ranks.emplace_back();
    rank.set_device_blocks(blocks / 10);
    rank.set_host_blocks(blocks);
    rank.set_block_bytes(2'000'000);
    rank.set_device_name("paper");
    rank.set_metrics_address("host:9401");
  }
  return group;
}

TEST(ServerInfoTest, TiersAreSummedOverTheRanksInBytes) {
  EngineStatus engine = {.group = TwoRanks()};
  engine.tiers.set_device_pages_total(150 * 8);
  engine.tiers.set_device_pages_used(30 * 8);
  engine.tiers.set_host_blocks_total(1500);
  engine.tiers.set_host_blocks_used(1200);
  const v1::GetServerInfoResponse info = ServerInfo({}, engine, {}, absl::Minutes(3));
  EXPECT_EQ(info.state(), v1::SERVER_STATE_SERVING);
  EXPECT_EQ(info.uptime().seconds(), 180);
  ASSERT_EQ(info.tiers_size(), 2);
  EXPECT_EQ(info.tiers(0).tier(), v1::TIER_DEVICE);
  EXPECT_EQ(info.tiers(0).total_bytes(), 300'000'000u);
  EXPECT_EQ(info.tiers(0).used_bytes(), 60'000'000u);
  EXPECT_EQ(info.tiers(1).tier(), v1::TIER_HOST);
  EXPECT_EQ(info.tiers(1).total_bytes(), 3'000'000'000u);
  EXPECT_EQ(info.tiers(1).used_bytes(), 2'400'000'000u);
  EXPECT_EQ(info.kv_token_bytes(), 2u * 2'000'000 / 64);
  EXPECT_EQ(info.tiers(0).used_blocks(), 30u * 8);
  EXPECT_EQ(info.tiers(1).total_blocks(), 1500u);
  ASSERT_EQ(info.workers_size(), 2);
  EXPECT_EQ(info.workers(1).rank(), 1u);
  EXPECT_EQ(info.workers(1).address(), "host-b:50061");
}

TEST(ServerInfoTest, BeforeTheFirstStepTiersAreEmptyAndOfTheirSize) {
  const v1::GetServerInfoResponse info = ServerInfo({}, {.group = TwoRanks()}, {}, {});
  EXPECT_EQ(info.tiers(1).total_bytes(), 3'000'000'000u);
  EXPECT_EQ(info.tiers(1).used_bytes(), 0u);
}

TEST(ServerInfoTest, AServerThatDrainsSaysSoWhateverItsGroupDoes) {
  EngineStatus engine = {.serving = absl::UnavailableError("draining"), .draining = true};
  EXPECT_EQ(ServerInfo({}, engine, {}, {}).state(), v1::SERVER_STATE_DRAINING);
  engine.group = TwoRanks();
  EXPECT_EQ(ServerInfo({}, engine, {}, {}).state(), v1::SERVER_STATE_DRAINING);
}

TEST(StatusTableTest, ShowsWorkersTiersRequestsAndHitRates) {
  EngineStatus engine = {.group = TwoRanks()};
  engine.scheduler.running = 3;
  engine.tiers.set_host_blocks_total(1500);
  engine.tiers.set_host_blocks_used(1200);
  const MetricsTotals totals = {.requests_finished = 1234,
                                .prompt_tokens = 1000,
                                .cached_host_tokens = 250,
                                .prefix_queries = 2000,
                                .prefix_hits = 500};
  const v1::GetServerInfoResponse info = ServerInfo({}, engine, totals, absl::Minutes(61));
  v1::GetModelInfoResponse model;
  model.set_max_context_length(8192);
  const std::string table = StatusTable(info, &model);
  for (const char* part : {"serving", "up 1h1m", "8,192 tokens", "3 running", "1,234 finished",
                           "500 of 2,000 prompt tokens found (25.0%)", "2.400 GB", "3.000 GB",
                           "80.0%", "25.0%", "host-b:50061"}) {
    EXPECT_THAT(table, HasSubstr(part));
  }
}

TEST(StatusTableTest, ListsRequestsWithoutTheControlCharactersOfTheirIds) {
  v1::GetServerInfoResponse info = ServerInfo({}, {.group = TwoRanks()}, {}, {});
  info.set_requests_running(3);
  v1::RequestInfo& request = *info.add_requests();
  request.set_request_id("id\x1b[2J");
  request.set_state(v1::REQUEST_STATE_READING);
  request.set_policy("long-answers");
  request.set_prompt_tokens(130000);
  request.set_processed_tokens(65000);
  request.set_tokens_per_second(1234.56);
  request.mutable_eta()->set_seconds(52);
  request.set_blocks_total(200);
  request.set_blocks_skipped(150);
  request.set_estimated_mass(0.875f);
  const std::string table = StatusTable(info, nullptr);
  for (const char* part : {"reading", "long-answers", "65,000/130,000", "1234.6", "52.0 s", "75.0%",
                           "~0.875", "id%1B[2J", "and 2 more"}) {
    EXPECT_THAT(table, HasSubstr(part));
  }
  EXPECT_THAT(table, Not(HasSubstr("\x1b")));
}

TEST(StatusTableTest, WithoutAGroupThereIsTheReasonAndNoTable) {
  const EngineStatus engine = {.serving = absl::UnavailableError("worker 1 is not there")};
  const std::string table = StatusTable(ServerInfo({}, engine, {}, {}), nullptr);
  EXPECT_THAT(table, HasSubstr("starting: worker 1 is not there"));
  EXPECT_THAT(table, Not(HasSubstr("rank")));
}

}  // namespace
}  // namespace kvasir::coordinator
