#include "coordinator/tokenizer/tokenizer.h"

#include <chrono>
#include <cstdio>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

#include "tests/coordinator/tokenizer/minimal_json.h"
#include "tests/support/scratch_directory.h"

namespace kvasir::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const char kGolden[] = "tests/coordinator/tokenizer/golden";

std::unique_ptr<const Tokenizer> ParseJson(const nlohmann::json& document) {
  auto tokenizer = Tokenizer::Parse(document.dump());
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

std::string Repeat(const std::string& part, size_t num_bytes) {
  std::string out;
  while (out.size() < num_bytes) out += part;
  return out;
}

TEST(TokenizerTest, LoadsAFolderOrAFile) {
  EXPECT_TRUE(Tokenizer::Load(absl::StrCat(kGolden, "/gpt2")).ok());
  EXPECT_TRUE(Tokenizer::Load(absl::StrCat(kGolden, "/gpt2/tokenizer.json")).ok());
}

TEST(TokenizerTest, LoadErrorsNameTheFile) {
  const auto missing = Tokenizer::Load("/no/such/model");
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr("/no/such/model"));
  const auto bad = Tokenizer::Load(absl::StrCat(kGolden, "/unicode_ranges.json"));
  EXPECT_EQ(bad.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(bad.status().message()),
              HasSubstr("unicode_ranges.json: the document is"));
  const auto large = Tokenizer::Load(absl::StrCat(kGolden, "/gpt2"), {.max_file_bytes = 1000});
  EXPECT_THAT(std::string(large.status().message()), HasSubstr("more than the allowed 1000 bytes"));
  // A device has size 0 and never ends.
  EXPECT_EQ(Tokenizer::Load("/dev/zero").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(TokenizerTest, RefusesAFolderWithASentencePieceModelOnly) {
  const kvasir::testing::ScratchDirectory folder;
  std::ofstream(folder.path() + "/tokenizer.model") << "\n";
  const auto refused = Tokenizer::Load(folder.path());
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("SentencePiece"));
}

TEST(TokenizerTest, PutsTheTokensOfTheTemplateAroundTheText) {
  const auto tokenizer = ParseJson(JsonWithTemplate());
  EXPECT_THAT(*tokenizer->Encode("ab"), ElementsAre(256, 'a', 'b', 257));
  EXPECT_THAT(*tokenizer->Encode(""), ElementsAre(256, 257));
  EXPECT_THAT(*tokenizer->Encode("ab", {.add_special_tokens = false}), ElementsAre('a', 'b'));
  EXPECT_THAT(*tokenizer->Encode("", {.add_special_tokens = false}), ElementsAre());
}

TEST(TokenizerTest, ReadsSpecialTokensInTheTextUnlessToldNotTo) {
  const auto tokenizer = ParseJson(JsonWithTemplate());
  EXPECT_THAT(*tokenizer->Encode("a<s>", {.add_special_tokens = false}), ElementsAre('a', 256));
  EXPECT_THAT(*tokenizer->Encode("a<s>", {.add_special_tokens = false,
                                          .special_token_text = SpecialTokenText::kPlainText}),
              ElementsAre('a', '<', 's', '>'));
}

TEST(TokenizerTest, RefusesInvalidUtf8AndNamesTheByte) {
  const auto tokenizer = ParseJson(MinimalJson());
  const auto status = tokenizer->Encode(std::string(1000, 'a') + "\xED\xA0\x80").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "text is not valid UTF-8 at byte 1000 of 1003 (0xed)");
  for (const char* text :
       {"\x80", "a\xFF", "\xC0\x80", "\xF4\x90\x80\x80", "\xE4\xB8", "a\xF0\x9F\x98"}) {
    EXPECT_FALSE(tokenizer->Encode(text).ok());
  }
  EXPECT_TRUE(tokenizer->Encode(absl::string_view("\0", 1)).ok());
}

TEST(TokenizerTest, MoreTokensThanAllowedAreRefused) {
  const auto tokenizer = ParseJson(JsonWithTemplate());
  EXPECT_TRUE(tokenizer->Encode("abc", {.max_tokens = 5}).ok());
  const auto status = tokenizer->Encode("abc", {.max_tokens = 4}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "text of 3 bytes has more than 4 tokens, which is the limit; shorten it");
  EXPECT_FALSE(tokenizer->Encode("", {.max_tokens = 1}).ok());
  EXPECT_FALSE(tokenizer->Encode("<s><s><s>", {.max_tokens = 4}).ok());
}

// Merging 64 MB of one character would take seconds and a gigabyte of memory.
TEST(TokenizerTest, APromptMuchTooLongIsRefusedBeforeItIsMerged) {
  const auto tokenizer = Tokenizer::Load(absl::StrCat(kGolden, "/llama3"));
  ASSERT_TRUE(tokenizer.ok());
  const auto status =
      (*tokenizer)->Encode(std::string(64 << 20, ' '), {.max_tokens = 8192}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("more than 8192 tokens"));
}

