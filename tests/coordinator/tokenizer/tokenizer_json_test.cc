// Hostile tokenizer.json files are refused with a clear error, and soon.
#include "coordinator/tokenizer/tokenizer_json.h"

#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "tests/coordinator/tokenizer/minimal_json.h"

namespace kvasir::coordinator {
namespace {

using nlohmann::json;
using testing::HasSubstr;

absl::StatusOr<TokenizerSpec> Read(const json& document, const TokenizerLimits& limits = {}) {
  return ReadTokenizerJson(document.dump(), limits);
}

TEST(TokenizerJsonTest, ReadsTheSmallestFile) {
  const auto spec = Read(MinimalJson());
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->tokens.size(), 256u);
  EXPECT_EQ(spec->tokens[0x20].content, "Ġ");
  EXPECT_EQ(spec->tokens[0x20].bytes, " ");
  EXPECT_EQ(spec->bpe.byte_ids[0xFF], 0xFF);
  EXPECT_TRUE(spec->bpe.whole_tokens.empty());
}

TEST(TokenizerJsonTest, BytesThatTextsHardlyHaveMayLackATokenUnlessThereIsOneForTheUnknown) {
  json document = MinimalJson();
  document["model"]["vocab"].erase(Symbol(4));
  const auto spec = Read(document);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->bpe.byte_ids[4], -1);
  document["model"]["unk_token"] = Symbol(0);
  EXPECT_THAT(Read(document).status().message(), HasSubstr("for byte 4"));
}

TEST(TokenizerJsonTest, ReadsMergesInBothForms) {
  json document = MinimalJson();
  document["model"]["vocab"]["Ġa"] = 256;
  document["model"]["vocab"]["Ġab"] = 257;
  document["model"]["merges"] = {"Ġ a", json::array({"Ġa", "b"})};
  const auto spec = Read(document);
  ASSERT_TRUE(spec.ok()) << spec.status();
  ASSERT_EQ(spec->bpe.merges.size(), 2u);
  EXPECT_EQ(spec->bpe.merges[0].result, 256);
  EXPECT_EQ(spec->bpe.merges[1].left, 256);
  EXPECT_EQ(spec->bpe.merges[1].right, 'b');
}

TEST(TokenizerJsonTest, BytesThatAreInNoUtf8MayLackATokenAndIdsMayHaveHoles) {
  json document = MinimalJson();
  document["model"]["vocab"].erase(Symbol(0xFF));
  document["model"]["vocab"].erase(Symbol(0xC0));
  document["model"]["vocab"]["Ġx"] = 1000;
  const auto spec = Read(document);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->tokens.size(), 1001u);
  EXPECT_TRUE(spec->tokens[0xC0].content.empty());
}

TEST(TokenizerJsonTest, ASpecialTokenMayBePartOfTheVocabularyToo) {
  json document = MinimalJson();
  document["model"]["vocab"]["<s>"] = 256;
  document["added_tokens"] = {AddedTokenJson(256, "<s>")};
  const auto spec = Read(document);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_TRUE(spec->tokens[256].special);
}

TEST(TokenizerJsonTest, RefusesWhatIsNotBpe) {
  json mixed = MinimalJson();
  mixed["model"]["byte_fallback"] = true;
  EXPECT_THAT(std::string(Read(mixed).status().message()),
              HasSubstr("model.byte_fallback is true beside a ByteLevel pre-tokenizer"));
  json unigram = MinimalJson();
  unigram["model"]["type"] = "Unigram";
  EXPECT_THAT(std::string(Read(unigram).status().message()),
              HasSubstr("model.type is \"Unigram\"; supported are BPE tokenizers: byte-level"));
}

// The smallest file whose symbols are characters: all bytes and "a".
json CharacterJson() {
  json document = MinimalJson();
  json vocab = {{"<unk>", 0}, {"▁", 257}, {"a", 258}, {"▁a", 259}};
  for (int byte = 0; byte < 256; ++byte) vocab[absl::StrFormat("<0x%02X>", byte)] = byte + 1;
  document["model"] = {{"type", "BPE"},
                       {"vocab", vocab},
                       {"merges", json::array({json::array({"▁", "a"})})},
                       {"byte_fallback", true},
                       {"fuse_unk", true},
                       {"unk_token", "<unk>"}};
  document["pre_tokenizer"] = {{"type", "Metaspace"}, {"replacement", "▁"}};
  document["decoder"] = {
      {"type", "Sequence"},
      {"decoders", {{{"type", "Metaspace"}, {"replacement", "▁"}}, {{"type", "ByteFallback"}}}}};
  return document;
}

