#include "coordinator/request/running_requests.h"

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

#include "proto/finish_numbers.h"

namespace kvasir::coordinator {
namespace {

using proto::ToSeconds;

class RunningRequestsTest : public ::testing::Test {
 protected:
  std::unique_ptr<RunningRequests::Lease> Acquire(const std::string& id) {
    absl::StatusOr<std::unique_ptr<RunningRequests::Lease>> lease = requests_.Acquire(
        {.id = id, .policy = "sparse", .prompt_tokens = 1000, .max_tokens = 50, .arrived = now_});
    EXPECT_TRUE(lease.ok()) << lease.status();
    return *std::move(lease);
  }
  v1::RequestInfo Only() const {
    const std::vector<v1::RequestInfo> listed = requests_.List(10, now_);
    EXPECT_EQ(listed.size(), 1u);
    return listed.at(0);
  }
  void Pass(absl::Duration time) { now_ = After(now_, time); }

  RunningRequests requests_;
  TimePoint now_ = TimePoint() + std::chrono::hours(1);
};

TEST_F(RunningRequestsTest, AnIdIsTakenUntilItsRequestEnds) {
  std::unique_ptr<RunningRequests::Lease> lease = Acquire("a");
  EXPECT_TRUE(absl::IsAlreadyExists(requests_.Acquire({.id = "a"}).status()));
  lease.reset();
  EXPECT_TRUE(requests_.List(10, now_).empty());
  EXPECT_TRUE(requests_.Acquire({.id = "a"}).ok());
}

TEST_F(RunningRequestsTest, ARequestWaitsUntilItIsAdmitted) {
  const auto lease = Acquire("a");
  Pass(absl::Seconds(3));
  const v1::RequestInfo info = Only();
  EXPECT_EQ(info.state(), v1::REQUEST_STATE_WAITING);
  EXPECT_EQ(info.request_id(), "a");
  EXPECT_EQ(info.policy(), "sparse");
  EXPECT_EQ(ToSeconds(info.age()), 3);
  EXPECT_EQ(info.prompt_tokens(), 1000u);
  EXPECT_EQ(info.max_tokens(), 50u);
  EXPECT_FALSE(info.has_eta());
  EXPECT_FALSE(info.has_measured_mass());
  EXPECT_FALSE(info.has_estimated_mass());
}

TEST_F(RunningRequestsTest, ReadingHasTheRateOfComputedTokensAndTheTimeThatIsLeft) {
  const auto lease = Acquire("a");
  lease->OnProgress(
      {.id = SequenceId(1), .prompt_tokens = 1000, .processed_tokens = 200, .cached_tokens = 200},
      now_);
  EXPECT_EQ(Only().tokens_per_second(), 0);
  EXPECT_FALSE(Only().has_eta());
  Pass(absl::Seconds(2));
  lease->OnProgress({.id = SequenceId(1),
                     .prompt_tokens = 1000,
                     .processed_tokens = 600,
                     .cached_tokens = 200,
                     .eta = absl::Seconds(5)},
                    now_);
  Pass(absl::Seconds(2));
  const v1::RequestInfo info = Only();
  EXPECT_EQ(info.state(), v1::REQUEST_STATE_READING);
  EXPECT_EQ(info.processed_tokens(), 600u);
  EXPECT_EQ(info.cached_tokens(), 200u);
  EXPECT_EQ(info.tokens_per_second(), 100);
  EXPECT_EQ(ToSeconds(info.eta()), 3);
  Pass(absl::Seconds(10));  // later than foreseen
  EXPECT_EQ(ToSeconds(Only().eta()), 0);
}

TEST_F(RunningRequestsTest, AnsweringHasTheRateSinceTheFirstToken) {
  const auto lease = Acquire("a");
  lease->OnProgress({.id = SequenceId(1), .prompt_tokens = 1000, .processed_tokens = 1000}, now_);
  Pass(absl::Seconds(7));
  lease->OnToken({.id = SequenceId(1), .index = 0}, now_);
  EXPECT_EQ(Only().state(), v1::REQUEST_STATE_ANSWERING);
  EXPECT_EQ(Only().answer_tokens(), 1u);
  EXPECT_FALSE(Only().has_eta());
  Pass(absl::Seconds(2));
  lease->OnToken({.id = SequenceId(1), .index = 10}, now_);
  EXPECT_EQ(Only().answer_tokens(), 11u);
  EXPECT_EQ(Only().tokens_per_second(), 5);
  EXPECT_NEAR(ToSeconds(Only().eta()), 39 / 5.0, 1e-6);
}

TEST_F(RunningRequestsTest, OneWhoseGroupWasLostResumesUntilItsNextEvent) {
  const auto lease = Acquire("a");
  lease->OnGroupLost();
  EXPECT_EQ(Only().state(), v1::REQUEST_STATE_RESUMING);
  lease->OnProgress({.id = SequenceId(1), .prompt_tokens = 1000, .processed_tokens = 64}, now_);
  EXPECT_EQ(Only().state(), v1::REQUEST_STATE_READING);
  lease->OnGroupLost();
  EXPECT_EQ(Only().state(), v1::REQUEST_STATE_RESUMING);
  EXPECT_EQ(Only().processed_tokens(), 64u);
  lease->OnToken({.id = SequenceId(1), .index = 0}, now_);
  EXPECT_EQ(Only().state(), v1::REQUEST_STATE_ANSWERING);
}

TEST_F(RunningRequestsTest, MassesAreMeansOfTheSamples) {
  const auto lease = Acquire("a");
  lease->OnToken({.id = SequenceId(1),
                  .index = 0,
                  .attention = {.blocks_total = 100,
                                .blocks_skipped = 60,
                                .measured_samples = 4,
                                .measured_mass = 3,
                                .estimated_samples = 2,
                                .estimated_mass = 1}},
                 now_);
  const v1::RequestInfo info = Only();
  EXPECT_EQ(info.blocks_total(), 100u);
  EXPECT_EQ(info.blocks_skipped(), 60u);
  EXPECT_EQ(info.measured_mass(), 0.75f);
  EXPECT_EQ(info.estimated_mass(), 0.5f);
}

TEST_F(RunningRequestsTest, TheOldestAreListedAndNoMoreThanAskedFor) {
  std::vector<std::unique_ptr<RunningRequests::Lease>> leases;
  for (int i = 0; i < 4; ++i) leases.push_back(Acquire(absl::StrCat("r", i)));
  leases.front().reset();
  const std::vector<v1::RequestInfo> two = requests_.List(2, now_);
  ASSERT_EQ(two.size(), 2u);
  EXPECT_EQ(two[0].request_id(), "r1");
  EXPECT_EQ(two[1].request_id(), "r2");
  EXPECT_TRUE(requests_.List(0, now_).empty());
  EXPECT_EQ(requests_.List(10, now_).size(), 3u);
}

}  // namespace
}  // namespace kvasir::coordinator
