#include "coordinator/tokenizer/regex_dialect.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>

#include "absl/strings/str_cat.h"

namespace kvasir::coordinator {
namespace {

using testing::HasSubstr;

TEST(RegexDialectTest, LeavesAloneWhatMeansTheSame) {
  for (const char* pattern :
       {"(?i:'s|'t|'re|'ve|'m|'ll|'d)", "[^\\r\\n\\p{L}\\p{N}]?\\p{L}+", "\\p{N}{1,3}", "a{2}b{3,}",
        "[\\r\\n]+", "(?!x)(?=y)(?<=a)(?<!b)(?>c)(?:d)(e)", "[一-龥぀-ゟ゠-ヿ]+",
        "a*?b++c?+.", "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~]", "\\p{^Lu}\\P{M}", "\\d[^\\D]",
        "[a\\-z-]"}) {
    const auto translated = TranslateToPcre(pattern);
    ASSERT_TRUE(translated.ok()) << translated.status();
    EXPECT_EQ(*translated, pattern);
  }
}

TEST(RegexDialectTest, RewritesWhatPcreReadsDifferently) {
  EXPECT_EQ(*TranslateToPcre("\\p{Han}\\P{^Hiragana}"), "\\p{sc:Han}\\P{^sc:Hiragana}");
  EXPECT_EQ(*TranslateToPcre("\\u3042\\x{1F600}"), "\\x{3042}\\x{1F600}");
  const std::string space = *TranslateToPcre("\\s");
  EXPECT_THAT(space, HasSubstr("\\x{3000}"));
  EXPECT_EQ(*TranslateToPcre("[x\\s]"), absl::StrCat("[x", space.substr(1)));
  EXPECT_THAT(*TranslateToPcre("[\\S]"), HasSubstr("\\x{3001}-\\x{10FFFF}"));
}

TEST(RegexDialectTest, RefusesWhatMightMeanSomethingElse) {
  const struct {
    const char* pattern;
    const char* message;
  } cases[] = {
      {"ab^", "an anchor at byte 2"},
      {"x$", "an anchor at byte 1"},
      {"(?m:a)", "this kind of group at byte 0"},
      {"(?i)a", "this kind of group"},
      {"(?<name>a)", "this kind of group"},
      {"(?i:\\p{L})", "anything but letters inside (?i:...)"},
      {"(?i:a(?:[b]))", "anything but letters inside (?i:...)"},
      {"(?i:strasSe)", "'st' inside (?i:...)"},
      {"\\w+", "this escape"},
      {"\\bword", "this escape"},
      {"\\h", "this escape"},
      {"\\R", "this escape"},
      {"(a)\\1", "this escape"},
      {"a\\", "this escape"},
      {"\\Ka", "this escape"},
      {"\\x41", "\\x without {}"},
      {"\\x{}", "this code point"},
      {"\\x{1234567}", "this code point"},
      {"\\u30", "this code point"},
      {"\\pL", "this property"},
      {"\\p{L&}", "this property"},
      {"\\p{Xx}", "this property"},
      {"\\p{sc=Han}", "this property"},
      {"\\p{L", "this property"},
      {"a{,3}", "this use of '{'"},
      {"a{x}", "this use of '{'"},
      {"a{1,3}+", "'+' or '?' after an interval"},
      {"a{2}?", "'+' or '?' after an interval"},
      {"[]a]", "']' as the first of a class"},
      {"[a[bc]]", "an unescaped '[' in a class"},
      {"[[:alpha:]]", "an unescaped '[' in a class"},
      {"[a-z&&[^b]]", "an intersection of classes"},
      {"[\\s-z]", "a range from a set"},
      {"[a-\\d]", "a range to a set"},
      {"[abc", "a class without its ']'"},
      {"[", "a class without its ']'"},
  };
  for (const auto& test : cases) {
    const auto translated = TranslateToPcre(test.pattern);
    ASSERT_EQ(translated.status().code(), absl::StatusCode::kInvalidArgument) << test.pattern;
    EXPECT_THAT(std::string(translated.status().message()), HasSubstr(test.message))
        << test.pattern;
  }
}

TEST(RegexDialectTest, CaseIsIgnoredOnlyInsideItsGroup) {
  EXPECT_TRUE(TranslateToPcre("(?i:ab)\\p{L}").ok());
  EXPECT_TRUE(TranslateToPcre("(?:(?i:ab)\\p{L})").ok());
  EXPECT_FALSE(TranslateToPcre("(?:(?i:a(?:b)\\p{L}))").ok());
}

}  // namespace
}  // namespace kvasir::coordinator