TEST(TokenizerJsonTest, ReadsSymbolsThatAreCharacters) {
  const auto spec = Read(CharacterJson());
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->alphabet, Alphabet::kCharacters);
  ASSERT_TRUE(spec->bpe.characters.has_value());
  EXPECT_EQ(spec->bpe.characters->ids.size(), 2u);
  EXPECT_EQ(spec->bpe.characters->unknown, 0);
  EXPECT_TRUE(spec->bpe.characters->fuses_unknown);
  EXPECT_EQ(spec->bpe.byte_ids[0x41], 0x42);
  EXPECT_EQ(spec->tokens[0x42].bytes, "A");
  EXPECT_EQ(spec->tokens[259].bytes, " a");
  EXPECT_EQ(spec->max_token_bytes, 6u);  // "<0x41>" is the longest in the file
}

TEST(TokenizerJsonTest, WithoutAllBytesATokenMayStandForAnyNumberOfCharacters) {
  json document = CharacterJson();
  document["model"]["vocab"].erase("<0xF4>");
  EXPECT_EQ(Read(document)->max_token_bytes, std::nullopt);
  document["model"]["unk_token"] = "<none>";
  EXPECT_THAT(std::string(Read(document).status().message()),
              HasSubstr("model.unk_token is \"<none>\"; but model.vocab has no such token"));
}

// Hugging Face's library decodes an added token in its normalized form. It then no longer knows it
// as special; here it stays so.
TEST(TokenizerJsonTest, AnAddedTokenThatIsNormalizedIsDecodedSo) {
  json document = CharacterJson();
  document["normalizer"] = {{"type", "Prepend"}, {"prepend", "▁"}};
  document["added_tokens"] = {AddedTokenJson(300, "</s>")};
  EXPECT_EQ(Read(document)->tokens[300].bytes, "</s>");
  document["added_tokens"][0]["normalized"] = true;
  const auto spec = Read(document);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->tokens[300].bytes, " </s>");
  EXPECT_EQ(spec->tokens[300].content, "</s>");
  EXPECT_TRUE(spec->tokens[300].special);
}

TEST(TokenizerJsonTest, RefusesToPrependTwice) {
  json document = CharacterJson();
  document["normalizer"] = {{"type", "Prepend"}, {"prepend", "▁"}};
  EXPECT_TRUE(Read(document).ok());
  document["pre_tokenizer"]["prepend_scheme"] = "first";
  EXPECT_THAT(std::string(Read(document).status().message()),
              HasSubstr("normalizer has Prepend and pre_tokenizer a Metaspace"));
}

struct Mutation {
  std::function<void(json&)> change;
  const char* message;
};

void ExpectRefused(const std::vector<Mutation>& mutations, const TokenizerLimits& limits = {}) {
  for (const Mutation& mutation : mutations) {
    json document = MinimalJson();
    document["model"]["vocab"]["ab"] = 256;
    document["model"]["vocab"]["abc"] = 257;
    mutation.change(document);
    const auto spec = Read(document, limits);
    EXPECT_EQ(spec.status().code(), absl::StatusCode::kInvalidArgument) << mutation.message;
    EXPECT_THAT(std::string(spec.status().message()), HasSubstr(mutation.message));
  }
}

TEST(TokenizerJsonTest, RefusesModelsThatItCannotHonour) {
  ExpectRefused({
      {[](json& d) { d = json::array(); }, "the document is an array; expected an object"},
      {[](json& d) { d["version"] = "2.0"; }, "version is \"2.0\"; expected \"1.0\""},
      {[](json& d) { d.erase("model"); }, "model is missing"},
      {[](json& d) { d["model"]["dropout"] = 0.1; }, "model.dropout is 0.1"},
      {[](json& d) { d["model"]["end_of_word_suffix"] = "</w>"; },
       "end_of_word_suffix is \"</w>\""},
      {[](json& d) { d["model"]["continuing_subword_prefix"] = "##"; }, "subword_prefix is \"##\""},
      {[](json& d) { d["model"]["ignore_merges"] = 1; },
       "ignore_merges is 1; expected true or false"},
      {[](json& d) {
         d["normalizer"] = {{"type", "Lowercase"}};
       },
       "normalizer.type is \"Lowercase\""},
      {[](json& d) { d.erase("pre_tokenizer"); },
       "decoder.type is \"ByteLevel\"; supported: Metaspace"},
      {[](json& d) { d.erase("decoder"); }, "decoder is null"},
      {[](json& d) { d["model"]["vocab"].erase("Ġ"); }, "no token \"Ġ\" for byte 32"},
  });
}

TEST(TokenizerJsonTest, RefusesBadIds) {
  const auto vocab = [](const char* token, json id) {
    return [token, id](json& d) { d["model"]["vocab"][token] = id; };
  };
  ExpectRefused({
      {vocab("ab", -1), "model.vocab[\"ab\"] is -1; expected an integer in [0, 524288)"},
      {vocab("ab", 524288), "model.vocab[\"ab\"] is 524288"},
      {vocab("ab", 18446744073709551615u), "expected an integer"},
      {vocab("ab", 4294967296 + 7), "expected an integer"},
      {vocab("ab", 1.0), "expected an integer"},
      {vocab("ab", "7"), "expected an integer"},
      {vocab("ab", 97), "has the same id; ids must be unique"},
      {[](json& d) { d["model"]["vocab"] = json::array(); },
       "expected an object of tokens and ids"},
      {[](json& d) { d["model"].erase("vocab"); }, "model.vocab is missing"},
      {[](json& d) {
         d = JsonWithTemplate();
         d["added_tokens"].erase(1);
       },
       "post_processor names the id 257, which no token has"},
  });
}