TEST(TokenizerTest, ARunTooLongToBeMergedIsRefused) {
  const auto tokenizer = ParseJson(MinimalJson());
  EXPECT_THAT(std::string(tokenizer->Encode(std::string(9 << 20, 'a')).status().message()),
              HasSubstr("run of 9437184 bytes that cannot be split; the limit is 8388608"));
}

TEST(TokenizerTest, DecodeRefusesIdsWithoutAToken) {
  nlohmann::json document = JsonWithTemplate();
  document["model"]["vocab"]["Ġx"] = 400;
  const auto tokenizer = ParseJson(document);
  EXPECT_EQ(tokenizer->vocab_size(), 401);
  constexpr int32_t kLowest = std::numeric_limits<int32_t>::min();
  constexpr int32_t kHighest = std::numeric_limits<int32_t>::max();
  for (const int32_t id : {-1, 258, 399, 401, kLowest, kHighest}) {
    EXPECT_FALSE(tokenizer->HasToken(id));
    EXPECT_FALSE(tokenizer->IsSpecial(id));
    EXPECT_EQ(tokenizer->TokenBytes(id), "");
    const auto status = tokenizer->Decode({'a', id}, SpecialTokens::kKeep).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(),
              absl::StrCat("token id ", id, " has no token; ids are in [0, 401)"));
  }
  EXPECT_EQ(*tokenizer->Decode({400, 256}, SpecialTokens::kKeep), " x<s>");
  EXPECT_EQ(*tokenizer->Decode({400, 256}, SpecialTokens::kSkip), " x");
  EXPECT_EQ(*tokenizer->Decode({0xE4, 0xB8, 'a', 0xFF, 0xF0}, SpecialTokens::kKeep),
            "\uFFFDa\uFFFD\uFFFD");
  EXPECT_EQ(tokenizer->TokenId("Ġx"), 400);
  EXPECT_EQ(tokenizer->TokenId("<s>"), 256);
  EXPECT_EQ(tokenizer->TokenId(" x"), std::nullopt);
  EXPECT_EQ(tokenizer->TokenContent(400), "Ġx");
  EXPECT_TRUE(tokenizer->IsSpecial(257));
}

TEST(TokenizerTest, APatternThatGivesUpIsAnError) {
  nlohmann::json document = MinimalJson();
  document["pre_tokenizer"] = {
      {"type", "Sequence"},
      {"pretokenizers",
       {{{"type", "Split"}, {"pattern", {{"Regex", "(?:a+)+[bd]"}}}, {"behavior", "Isolated"}},
        {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}};
  const auto tokenizer = ParseJson(document);
  EXPECT_EQ(tokenizer->Encode(std::string(60, 'a')).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(TokenizerTest, LoadsTheReferenceModels) {
  const auto tokenizer = Tokenizer::Load("tests/model/needle-8k");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const std::vector<int32_t> ids = *(*tokenizer)->Encode("Key 4711");
  EXPECT_TRUE((*tokenizer)->IsSpecial(ids.front()));
  EXPECT_EQ(*(*tokenizer)->Decode(ids, SpecialTokens::kSkip), "Key 4711");
  const EncodeOptions plain = {.add_special_tokens = false};
  EXPECT_EQ((*tokenizer)->Encode("4711", plain)->size(), 4u);  // digits are single
}

// A megabyte of anything takes at most 2 us per byte on an idle machine. The limit here is 20 times
// that, for sanitizers and busy machines. Quadratic work takes minutes.
TEST(TokenizerTest, AMegabyteOfAnythingTakesLinearTime) {
  constexpr size_t kBytes = 1'000'000;
  const std::string parts[] = {
      "a",       " ",      "\n",     " \n",         "\n ",           "1",
      "!",       "'",      "'l",     "ab",          "\u0301\u0323",  "\u1100\u1161\u11A8",
      "😀",       "中",     "<",      "<|endoftext", "<|endoftext|>", "<mask> ",
      " <mask>", "\u3000", "\u1F82", "\u00A0\r",    "!\n",           std::string(1, '\0')};
  for (const char* name : {"gpt2", "llama3", "qwen2"}) {
    const auto tokenizer = Tokenizer::Load(absl::StrCat(kGolden, "/", name));
    ASSERT_TRUE(tokenizer.ok());
    double worst = 0;
    for (const std::string& part : parts) {
      const std::string text = Repeat(part, kBytes) + "x";
      const auto begin = std::chrono::steady_clock::now();
      ASSERT_TRUE((*tokenizer)->Encode(text).ok());
      const std::chrono::duration<double, std::micro> time =
          std::chrono::steady_clock::now() - begin;
      const double us_per_byte = time.count() / static_cast<double>(text.size());
      EXPECT_LT(us_per_byte, 40) << name << " " << part;
      worst = std::max(worst, us_per_byte);
    }
    std::printf("%s: worst %.3f us/byte\n", name, worst);
  }
}

}  // namespace
}  // namespace kvasir::coordinator
