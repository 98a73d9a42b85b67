#include "coordinator/tokenizer/incremental_decoder.h"

#include <gtest/gtest.h>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

#include "coordinator/tokenizer/unicode/utf8.h"
#include "tests/coordinator/tokenizer/minimal_json.h"

namespace kvasir::coordinator {
namespace {

class IncrementalDecoderTest : public testing::Test {
 protected:
  std::unique_ptr<const Tokenizer> tokenizer_ = *Tokenizer::Parse(JsonWithTemplate().dump());
};

TEST_F(IncrementalDecoderTest, HoldsBackAnUnfinishedCharacter) {
  IncrementalDecoder decoder(*tokenizer_, SpecialTokens::kKeep, TextPosition::kBegin);
  EXPECT_EQ(decoder.Push('a'), "a");
  EXPECT_EQ(decoder.Push(0xF0), "");
  EXPECT_EQ(decoder.Push(0x9F), "");
  EXPECT_EQ(decoder.Push(0x98), "");
  EXPECT_EQ(decoder.Push(0x80), "😀");
  EXPECT_EQ(decoder.Flush(), "");
}

TEST_F(IncrementalDecoderTest, ReplacesWhatCanBecomeNoCharacterAtOnce) {
  IncrementalDecoder decoder(*tokenizer_, SpecialTokens::kKeep, TextPosition::kBegin);
  EXPECT_EQ(decoder.Push(0xFF), "\uFFFD");
  EXPECT_EQ(decoder.Push(0xE4), "");
  EXPECT_EQ(decoder.Push('b'), "\uFFFDb");
  EXPECT_EQ(decoder.Push(0xE4), "");
  EXPECT_EQ(decoder.Push(0xE4), "\uFFFD");
  EXPECT_EQ(decoder.Flush(), "\uFFFD");
  EXPECT_EQ(decoder.Flush(), "");
}

TEST_F(IncrementalDecoderTest, SkipsSpecialTokensIfAskedTo) {
  IncrementalDecoder keep(*tokenizer_, SpecialTokens::kKeep, TextPosition::kBegin);
  IncrementalDecoder skip(*tokenizer_, SpecialTokens::kSkip, TextPosition::kBegin);
  EXPECT_EQ(keep.Push(256), "<s>");
  EXPECT_EQ(skip.Push(256), "");
}

TEST_F(IncrementalDecoderTest, AnIdWithoutATokenAddsNoText) {
  IncrementalDecoder decoder(*tokenizer_, SpecialTokens::kKeep, TextPosition::kBegin);
  decoder.Push(0xC3);
  for (const int32_t id : {-1, 258, 1 << 30}) EXPECT_EQ(decoder.Push(id), "");
  EXPECT_EQ(decoder.Push(0xA9), "é");
}

std::unique_ptr<const Tokenizer> Golden(const char* name) {
  auto tokenizer = Tokenizer::Load(absl::StrCat("tests/coordinator/tokenizer/golden/", name));
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

std::vector<std::string> Pushed(const Tokenizer& tokenizer, TextPosition position,
                                const std::vector<std::string>& tokens) {
  IncrementalDecoder decoder(tokenizer, SpecialTokens::kSkip, position);
  std::vector<std::string> texts;
  for (const std::string& token : tokens) {
    EXPECT_TRUE(tokenizer.TokenId(token).has_value()) << token;
    texts.push_back(decoder.Push(tokenizer.TokenId(token).value_or(-1)));
  }
  texts.push_back(decoder.Flush());
  return texts;
}

using Strings = std::vector<std::string>;

TEST_F(IncrementalDecoderTest, OnlyTheBeginOfATextLosesItsSpace) {
  for (const char* name : {"llama2", "mistral", "metaspace"}) {
    const auto tokenizer = Golden(name);
    EXPECT_EQ(Pushed(*tokenizer, TextPosition::kBegin, {"<s>", "▁the", "▁the"}),
              (Strings{"", "the", " the", ""}));
    EXPECT_EQ(Pushed(*tokenizer, TextPosition::kInside, {"<s>", "▁the", "▁the"}),
              (Strings{"", " the", " the", ""}));
  }
  EXPECT_EQ(Pushed(*Golden("gemma"), TextPosition::kBegin, {"▁the"}), (Strings{" the", ""}));
}

// Hugging Face's library would replace "é" too, which was streamed before.
TEST_F(IncrementalDecoderTest, BytesOfFallbackAreReplacedOneByOneAndWellFormedOnesStay) {
  const auto tokenizer = Golden("llama2");
  const auto pushed = [&](const Strings& tokens) {
    return Pushed(*tokenizer, TextPosition::kInside, tokens);
  };
  EXPECT_EQ(pushed({"<0xC3>", "<0xA9>", "<0xFF>"}), (Strings{"", "é", "\uFFFD", ""}));
  EXPECT_EQ(pushed({"<0xF0>", "<0x9F>", "a"}), (Strings{"", "", "\uFFFD\uFFFDa", ""}));
  EXPECT_EQ(pushed({"<0xF0>", "<0x9F>", "<0x41>"}), (Strings{"", "", "\uFFFD\uFFFDA", ""}));
  EXPECT_EQ(pushed({"<0xE2>", "<0x96>"}), (Strings{"", "", "\uFFFD\uFFFD"}));
}

TEST_F(IncrementalDecoderTest, PiecesAreUtf8AndTogetherEqualDecode) {
  std::mt19937 random(11);
  for (const char* name : {"gpt2", "llama3", "qwen2", "odd", "llama2", "mistral", "gemma",
                           "metaspace", "odd_pieces"}) {
    const auto tokenizer =
        Tokenizer::Load(absl::StrCat("tests/coordinator/tokenizer/golden/", name));
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    for (int round = 0; round < 300; ++round) {
      const auto special = round % 2 == 0 ? SpecialTokens::kKeep : SpecialTokens::kSkip;
      IncrementalDecoder decoder(**tokenizer, special, TextPosition::kBegin);
      std::vector<int32_t> ids;
      std::string text;
      for (int i = 0; i < 100; ++i) {
        // Half of the ids are single bytes, most of which do not form UTF-8.
        const auto range =
            static_cast<uint32_t>(random() % 2 == 0 ? 256 : (*tokenizer)->vocab_size());
        const auto id = static_cast<int32_t>(random() % range);
        ids.push_back(id);
        const std::string piece = decoder.Push(id);
        ASSERT_EQ(FindInvalidUtf8(piece), std::nullopt);
        text += piece;
      }
      text += decoder.Flush();
      ASSERT_EQ(text, *(*tokenizer)->Decode(ids, special)) << name << " round " << round;
    }
  }
}

}  // namespace
}  // namespace kvasir::coordinator