TEST(TokenizerJsonTest, RefusesBadMerges) {
  const auto merges = [](json list) { return [list](json& d) { d["model"]["merges"] = list; }; };
  const char* form = "expected \"left right\" or [\"left\", \"right\"]";
  ExpectRefused({
      {merges(nullptr), "model.merges is null"},
      {merges(json::array({"ab"})), form},
      {merges(json::array({"a b c"})), form},
      {merges(json::array({" b"})), form},
      {merges(json::array({"a "})), form},
      {merges(json::array({""})), form},
      {merges(json::array({7})), form},
      {merges(json::array({json::array({"a"})})), form},
      {merges(json::array({json::array({"a", "b", "c"})})), form},
      {merges(json::array({json::array({"a", 1})})), form},
      {merges(json::array({json::array({"", "ab"})})), form},  // would make "ab" from "ab": a cycle
      {merges(json::array({json::array({"ab", ""})})), form},
      {merges(json::array({"a b", "a zz"})), "model.merges[1] needs the token \"zz\""},
      {merges(json::array({"b a"})), "model.merges[0] needs the token \"ba\""},
      {merges(json::array({"a b", "ab c", json::array({"a", "b"})})), "the same pair came before"},
  });
}

TEST(TokenizerJsonTest, RefusesBadAddedTokens) {
  const auto tokens = [](json list) { return [list](json& d) { d["added_tokens"] = list; }; };
  json no_flag = AddedTokenJson(300, "<x>");
  no_flag.erase("lstrip");
  json composed = AddedTokenJson(300, "\u00E9x");
  json decomposed = AddedTokenJson(301, "e\u0301x");
  composed["normalized"] = decomposed["normalized"] = true;
  json stripping = AddedTokenJson(300, "<x>");
  stripping["rstrip"] = true;
  ExpectRefused({
      {tokens({AddedTokenJson(-1, "<x>")}), "added_tokens[0].id is -1"},
      {tokens({AddedTokenJson(97, "<x>")}), "\"a\" has the same id"},
      {tokens({AddedTokenJson(300, "ab")}), "\"ab\" has the id 256 in model.vocab"},
      {tokens({AddedTokenJson(300, "<x>"), AddedTokenJson(300, "<y>")}), "\"<x>\" has the same id"},
      {tokens({AddedTokenJson(300, "<x>"), AddedTokenJson(301, "<x>")}),
       "that of another added token"},
      {tokens({AddedTokenJson(300, "")}), "expected 1 to 256 bytes"},
      {tokens({AddedTokenJson(300, std::string(257, 'x'))}), "expected 1 to 256 bytes"},
      {tokens({no_flag}), "added_tokens[0].lstrip is missing"},
      {tokens({stripping, AddedTokenJson(301, "\u3000y")}), "white space would belong to two"},
      {tokens({"<x>"}), "expected an object"},
      {tokens({{"id", 1}}), "expected an array"},
      {[&](json& d) {
         d["normalizer"] = {{"type", "NFC"}};
         d["added_tokens"] = {composed, decomposed};
       },
       "that of another added token"},
  });
}

TEST(TokenizerJsonTest, RefusesWhatExceedsTheLimits) {
  ExpectRefused({{[](json&) {}, "an object has more than 257 keys"}}, {.max_tokens = 257});
  ExpectRefused({{[](json& d) {
                    d["model"]["merges"] = {"a b", "ab c"};
                  },
                  "model.merges has 2 pairs; the limit is 1"}},
                {.max_merges = 1});
}

TEST(TokenizerJsonTest, TenMillionEntriesAreRefusedBeforeTheyAreBuilt) {
  std::string text = "{\"model\": {\"vocab\": {\"a\": 0";
  for (int i = 0; i < 10'000'000; ++i) absl::StrAppend(&text, ",\"t", i, "\":", i);
  text += "}}}";
  const auto spec = ReadTokenizerJson(text, {});
  EXPECT_THAT(std::string(spec.status().message()),
              HasSubstr("an object has more than 524288 keys"));
}

TEST(TokenizerJsonTest, DeepNestingNeedsNoStack) {
  for (const char* open : {"[", "{\"a\":"}) {
    std::string text;
    for (int i = 0; i < 1'000'000; ++i) text += open;
    EXPECT_THAT(std::string(ReadTokenizerJson(text, {}).status().message()),
                HasSubstr("nested deeper than 64"));
  }
}

}  // namespace
}  // namespace kvasir::coordinator
