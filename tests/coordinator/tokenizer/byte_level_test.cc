#include "coordinator/tokenizer/byte_level.h"

#include <gtest/gtest.h>
#include <string>

#include "tests/coordinator/tokenizer/minimal_json.h"

namespace kvasir::coordinator {
namespace {

TEST(ByteLevelTest, EveryByteHasItsOwnSymbol) {
  for (int byte = 0; byte < 256; ++byte) {
    EXPECT_EQ(BytesOfSymbols(Symbol(byte)), std::string(1, static_cast<char>(byte)));
  }
}

TEST(ByteLevelTest, KnowsTheSymbolsOfGpt2) {
  EXPECT_EQ(BytesOfSymbols("Ġhello!Ċ"), " hello!\n");
  EXPECT_EQ(BytesOfSymbols("æĹ¥æľ¬"), "日本");
  EXPECT_EQ(Symbol(0), "Ā");
  EXPECT_EQ(Symbol(0x7F), "ġ");
  EXPECT_EQ(Symbol(0xA0), "ł");
  EXPECT_EQ(Symbol(0xAD), "Ń");
}

TEST(ByteLevelTest, OtherCharactersAreNoSymbols) {
  for (const char* text : {" ", "\n", "▁", "ń", "日", "a b", "\u00AD"}) {
    EXPECT_EQ(BytesOfSymbols(text), std::nullopt) << text;
  }
}

}  // namespace
}  // namespace kvasir::coordinator
