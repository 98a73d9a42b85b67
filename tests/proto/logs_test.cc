#include "proto/process/logs.h"

#include <future>
#include <sstream>

#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "spdlog/sinks/base_sink.h"
#include "spdlog/sinks/ostream_sink.h"
#include "spdlog/spdlog.h"

namespace kvasir::proto {
namespace {

v1::LogConfig Config(const std::string& level, const std::string& format) {
  v1::LogConfig config;
  config.set_log_level(level);
  config.set_log_format(format);
  return config;
}

// Returns the lines that `work` logs.
std::vector<std::string> Lines(const v1::LogConfig& config,
                               const std::function<void(Logs& logs)>& work) {
  std::ostringstream out;
  {
    auto logs =
        Logs::Start("worker", config, std::make_shared<spdlog::sinks::ostream_sink_mt>(out));
    EXPECT_TRUE(logs.ok()) << logs.status();
    work(**logs);
  }
  return absl::StrSplit(out.str(), '\n', absl::SkipEmpty());
}

TEST(Logs, TextNamesTimeInUtcLevelProcessAndRank) {
  const std::vector<std::string> lines = Lines(Config("info", "text"), [](Logs& logs) {
    logs.set_rank(3);
    spdlog::warn("before {}", 1);
    LogEvent(spdlog::level::info, "after", {{"tenant", "a \"b\""}, {"tokens", int64_t{7}}});
  });
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_THAT(lines[0], ::testing::MatchesRegex("[0-9]+-[0-9]+-[0-9]+T[0-9]+:[0-9]+:[0-9]+[.]"
                                                "[0-9]+Z warn worker 3: before 1"));
  EXPECT_NE(lines[1].find(R"(Z info worker 3: after tenant="a \"b\"" tokens=7)"), std::string::npos)
      << lines[1];
}

TEST(Logs, AJsonLineIsOneObjectWhateverItsTextsHold) {
  const std::string hostile = "\"}\n{\"level\":\"error\xff\xc3\x28\x00\x1b[31m\xe2\x80\xa8";
  const std::vector<std::string> lines = Lines(Config("info", "json"), [&](Logs& logs) {
    logs.set_rank(0);
    spdlog::info("{}", hostile);
    LogEvent(spdlog::level::info, hostile, {{"id", hostile}, {"share", 0.25}});
  });
  ASSERT_EQ(lines.size(), 2u);
  for (const std::string& line : lines) {
    const auto object = nlohmann::json::parse(line, nullptr, false);
    ASSERT_TRUE(object.is_object()) << line;
    EXPECT_EQ(object["level"], "info");
    EXPECT_EQ(object["process"], "worker");
    EXPECT_EQ(object["rank"], 0);
    EXPECT_NE(object["message"].get<std::string>().find("\"}\n{"), std::string::npos);
  }
  const auto fields = nlohmann::json::parse(lines[1]);
  EXPECT_EQ(fields["share"], 0.25);
  EXPECT_EQ(fields["id"], fields["message"]);
}

TEST(Logs, ATextLineHasNoControlCharacters) {
  const std::vector<std::string> lines = Lines(Config("info", "text"), [](Logs&) {
    spdlog::info("a\nb\x1b[31m\x7f");
    LogEvent(spdlog::level::info, "m", {{"id", "x\ny"}});
  });
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_NE(lines[0].find("a\\x0ab\\x1b[31m\\x7f"), std::string::npos) << lines[0];
  EXPECT_NE(lines[1].find("id=\"x\\ny\""), std::string::npos) << lines[1];
}

TEST(Logs, ALevelLeavesOutWhatMattersLess) {
  const auto log_all = [](Logs&) {
    for (const auto level : {spdlog::level::debug, spdlog::level::info, spdlog::level::warn}) {
      spdlog::log(level, "plain");
      LogEvent(level, "event", {});
    }
  };
  EXPECT_EQ(Lines(Config("trace", "json"), log_all).size(), 6u);
  EXPECT_EQ(Lines(Config("warn", "json"), log_all).size(), 2u);
  EXPECT_EQ(Lines(Config("off", "text"), log_all).size(), 0u);
}

TEST(Logs, UnknownNamesAreRefused) {
  EXPECT_EQ(Logs::Start("w", Config("loud", "text")).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Logs::Start("w", Config("info", "xml")).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// A sink that takes no line until it is released.
class StalledSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit StalledSink(std::shared_future<void> released) : released_(std::move(released)) {}

 private:
  void sink_it_(const spdlog::details::log_msg&) override { released_.wait(); }
  void flush_() override {}
  const std::shared_future<void> released_;
};

TEST(Logs, AReaderThatStallsHoldsUpNobodyAndLinesAreCountedThatGaveWay) {
  std::promise<void> release;
  auto logs = Logs::Start("worker", Config("info", "text"),
                          std::make_shared<StalledSink>(release.get_future().share()));
  ASSERT_TRUE(logs.ok());
  const size_t beyond = 100;
  for (size_t i = 0; i < Logs::kMostWaiting + beyond; ++i) spdlog::info("line {}", i);
  EXPECT_GE(LogLinesDropped(), beyond - 1);  // one is being written
  EXPECT_LE(LogLinesDropped(), beyond);
  release.set_value();
}

}  // namespace
}  // namespace kvasir::proto
