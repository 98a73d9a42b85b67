// The golden tests compare NFC with Hugging Face's for all code points and for runs of marks.
#include "coordinator/tokenizer/unicode/unicode.h"

#include <gtest/gtest.h>
#include <string>

namespace kvasir::coordinator {
namespace {

std::string Repeat(const std::string& part, size_t count) {
  std::string out;
  for (size_t i = 0; i < count; ++i) out += part;
  return out;
}

TEST(UnicodeTest, NfcComposesReordersAndReplaces) {
  EXPECT_EQ(NormalizeNfc(""), "");
  EXPECT_EQ(NormalizeNfc("plain é"), "plain é");
  EXPECT_EQ(NormalizeNfc("e\u0301"), "\u00E9");
  EXPECT_EQ(NormalizeNfc("\u0301e\u0301e"), "\u0301\u00E9e");
  EXPECT_EQ(NormalizeNfc("\u00E9\u0323"), "\u1EB9\u0301");  // é is decomposed for the lower mark
  EXPECT_EQ(NormalizeNfc("\u1E9B\u0323"), "\u1E9B\u0323");
  EXPECT_EQ(NormalizeNfc("\u212B \u2126"), "\u00C5 \u03A9");  // singletons
  EXPECT_EQ(NormalizeNfc("\u0958"), "\u0915\u093C");          // excluded from composition
  EXPECT_EQ(NormalizeNfc("\u1100\u1161\u11A8"), "\uAC01");    // Hangul
  EXPECT_EQ(NormalizeNfc("\u1100\u1161x\u11A8"), "\uAC00x\u11A8");
  EXPECT_EQ(NormalizeNfc("\U0001D15E"), "\U0001D157\U0001D165");  // four bytes
  EXPECT_EQ(NormalizeNfc(std::string("a\0\u0301", 4)), std::string("a\0\u0301", 4));
}

TEST(UnicodeTest, NfcOfAMegabyteOfMarksIsNotQuadratic) {
  // Every mark below moves before all marks above: 2.5e11 swaps when neighbours are swapped.
  const std::string below = Repeat("\u0323", 250'000);
  const std::string above = Repeat("\u0308", 250'000);
  EXPECT_EQ(NormalizeNfc("q" + above + below), "q" + below + above);
}

TEST(UnicodeTest, WordCharactersAreLettersMarksDigitsConnectorsAndJoiners) {
  for (const char32_t c : U"aZ0_é日\u0301\u0903٣Ⅷ\u200D\u24D0\u203F") {
    if (c != 0) {
      EXPECT_TRUE(IsWordCharacter(c)) << static_cast<uint32_t>(c);
    }
  }
  for (const char32_t c : U" -½²€\u200B\u00A0\U0001F600") {
    if (c != 0) {
      EXPECT_FALSE(IsWordCharacter(c)) << static_cast<uint32_t>(c);
    }
  }
}

}  // namespace
}  // namespace kvasir::coordinator
