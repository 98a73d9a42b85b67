#include "coordinator/tokenizer/json_value.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>

#include "coordinator/tokenizer/unicode/utf8.h"

namespace kvasir::coordinator {
namespace {

using nlohmann::json;
using testing::HasSubstr;

constexpr JsonLimits kLimits = {.max_values = 100, .max_keys = 3, .max_depth = 4};

std::string ParseError(const std::string& text, const JsonLimits& limits = kLimits) {
  const auto parsed = ParseJson(text, limits);
  EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument) << text.substr(0, 100);
  return std::string(parsed.status().message());
}

TEST(ParseJsonTest, ReadsWhatIsWithinTheLimits) {
  const auto parsed = ParseJson(R"({"a": [1, -2, 3.5, null, true, {"b": "é\n"}]})", kLimits);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ((*parsed)["a"][5]["b"], "é\n");
  EXPECT_TRUE(ParseJson("[[[[1]]]]", kLimits).ok());
}

TEST(ParseJsonTest, RefusesWhatIsNotJson) {
  for (const char* text : {"", "{", "[1,]", "{\"a\":1,}", "nul", "01", "1e999", "\"\\ud800\"",
                           "{}{}", "\"\xFF\"", "\"\n\"", "[1] x", "'a'"}) {
    EXPECT_THAT(ParseError(text), HasSubstr("not acceptable JSON")) << text;
  }
}

TEST(ParseJsonTest, RefusesWhatFollowsANulByte) {
  EXPECT_THAT(ParseError(std::string("[1]\0[", 5)), HasSubstr("NUL at byte 3 of 5"));
}

TEST(ParseJsonTest, RefusesDuplicateKeys) {
  EXPECT_THAT(ParseError(R"({"a": {"b": 1, "c": 2, "b": 3}})"), HasSubstr("key \"b\" twice"));
  EXPECT_TRUE(ParseJson(R"({"a": {"a": 1}, "b": {"a": 1}})", kLimits).ok());
}

TEST(ParseJsonTest, RefusesDepthAndNumberWithoutBuildingThem) {
  EXPECT_THAT(ParseError("[[[[[1]]]]]"), HasSubstr("nested deeper than 4"));
  const std::string deep = std::string(5'000'000, '[');
  EXPECT_THAT(ParseError(deep), HasSubstr("nested deeper than 4"));
  EXPECT_THAT(ParseError(R"({"a": 1, "b": 2, "c": 3, "d": 4})"), HasSubstr("more than 3 keys"));
  EXPECT_TRUE(ParseJson(R"([{"a": 1, "b": 2, "c": 3}, {"d": 4}])", kLimits).ok());
  std::string many = "[0";
  for (int i = 0; i < 1000; ++i) many += ",0";
  EXPECT_THAT(ParseError(many + "]"), HasSubstr("more than 100 values"));
}

TEST(ParseJsonTest, MessagesAreShortAndUtf8WhateverTheTextIs) {
  const std::string long_key(100'000, 'k');
  EXPECT_LT(ParseError("{\"" + long_key + "\":1,\"" + long_key + "\":2}").size(), 400u);
  EXPECT_EQ(FindInvalidUtf8(ParseError("{\"\xFF\"")), std::nullopt);
}

TEST(JsonValueTest, MessagesNameThePathAndWhatWasFound) {
  const json document = {{"a", {{"flag", "yes"}, {"list", {1, -1, 2.5}}}},
                         {"long", std::string(195, 'x') + "éééééééééééééé"}};
  const JsonValue root(document, "");
  const JsonValue a = *root.Member("a");
  EXPECT_EQ(a.BoolMember("flag", false).status().message(),
            "a.flag is \"yes\"; expected true or false");
  EXPECT_EQ(a.Member("x").status().message(), "a.x is missing");
  EXPECT_EQ(a.Elements().status().message(), "a is an object; expected an array");
  const auto list = *(*a.Member("list")).Elements();
  EXPECT_EQ(*list[0].Index(2), 1);
  EXPECT_EQ(list[0].Index(1).status().message(), "a.list[0] is 1; expected an integer in [0, 1)");
  EXPECT_EQ(list[1].Index(9).status().message(), "a.list[1] is -1; expected an integer in [0, 9)");
  EXPECT_FALSE(list[2].Index(9).ok());
  EXPECT_FALSE(list[2].Member("x").ok());
  EXPECT_FALSE(list[2].String().ok());
  EXPECT_TRUE((*root.OptionalMember("none")).IsNull());
  EXPECT_EQ(*a.BoolMember("none", true), true);
  EXPECT_THAT(std::string((*root.Member("long")).Bool().status().message()),
              HasSubstr("xéé...\"; "));
}

}  // namespace
}  // namespace kvasir::coordinator
