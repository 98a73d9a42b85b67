#include "coordinator/tokenizer/pipeline_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "tests/coordinator/tokenizer/minimal_json.h"

namespace kvasir::coordinator {
namespace {

using nlohmann::json;
using testing::HasSubstr;

struct Refused {
  json part;
  const char* message;
};

const json kByteLevel = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};

json Sequence(const char* key, json parts) {
  return {{"type", "Sequence"}, {key, std::move(parts)}};
}

json SplitOn(json pattern, const char* behavior = "Isolated") {
  return {{"type", "Split"},
          {"pattern", std::move(pattern)},
          {"behavior", behavior},
          {"invert", false}};
}

template <typename Read>
void ExpectRefused(const std::vector<Refused>& cases, Read read) {
  for (const Refused& test : cases) {
    const absl::Status status = read(JsonValue(test.part, "part"));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << test.part.dump();
    EXPECT_THAT(std::string(status.message()), HasSubstr(test.message)) << test.part.dump();
  }
}

json Replace(const std::string& pattern, const std::string& content) {
  return {{"type", "Replace"}, {"pattern", {{"String", pattern}}}, {"content", content}};
}

TEST(PipelineJsonTest, NormalizerIsStepsInOrder) {
  const auto run = [](const json& part, absl::string_view text) {
    return ReadNormalizer(JsonValue(part, "normalizer"))->Run(text);
  };
  const json nfc = {{"type", "NFC"}};
  const json prepend = {{"type", "Prepend"}, {"prepend", "▁"}};
  EXPECT_TRUE(ReadNormalizer(JsonValue(nullptr, "normalizer"))->empty());
  EXPECT_TRUE(
      ReadNormalizer(JsonValue(Sequence("normalizers", json::array()), "normalizer"))->empty());
  EXPECT_EQ(run(nfc, "e\u0301"), "é");
  EXPECT_EQ(run(Sequence("normalizers", {Sequence("normalizers", {nfc})}), "e\u0301"), "é");
  const json llama2 = Sequence("normalizers", {prepend, Replace(" ", "▁")});
  EXPECT_EQ(run(llama2, " a  b"), "▁▁a▁▁b");
  EXPECT_EQ(run(llama2, ""), "");
  EXPECT_EQ(run(Sequence("normalizers", {Replace("aa", "b"), prepend}), "aaa"), "▁ba");
}

TEST(PipelineJsonTest, OtherNormalizersAreRefused) {
  const json grows = Replace(" ", "1234");
  const json regex = {{"type", "Replace"}, {"pattern", {{"Regex", " +"}}}, {"content", "▁"}};
  const std::vector<json> many(33, json{{"type", "NFC"}});
  ExpectRefused(
      {{{{"type", "NFKC"}}, "part.type is \"NFKC\"; supported: null, NFC, Prepend, Replace"},
       {{{"type", "Prepend"}, {"prepend", ""}}, "part.prepend is \"\"; expected 1 to 64 bytes"},
       {Sequence("normalizers", {Replace(" ", "▁"), regex}),
        "part.normalizers[1].pattern.Regex is \" +\"; expected \"String\""},
       {Replace("", "▁"), "part.pattern.String is \"\"; expected 1 to 64 bytes"},
       {Replace("a", ""), "part.content is \"\"; expected 1 to 64 bytes"},
       {Sequence("normalizers", {grows, grows}),
        "part.normalizers[1]: with it the normalizer can make a text more than 8 times as long"},
       {Sequence("normalizers", many), "more than 32 normalizers"},
       {{{"type", "Sequence"}}, "part.normalizers is missing"},
       {json::object(), "part.type is missing"},
       {"NFC", "expected an object"},
       {{{"type", 1}}, "part.type is 1; expected a string"}},
      [](const JsonValue& part) { return ReadNormalizer(part).status(); });
}

TEST(PipelineJsonTest, PreTokenizerIsStagesAndMayEndWithByteLevel) {
  const auto stages = [](const json& part) {
    return ReadPreTokenizer(JsonValue(part, "part")).value().stages.size();
  };
  EXPECT_EQ(stages(kByteLevel), 0u);
  EXPECT_EQ(stages({{"type", "ByteLevel"}}), 2u);  // both flags are true when absent
  EXPECT_EQ(stages(Sequence("pretokenizers", {SplitOn({{"String", " "}}), kByteLevel})), 1u);
  const auto alphabet = [](const json& part) {
    return ReadPreTokenizer(JsonValue(part, "part")).value().alphabet;
  };
  EXPECT_EQ(alphabet(kByteLevel), Alphabet::kBytes);
  EXPECT_EQ(alphabet(nullptr), Alphabet::kCharacters);
  const json metaspace = {{"type", "Metaspace"}, {"replacement", "▁"}};
  EXPECT_EQ(alphabet(metaspace), Alphabet::kCharacters);
  EXPECT_EQ(stages(metaspace), 2u);  // it splits when it does not say
  EXPECT_EQ(stages({{"type", "Metaspace"}, {"replacement", "▁"}, {"split", false}}), 1u);
  const json digits = {{"type", "Digits"}, {"individual_digits", true}};
  std::vector<json> many(40, digits);
  ExpectRefused(
      {{{{"type", "Whitespace"}},
        "part.type is \"Whitespace\"; supported: null, ByteLevel, Metaspace, Split, Digits"},
       {Sequence("pretokenizers", {metaspace, kByteLevel}), "has both Metaspace and ByteLevel"},
       {{{"type", "Metaspace"}, {"replacement", "▁▁"}}, "expected one character"},
       {{{"type", "Metaspace"}, {"replacement", "▁"}, {"prepend_scheme", "last"}},
        "part.prepend_scheme is \"last\"; expected \"first\", \"always\" or \"never\""},
       {{{"type", "Metaspace"}, {"replacement", "▁"}, {"add_prefix_space", false}},
        "part.add_prefix_space is false; but prepend_scheme is not \"never\""},
       {Sequence("pretokenizers", {kByteLevel, digits}),
        "part.pretokenizers[1] stands after ByteLevel"},
       {Sequence("pretokenizers", {kByteLevel, kByteLevel}), "stands after ByteLevel"},
       {Sequence("pretokenizers", {SplitOn({{"Regex", "a"}}, "Sideways"), kByteLevel}),
        "pretokenizers[0].behavior is \"Sideways\""},
       {Sequence("pretokenizers", {SplitOn({{"Regex", "\\w"}}), kByteLevel}), "this escape"},
       {Sequence("pretokenizers", {SplitOn(json::object()), kByteLevel}),
        "pattern.String is missing"},
       {Sequence("pretokenizers", {SplitOn("a"), kByteLevel}), "expected an object"},
       {Sequence("pretokenizers", many), "more than 32 pre-tokenizers"}},
      [](const JsonValue& part) { return ReadPreTokenizer(part).status(); });
}

TEST(PipelineJsonTest, PostProcessorGivesTheTokensAroundAText) {
  const json part = JsonWithTemplate()["post_processor"];
  const Template one = *ReadPostProcessor(JsonValue(part, "part"), 300);
  EXPECT_EQ(one.prefix_ids, std::vector<int32_t>({256}));
  EXPECT_EQ(one.suffix_ids, std::vector<int32_t>({257}));
  const Template two =
      *ReadPostProcessor(JsonValue(Sequence("processors", {kByteLevel, part, part}), "part"), 300);
  EXPECT_EQ(two.prefix_ids, std::vector<int32_t>({256, 256}));
  EXPECT_TRUE(ReadPostProcessor(JsonValue(nullptr, "part"), 300)->prefix_ids.empty());
}

TEST(PipelineJsonTest, OtherPostProcessorsAreRefused) {
  const json good = JsonWithTemplate()["post_processor"];
  const auto with = [&](const char* path, json value) {
    json part = good;
    part[json::json_pointer(path)] = std::move(value);
    return part;
  };
  ExpectRefused({{{{"type", "BertProcessing"}}, "part.type is \"BertProcessing\"; supported: null"},
                 {with("/single/1/Sequence/id", "B"), "part.single[1].Sequence.id is \"B\""},
                 {with("/single", {good["single"][0]}), "expected the sequence A"},
                 {with("/single", {good["single"][1], good["single"][1]}), "and that once"},
                 {with("/single", {json::object()}), "SpecialToken is missing"},
                 {with("/special_tokens", json::object()), "part.special_tokens.<s> is missing"},
                 {with("/special_tokens/<s>/ids/0", 300), "expected an integer in [0, 300)"},
                 {with("/special_tokens/<s>/ids", 256), "expected an array"}},
                [](const JsonValue& part) { return ReadPostProcessor(part, 300).status(); });
}

TEST(PipelineJsonTest, DecoderOfBytesIsByteLevel) {
  const auto read = [](const JsonValue& part) { return ReadDecoder(part, Alphabet::kBytes); };
  EXPECT_TRUE(read(JsonValue(kByteLevel, "decoder")).ok());
  EXPECT_TRUE(read(JsonValue(Sequence("decoders", {kByteLevel}), "decoder")).ok());
  ExpectRefused({{nullptr, "part is null; expected one ByteLevel decoder, found 0"},
                 {Sequence("decoders", {kByteLevel, kByteLevel}), "found 2"},
                 {Sequence("decoders", {{{"type", "Replace"}}, {{"type", "ByteFallback"}}}),
                  "part.decoders[0].type is \"Replace\"; supported: ByteLevel"}},
                [&](const JsonValue& part) { return read(part).status(); });
}

TEST(PipelineJsonTest, DecoderOfCharactersChangesTokensThenBytesThenTheText) {
  const auto read = [](const JsonValue& part) { return ReadDecoder(part, Alphabet::kCharacters); };
  const json bytes = {{"type", "ByteFallback"}};
  const json fuse = {{"type", "Fuse"}};
  const json strip = {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}};
  const json metaspace = {{"type", "Metaspace"}, {"replacement", "▁"}};
  const json llama2 = Sequence("decoders", {Replace("▁", " "), bytes, fuse, strip});
  const DecoderRules rules = *read(JsonValue(llama2, "decoder"));
  ASSERT_EQ(rules.replacements.size(), 1u);
  EXPECT_EQ(rules.replacements[0].content, " ");
  EXPECT_TRUE(rules.byte_fallback);
  EXPECT_EQ(rules.stripped, " ");
  EXPECT_EQ(rules.max_stripped, 1);
  EXPECT_EQ(read(JsonValue(metaspace, "decoder"))->dropped_in_first_token, "▁");
  json strip_end = strip;
  strip_end["stop"] = 1;
  json strip_many = strip;
  strip_many["start"] = 65;
  ExpectRefused(
      {{nullptr, "part is null; expected a decoder"},
       {kByteLevel, "part.type is \"ByteLevel\"; supported: Metaspace, Replace"},
       {strip, "Strip does not fit there"},
       {Sequence("decoders", {bytes, Replace("▁", " ")}), "Replace does not fit there"},
       {Sequence("decoders", {bytes, bytes}), "ByteFallback does not fit there"},
       {Sequence("decoders", {metaspace, Replace("a", "b")}), "a Replace after Metaspace"},
       {Sequence("decoders", {Replace("a", "b"), metaspace}), "Metaspace does not fit"},
       {Sequence("decoders", {fuse, strip_many}), "expected an integer in [0, 65)"},
       {Sequence("decoders", {fuse, strip_end}), "part.decoders[1].stop is 1"}},
      [&](const JsonValue& part) { return read(part).status(); });
}

}  // namespace
}  // namespace kvasir::coordinator
