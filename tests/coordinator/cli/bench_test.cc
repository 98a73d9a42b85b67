// The figures that `kvasir bench` computes from times. tests/e2e runs the load itself.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "coordinator/cli/bench_command.h"
#include "coordinator/cli/bench_interference.h"
#include "coordinator/cli/bench_prompts.h"
#include "coordinator/cli/calls/load_client.h"

namespace kvasir::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<absl::Duration> Milliseconds(const std::vector<int>& values) {
  std::vector<absl::Duration> durations;
  for (const int value : values) durations.push_back(absl::Milliseconds(value));
  return durations;
}

TEST(PercentileTest, IsTheSmallestValueThatTheShareDoesNotExceed) {
  const std::vector<absl::Duration> values = Milliseconds({30, 10, 20, 40});
  EXPECT_EQ(Percentile(values, 0.5), absl::Milliseconds(20));
  EXPECT_EQ(Percentile(values, 0.51), absl::Milliseconds(30));
  EXPECT_EQ(Percentile(values, 0.99), absl::Milliseconds(40));
  EXPECT_EQ(Percentile(values, 1), absl::Milliseconds(40));
  EXPECT_EQ(Percentile(values, 0), absl::Milliseconds(10));
  EXPECT_EQ(Percentile({}, 0.99), absl::ZeroDuration());
  EXPECT_EQ(Mean(values), absl::Milliseconds(25));
  // One slow gap in a hundred is beyond p99, two are not.
  std::vector<int> hundred(100, 1);
  hundred[3] = 500;
  EXPECT_EQ(Percentile(Milliseconds(hundred), 0.99), absl::Milliseconds(1));
  hundred[70] = 400;
  EXPECT_EQ(Percentile(Milliseconds(hundred), 0.99), absl::Milliseconds(400));
}

TEST(BenchTableTest, CountsWhatCameAndWhatFailed) {
  const TimePoint start = TimePoint() + std::chrono::hours(1);
  const auto at = [&](int milliseconds) { return start + std::chrono::milliseconds(milliseconds); };
  TimedStream good = {.start = start, .token_times = {at(100), at(110), at(110), at(150)}};
  good.finish.mutable_usage()->set_prompt_tokens(2000);
  good.finish.mutable_usage()->mutable_cached_tokens()->set_host(640);
  EXPECT_THAT(good.Gaps(),
              ElementsAre(absl::Milliseconds(10), absl::ZeroDuration(), absl::Milliseconds(40)));
  const TimedStream bad = {.start = start, .status = absl::ResourceExhaustedError("full")};
  const std::string table = BenchTable({good, bad, bad}, absl::Seconds(2));
  for (const char* part :
       {"time to first token, ms         100.0", "inter-token latency, ms          16.7",
        "2.0 tokens/s generated, 1000.0 read", "3 in 2.00 s, 2 failed",
        "640 of 2,000 prompt tokens cached", "2 x RESOURCE_EXHAUSTED: full"}) {
    EXPECT_THAT(table, HasSubstr(part));
  }
}

TEST(InterferenceTest, TheBoundIsP99BeforePlusOneAndAHalfMedianChunks) {
  Interference measured = {.streams = 8, .long_prompt_tokens = 32000};
  measured.chunks = Milliseconds({20, 40, 90});
  measured.before = Milliseconds({10, 10, 12});
  measured.during = Milliseconds({50, 72});
  EXPECT_EQ(measured.bound(), absl::Milliseconds(72));
  EXPECT_TRUE(measured.held());
  EXPECT_THAT(InterferenceTable(measured),
              HasSubstr("p99 72.0 ms, bound 12.0 + 1.5 x 40.0 = 72.0 ms: held"));
  measured.during = Milliseconds({50, 73});
  EXPECT_FALSE(measured.held());
  EXPECT_THAT(InterferenceTable(measured), HasSubstr("MISSED"));
}

TEST(RandomTextTest, IsAsLongAsAskedAndDiffersFromItsFirstWordOn) {
  EXPECT_GE(RandomText(1000, 1).size(), 1000u);
  EXPECT_EQ(RandomText(1000, 1), RandomText(1000, 1));
  EXPECT_NE(RandomText(100, 1).substr(0, 16), RandomText(100, 2).substr(0, 16));
}

TEST(DocumentPromptsTest, EachQuestionStandsBehindItsDocument) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/kvasir_bench_test.", getpid());
  std::ofstream(path) << R"([{"text": "A.", "questions": [{"prompt": "1?"}, {"prompt": "2?"}]},
                             {"text": "B.", "questions": [{"prompt": "3?"}]}])";
  EXPECT_THAT(*DocumentPrompts(path), ElementsAre("A.1?", "A.2?", "B.3?"));
  std::ofstream(path) << R"({"text": "A.", "questions": [{"prompt": "1?"}]})";
  EXPECT_THAT(*DocumentPrompts(path), ElementsAre("A.1?"));
  for (const char* text : {"", "7", "[]", "[7]", R"({"text": 1, "questions": [{"prompt": "x"}]})",
                           R"({"text": "x", "questions": []})", R"({"text": "x"})",
                           R"({"text": "x", "questions": [{"prompt": 1}]})"}) {
    std::ofstream(path) << text;
    EXPECT_EQ(DocumentPrompts(path).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
  std::filesystem::remove(path);
  EXPECT_EQ(DocumentPrompts(path).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace kvasir::coordinator
