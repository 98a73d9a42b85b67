#include "coordinator/tokenizer/split_regex.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>
#include <utility>
#include <vector>

namespace kvasir::coordinator {
namespace {

using testing::HasSubstr;

std::vector<std::string> AllMatches(const SplitRegex& regex, const std::string& text) {
  SplitRegex::Scratch scratch;
  std::vector<std::string> matches;
  for (size_t pos = 0; pos <= text.size();) {
    const auto match = regex.Find(text, pos, &scratch);
    EXPECT_TRUE(match.ok()) << match.status();
    if (!match.ok() || !match->has_value()) break;
    matches.push_back(text.substr((*match)->begin, (*match)->end - (*match)->begin));
    pos = (*match)->end;
  }
  return matches;
}

TEST(SplitRegexTest, FindsOneMatchAfterAnother) {
  const SplitRegex regex = *SplitRegex::CompilePattern("\\p{L}+|\\p{N}");
  EXPECT_EQ(AllMatches(regex, "ab12 日本!"), (std::vector<std::string>{"ab", "1", "2", "日本"}));
  EXPECT_EQ(AllMatches(regex, ""), std::vector<std::string>());
  EXPECT_EQ(AllMatches(regex, "!?"), std::vector<std::string>());
}

TEST(SplitRegexTest, LookBehindSeesTheTextBeforeTheStart) {
  const SplitRegex regex = *SplitRegex::CompilePattern("(?<=a)b");
  SplitRegex::Scratch scratch;
  EXPECT_TRUE((*regex.Find("ab", 1, &scratch)).has_value());
}

TEST(SplitRegexTest, WhiteSpaceIsUnicodesAndNotPcres) {
  const SplitRegex space = *SplitRegex::CompilePattern("\\s");
  const SplitRegex other = *SplitRegex::CompilePattern("[^\\s]|[\\S]");
  const std::string text = "\u0085\u00A0\u180E\u3000";
  EXPECT_EQ(AllMatches(space, text), (std::vector<std::string>{"\u0085", "\u00A0", "\u3000"}));
  EXPECT_EQ(AllMatches(other, text), (std::vector<std::string>{"\u180E"}));
}

TEST(SplitRegexTest, ALiteralHasNoOperators) {
  const SplitRegex regex = *SplitRegex::CompileLiteral("a.(");
  EXPECT_EQ(AllMatches(regex, "axb a.( a.(("), (std::vector<std::string>{"a.(", "a.("}));
}

TEST(SplitRegexTest, RefusesWrongAndEmptyPatterns) {
  for (const char* pattern : {"(", "a)", "[z-a]", "\\p{Klingon}", "a**", "*"}) {
    EXPECT_EQ(SplitRegex::CompilePattern(pattern).status().code(),
              absl::StatusCode::kInvalidArgument)
        << pattern;
  }
  for (const char* pattern : {"", "a*", "(?=a)", "a|"}) {
    EXPECT_THAT(std::string(SplitRegex::CompilePattern(pattern).status().message()),
                HasSubstr("can match the empty string"))
        << pattern;
  }
  EXPECT_FALSE(SplitRegex::CompileLiteral("").ok());
  EXPECT_FALSE(SplitRegex::CompilePattern(std::string(100'000, 'a')).ok());
  EXPECT_FALSE(
      SplitRegex::CompilePattern(std::string(10'000, '(') + std::string(10'000, ')')).ok());
}

TEST(SplitRegexTest, EndlessBacktrackingIsAnError) {
  SplitRegex::Scratch scratch;
  // Exponential: every way to cut the run of a's is tried.
  const SplitRegex exponential = *SplitRegex::CompilePattern("(?:a+)+[bd]");
  EXPECT_EQ(exponential.Find(std::string(60, 'a') + "c", 0, &scratch).status().code(),
            absl::StatusCode::kResourceExhausted);
  // Deep: every repetition of the group is a place to come back to.
  const SplitRegex deep = *SplitRegex::CompilePattern("(?:a|b)+[cd]");
  EXPECT_EQ(deep.Find(std::string(4'000'000, 'a'), 0, &scratch).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE((*deep.Find("abc", 0, &scratch)).has_value());  // the scratch is still usable
}

}  // namespace
}  // namespace kvasir::coordinator
