#include "worker/checkpoint/strict_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvasir::worker {
namespace {

using ::testing::HasSubstr;

std::string ErrorOf(const std::string& text) {
  const auto json = ParseStrictJson({text.data(), text.size()}, "file.json");
  EXPECT_EQ(json.status().code(), absl::StatusCode::kInvalidArgument) << text.substr(0, 80);
  return std::string(json.status().message());
}

TEST(StrictJson, AcceptsJson) {
  const auto json =
      ParseStrictJson(R"({"a": [1, -2, 3.5, "x", null, true, {}], "b": {"a": 1}})", "");
  ASSERT_TRUE(json.ok()) << json.status();
  EXPECT_EQ((*json)["b"]["a"], 1);
}

TEST(StrictJson, RefusesWhatTheLibraryWouldLetPass) {
  EXPECT_THAT(ErrorOf(R"({"a": 1, "b": {"c": 1, "c": 2}})"),
              HasSubstr("file.json: the key \"c\" appears twice in one object"));
  EXPECT_THAT(ErrorOf(R"({"a": 1, "\u0061": 2})"), HasSubstr("the key \"a\" appears twice"));
  EXPECT_THAT(ErrorOf(std::string("{}\0garbage", 10)), HasSubstr("byte 2: a NUL byte"));
  EXPECT_THAT(ErrorOf(std::string(17, '[') + std::string(17, ']')),
              HasSubstr("nest deeper than 16"));
  EXPECT_TRUE(ParseStrictJson(std::string(16, '[') + std::string(16, ']'), "").ok());
}

TEST(StrictJson, RefusesWhatIsNotJson) {
  for (const char* text : {"", " ", "{", "nul", "NaN", "Infinity", "[1,]", "{'a':1}", "[1] [2]",
                           "// x\n1", "1e999", "\"\xff\"", "\"\\ud800\"", "01", "+1"}) {
    EXPECT_THAT(ErrorOf(text), HasSubstr("file.json: not valid JSON at byte")) << text;
  }
}

TEST(StrictJson, DeepAndLongInputIsRefusedWithAShortMessage) {
  EXPECT_LT(ErrorOf(std::string(1'000'000, '[')).size(), 200u);
  EXPECT_LT(ErrorOf("\"" + std::string(1'000'000, 'x')).size(), 200u);
  EXPECT_LT(ErrorOf("{\"" + std::string(1'000'000, 'x') + "\":1,\"" + std::string(1'000'000, 'x') +
                    "\":1}")
                .size(),
            200u);
}

TEST(StrictJson, ValuesInMessagesAreShortAndPrintable) {
  EXPECT_EQ(QuoteForMessage("a\n\xff"), "\"a\\n\\xff\"");
  EXPECT_LT(QuoteForMessage(std::string(1000, 'x')).size(), 120u);
  EXPECT_EQ(ValueForMessage(nlohmann::json::parse(R"({"a":["\u00e9",1]})")),
            R"({"a":["\u00e9",1]})");
  EXPECT_LT(ValueForMessage(nlohmann::json(std::vector<int>(1000))).size(), 120u);
}

}  // namespace
}  // namespace kvasir::worker
