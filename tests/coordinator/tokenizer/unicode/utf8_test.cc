#include "coordinator/tokenizer/unicode/utf8.h"

#include <gtest/gtest.h>
#include <string>
#include <vector>

namespace kvasir::coordinator {
namespace {

struct BadCase {
  std::string bytes;
  size_t offset;      // of the first invalid byte
  std::string lossy;  // every "?" is one U+FFFD
  size_t consumed;
};

std::vector<BadCase> BadCases() {
  return {
      {"\x80", 0, "?", 1},
      {"a\xFF\xFE", 1, "a??", 3},
      {"\xC0\x80", 0, "??", 2},            // overlong
      {"\xC1\xBF", 0, "??", 2},            // overlong
      {"\xE0\x9F\xBF", 0, "???", 3},       // overlong
      {"\xF0\x8F\xBF\xBF", 0, "????", 4},  // overlong
      {"\xED\xA0\x80", 0, "???", 3},       // surrogate
      {"\xF4\x90\x80\x80", 0, "????", 4},  // above U+10FFFF
      {"\xF5\x80", 0, "??", 2},
      {"a\xF0\x9F\x98z", 1, "a?z", 5},  // cut short by another character
      {"\xE4\xB8\xF0\x9F\x98\x80", 0, "?\xF0\x9F\x98\x80", 6},
      {"ok\xE4\xB8", 2, "ok", 2},  // incomplete at the end
      {"\xF0\x9F\x98", 0, "", 0},
      {"\xC3", 0, "", 0},
      {std::string(100, 'a') + "\xC3(", 100, std::string(100, 'a') + "?(", 102},
  };
}

TEST(Utf8Test, ReadsEveryCodePointThatAppendUtf8Writes) {
  for (char32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    std::string bytes;
    AppendUtf8(c, &bytes);
    const Utf8Unit unit = ReadUtf8(bytes + "x");
    ASSERT_EQ(unit.kind, Utf8Unit::Kind::kCodePoint) << static_cast<uint32_t>(c);
    ASSERT_EQ(unit.value, c);
    ASSERT_EQ(unit.length, bytes.size());
    ASSERT_EQ(CodePointBefore("é" + bytes, 2 + bytes.size()).value, c);
    ASSERT_EQ(FindInvalidUtf8(bytes), std::nullopt);
  }
}

TEST(Utf8Test, FindsTheFirstInvalidByte) {
  EXPECT_EQ(FindInvalidUtf8(""), std::nullopt);
  EXPECT_EQ(FindInvalidUtf8(std::string("a\0b", 3)), std::nullopt);
  for (const BadCase& bad : BadCases())
    EXPECT_EQ(FindInvalidUtf8(bad.bytes), bad.offset) << bad.lossy;
}

TEST(Utf8Test, ReplacesMaximalSubpartsAndStopsBeforeAnIncompleteEnd) {
  for (const BadCase& bad : BadCases()) {
    std::string expected;
    for (const char c : bad.lossy) {
      expected += c == '?' ? std::string(kReplacementCharacter) : std::string(1, c);
    }
    std::string text;
    EXPECT_EQ(AppendLossyUtf8(bad.bytes, &text), bad.consumed) << bad.lossy;
    EXPECT_EQ(text, expected);
  }
}

TEST(Utf8Test, ForMessageCutsAndEscapes) {
  EXPECT_EQ(ForMessage("plain é"), "plain é");
  EXPECT_EQ(ForMessage("a\nb\xFF"), "a\\nb\uFFFD");
  EXPECT_EQ(ForMessage(std::string(199, 'x') + "éé"), std::string(199, 'x') + "...");
}

TEST(Utf8Test, WhiteSpaceIsTheUnicodeProperty) {
  int count = 0;
  for (char32_t c = 0; c < 0x110000; ++c) count += IsWhiteSpace(c) ? 1 : 0;
  EXPECT_EQ(count, 25);
  EXPECT_TRUE(IsWhiteSpace(0x85));
  EXPECT_TRUE(IsWhiteSpace(0x3000));
  EXPECT_FALSE(IsWhiteSpace(0x180E));
  EXPECT_FALSE(IsWhiteSpace(0x200B));
}

}  // namespace
}  // namespace kvasir::coordinator
