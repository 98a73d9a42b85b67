// Agreement with Hugging Face `tokenizers`: as recorded by make_golden.py for the splitting of
// GPT-2, Llama 3 and Qwen2 and for one odd tokenizer with every flag of added tokens, and by
// make_sentencepiece_golden.py for five forms of tokenizers made from SentencePiece's.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <iterator>
#include <openssl/sha.h>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

#include "coordinator/tokenizer/incremental_decoder.h"
#include "coordinator/tokenizer/tokenizer.h"
#include "coordinator/tokenizer/unicode/utf8.h"

namespace kvasir::coordinator {
namespace {

using nlohmann::json;

const std::filesystem::path kGolden = "tests/coordinator/tokenizer/golden";
constexpr size_t kDigestEvery = 4096;  // as in make_golden.py

std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.is_open()) << path;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

json ReadJson(const std::filesystem::path& path) { return json::parse(ReadFile(path)); }

std::string Sha256(absl::string_view data) {
  unsigned char digest[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(data.data()), data.size(), digest);
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(digest), sizeof(digest)));
}

// Returns every code point beside a letter, a digit, itself and white space; as in make_golden.py.
std::string SweepText() {
  std::string text;
  for (const json& range : ReadJson(kGolden / "unicode_ranges.json")) {
    for (auto c = range[0].get<uint32_t>(); c <= range[1].get<uint32_t>(); ++c) {
      std::string s;
      AppendUtf8(c, &s);
      absl::StrAppend(&text, "a", s, "1", s, s, " ", s, "'", s, "\n");
    }
  }
  return text;
}

class GoldenTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    auto tokenizer = Tokenizer::Load((kGolden / GetParam()).string());
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    tokenizer_ = *std::move(tokenizer);
    golden_ = ReadJson(kGolden / GetParam() / "cases.json");
  }

  void ExpectAgreement(absl::string_view text, const json& expected) const {
    const auto ids = tokenizer_->Encode(text);
    ASSERT_TRUE(ids.ok()) << ids.status();
    const json& digests = expected.at("digests");
    size_t bytes_before = 0;
    for (size_t begin = 0, run = 0; begin < ids->size(); begin += kDigestEvery, ++run) {
      const absl::Span<const int32_t> part = absl::MakeSpan(*ids).subspan(begin, kDigestEvery);
      const absl::string_view raw(reinterpret_cast<const char*>(part.data()),
                                  part.size() * sizeof(int32_t));
      ASSERT_LT(run, digests.size());
      ASSERT_EQ(Sha256(raw).substr(0, 16), digests[run].get<std::string>())
          << "ids from " << begin << ", text from about byte " << bytes_before << ": "
          << absl::CEscape(text.substr(bytes_before, 200));
      for (const int32_t id : part) bytes_before += tokenizer_->TokenBytes(id).size();
    }
    EXPECT_EQ(ids->size(), expected.at("num_ids").get<size_t>());
    const auto decoded = tokenizer_->Decode(*ids, SpecialTokens::kKeep);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(Sha256(*decoded), expected.at("decoded_sha256").get<std::string>());
  }

  std::unique_ptr<const Tokenizer> tokenizer_;
  json golden_;
};

TEST_P(GoldenTest, AgreesOnHostileShortTexts) {
  for (const json& expected : golden_.at("cases")) {
    const auto text = expected.at("text").get<std::string>();
    SCOPED_TRACE(absl::CEscape(text));
    const bool parse = expected.at("parse_special_tokens").get<bool>();
    const auto ids = tokenizer_->Encode(
        text,
        {.add_special_tokens = expected.at("add_special_tokens").get<bool>(),
         .special_token_text = parse ? SpecialTokenText::kParse : SpecialTokenText::kPlainText});
    ASSERT_TRUE(ids.ok()) << ids.status();
    EXPECT_EQ(*ids, expected.at("ids").get<std::vector<int32_t>>());
    EXPECT_EQ(*tokenizer_->Decode(*ids, SpecialTokens::kKeep),
              expected.at("decoded").get<std::string>());
    EXPECT_EQ(*tokenizer_->Decode(*ids, SpecialTokens::kSkip),
              expected.at("decoded_skipping_special").get<std::string>());
  }
}

TEST_P(GoldenTest, StreamsTheSameTextTokenByToken) {
  for (const json& expected : golden_.at("cases")) {
    if (!expected.contains("streamed")) continue;
    SCOPED_TRACE(absl::CEscape(expected.at("text").get<std::string>()));
    IncrementalDecoder decoder(*tokenizer_, SpecialTokens::kSkip, TextPosition::kBegin);
    std::vector<std::string> streamed;
    for (const json& id : expected.at("ids")) streamed.push_back(decoder.Push(id.get<int32_t>()));
    EXPECT_EQ(streamed, expected.at("streamed").get<std::vector<std::string>>());
    EXPECT_EQ(decoder.Flush(), "");
  }
}

TEST_P(GoldenTest, DecodesIdsThatNoTextHas) {
  for (const json& expected : golden_.value("id_cases", json::array())) {
    SCOPED_TRACE(expected.at("ids").dump());
    const auto ids = expected.at("ids").get<std::vector<int32_t>>();
    EXPECT_EQ(*tokenizer_->Decode(ids, SpecialTokens::kKeep),
              expected.at("decoded").get<std::string>());
    EXPECT_EQ(*tokenizer_->Decode(ids, SpecialTokens::kSkip),
              expected.at("decoded_skipping_special").get<std::string>());
  }
}

TEST_P(GoldenTest, AgreesOnOneMegabyteOfMixedText) {
  ExpectAgreement(ReadFile(kGolden / "mixed_text.txt"), golden_.at("mixed_text"));
}

TEST_P(GoldenTest, AgreesOnEveryCodePointOfUnicode14) {
  ExpectAgreement(SweepText(), golden_.at("sweep"));
}

INSTANTIATE_TEST_SUITE_P(Tokenizers, GoldenTest,
                         testing::Values("gpt2", "llama3", "qwen2", "odd", "llama2", "mistral",
                                         "gemma", "metaspace", "odd_pieces"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace kvasir::coordinator
