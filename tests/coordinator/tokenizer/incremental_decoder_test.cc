#include "coordinator/tokenizer/incremental_decoder.h"

#include <gtest/gtest.h>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

#include "coordinator/tokenizer/utf8.h"
#include "tests/coordinator/tokenizer/minimal_json.h"

namespace kvasir::coordinator {
namespace {

class IncrementalDecoderTest : public testing::Test {
 protected:
  std::unique_ptr<const Tokenizer> tokenizer_ = *Tokenizer::Parse(JsonWithTemplate().dump());
};

TEST_F(IncrementalDecoderTest, HoldsBackAnUnfinishedCharacter) {
  IncrementalDecoder decoder(*tokenizer_, SpecialTokens::kKeep);
  EXPECT_EQ(decoder.Push('a'), "a");
  EXPECT_EQ(decoder.Push(0xF0), "");
  EXPECT_EQ(decoder.Push(0x9F), "");
  EXPECT_EQ(decoder.Push(0x98), "");
  EXPECT_EQ(decoder.Push(0x80), "😀");
  EXPECT_EQ(decoder.Flush(), "");
}

TEST_F(IncrementalDecoderTest, ReplacesWhatCanBecomeNoCharacterAtOnce) {
  IncrementalDecoder decoder(*tokenizer_, SpecialTokens::kKeep);
  EXPECT_EQ(decoder.Push(0xFF), "\uFFFD");
  EXPECT_EQ(decoder.Push(0xE4), "");
  EXPECT_EQ(decoder.Push('b'), "\uFFFDb");
  EXPECT_EQ(decoder.Push(0xE4), "");
  EXPECT_EQ(decoder.Push(0xE4), "\uFFFD");
  EXPECT_EQ(decoder.Flush(), "\uFFFD");
  EXPECT_EQ(decoder.Flush(), "");
}

TEST_F(IncrementalDecoderTest, SkipsSpecialTokensIfAskedTo) {
  IncrementalDecoder keep(*tokenizer_, SpecialTokens::kKeep);
  IncrementalDecoder skip(*tokenizer_, SpecialTokens::kSkip);
  EXPECT_EQ(keep.Push(256), "<s>");
  EXPECT_EQ(skip.Push(256), "");
}

TEST_F(IncrementalDecoderTest, AnIdWithoutATokenAddsNoText) {
  IncrementalDecoder decoder(*tokenizer_, SpecialTokens::kKeep);
  decoder.Push(0xC3);
  for (const int32_t id : {-1, 258, 1 << 30}) EXPECT_EQ(decoder.Push(id), "");
  EXPECT_EQ(decoder.Push(0xA9), "é");
}

TEST_F(IncrementalDecoderTest, PiecesAreUtf8AndTogetherEqualDecode) {
  std::mt19937 random(11);
  for (const char* name : {"gpt2", "llama3", "qwen2", "odd"}) {
    const auto tokenizer =
        Tokenizer::Load(absl::StrCat("tests/coordinator/tokenizer/golden/", name));
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    for (int round = 0; round < 300; ++round) {
      const auto special = round % 2 == 0 ? SpecialTokens::kKeep : SpecialTokens::kSkip;
      IncrementalDecoder decoder(**tokenizer, special);
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
