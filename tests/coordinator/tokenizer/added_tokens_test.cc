// Tests one rule at a time. The golden tests compare with Hugging Face's library.
#include "coordinator/tokenizer/added_tokens.h"

#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace kvasir::coordinator {
namespace {

// Returns the parts joined by '|'. A token is written as its id and the text that it took.
std::string Split(const AddedTokens& tokens, absl::string_view text,
                  SpecialTokenText special = SpecialTokenText::kParse,
                  const std::vector<TextSpan>& plain_spans = {}) {
  std::string out;
  const absl::Status status = tokens.Split(
      text, special, plain_spans, [&](absl::string_view part, std::optional<int32_t> id) {
        absl::StrAppend(&out, out.empty() ? "" : "|", id.has_value() ? absl::StrCat(*id, ":") : "",
                        part);
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
  return out;
}

TEST(AddedTokensTest, TheLeftmostAndOfThoseTheLongestIsTaken) {
  const AddedTokens tokens(
      {{.content = "ab", .id = 1}, {.content = "abcd", .id = 2}, {.content = "bcdef", .id = 3}});
  EXPECT_EQ(Split(tokens, "xabcdefab"), "x|2:abcd|ef|1:ab");
  EXPECT_EQ(Split(tokens, "abcabcd"), "1:ab|c|2:abcd");
  EXPECT_EQ(Split(tokens, "nothing"), "nothing");
  EXPECT_EQ(Split(tokens, ""), "");
}

TEST(AddedTokensTest, ASingleWordHasNoWordCharacterBesideIt) {
  const AddedTokens tokens({{.content = "word", .id = 1, .single_word = true}});
  EXPECT_EQ(Split(tokens, "word,word"), "1:word|,|1:word");
  for (const char* text :
       {"words", "sword", "word_", "word1", "éword", "word\u0301", "word\u200D"}) {
    EXPECT_EQ(Split(tokens, text), text);
  }
}

TEST(AddedTokensTest, StrippingTakesWhiteSpaceButNotThatOfTheTokenBefore) {
  const AddedTokens tokens(
      {{.content = "<l>", .id = 1, .lstrip = true}, {.content = "<r>", .id = 2, .rstrip = true}});
  EXPECT_EQ(Split(tokens, "a \u3000\n<l> b"), "a|1: \u3000\n<l>| b");
  EXPECT_EQ(Split(tokens, "a <r> \t b"), "a |2:<r> \t |b");
  EXPECT_EQ(Split(tokens, "<r>  <l>"), "2:<r>  |1:<l>");
  EXPECT_EQ(Split(tokens, " <l> <l>"), "1: <l>|1: <l>");
}

TEST(AddedTokensTest, AsPlainTextOnlySpecialTokensAreLeft) {
  const AddedTokens tokens(
      {{.content = "<s>", .id = 1, .special = true}, {.content = "<t>", .id = 2}});
  EXPECT_EQ(Split(tokens, "<s>a<t>", SpecialTokenText::kPlainText), "<s>a|2:<t>");
  EXPECT_EQ(Split(tokens, "<s>a<t>"), "1:<s>|a|2:<t>");
}

TEST(AddedTokensTest, SpecialTokensWithAByteInAPlainSpanStayText) {
  const AddedTokens tokens({{.content = "<s>", .id = 1, .special = true},
                            {.content = "<s>x", .id = 2, .special = true},
                            {.content = "<t>", .id = 3},
                            {.content = "a<s>", .id = 4, .special = true}});
  const auto split = [&](absl::string_view text, const std::vector<TextSpan>& plain_spans) {
    return Split(tokens, text, SpecialTokenText::kParse, plain_spans);
  };
  EXPECT_EQ(split("<s>a<s>", {{3, 4}}), "1:<s>|a|1:<s>");
  EXPECT_EQ(split("<s><s><s>", {{3, 6}}), "1:<s>|<s>|1:<s>");
  EXPECT_EQ(split("<s><t><s>", {{0, 9}}), "<s>|3:<t>|<s>");
  // A token of both texts, and one that both would make longer.
  EXPECT_EQ(split("<s>", {{0, 1}}), "<s>");
  EXPECT_EQ(split("<s>", {{1, 2}}), "<s>");
  EXPECT_EQ(split("<s>", {{2, 3}}), "<s>");
  EXPECT_EQ(split("<s>x", {{3, 4}}), "1:<s>|x");
  // The client's half of a token takes nothing of the template's.
  EXPECT_EQ(split("<<s>", {{0, 1}}), "<|1:<s>");
  EXPECT_EQ(split("<s><s>x", {{0, 3}}), "<s>|2:<s>x");
}

TEST(AddedTokensTest, TheFirstErrorEndsTheSplit) {
  const AddedTokens tokens({{.content = "x", .id = 1}});
  int calls = 0;
  const absl::Status status = tokens.Split(
      "axbxc", SpecialTokenText::kParse, {}, [&](absl::string_view, std::optional<int32_t>) {
        return ++calls < 2 ? absl::OkStatus() : absl::CancelledError("enough");
      });
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(calls, 2);
}

}  // namespace
}  // namespace kvasir::coordinator
