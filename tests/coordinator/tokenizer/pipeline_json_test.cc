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

TEST(PipelineJsonTest, NormalizerIsNothingOrNfc) {
  const auto read = [](const json& part) { return *ReadNormalizer(JsonValue(part, "normalizer")); };
  EXPECT_FALSE(read(nullptr));
  EXPECT_TRUE(read({{"type", "NFC"}}));
  EXPECT_FALSE(read(Sequence("normalizers", json::array())));
  EXPECT_TRUE(read(Sequence("normalizers", {Sequence("normalizers", {{{"type", "NFC"}}})})));
  ExpectRefused(
      {{{{"type", "NFKC"}}, "part.type is \"NFKC\"; supported: null, NFC"},
       {Sequence("normalizers", {{{"type", "Prepend"}, {"prepend", "▁"}}, {{"type", "Replace"}}}),
        "part.normalizers[0].type is \"Prepend\""},
       {{{"type", "Sequence"}}, "part.normalizers is missing"},
       {json::object(), "part.type is missing"},
       {"NFC", "expected an object"},
       {{{"type", 1}}, "part.type is 1; expected a string"}},
      [](const JsonValue& part) { return ReadNormalizer(part).status(); });
}

TEST(PipelineJsonTest, PreTokenizerEndsWithByteLevel) {
  const auto stages = [](const json& part) {
    return ReadPreTokenizer(JsonValue(part, "part")).value().size();
  };
  EXPECT_EQ(stages(kByteLevel), 0u);
  EXPECT_EQ(stages({{"type", "ByteLevel"}}), 2u);  // both flags are true when absent
  EXPECT_EQ(stages(Sequence("pretokenizers", {SplitOn({{"String", " "}}), kByteLevel})), 1u);
  const json digits = {{"type", "Digits"}, {"individual_digits", true}};
  std::vector<json> many(40, digits);
  ExpectRefused(
      {{nullptr, "has no ByteLevel; only byte-level tokenizers are supported"},
       {SplitOn({{"Regex", "a"}}), "has no ByteLevel"},
       {{{"type", "Metaspace"}, {"replacement", "▁"}},
        "part.type is \"Metaspace\"; supported: ByteLevel, Split, Digits"},
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

TEST(PipelineJsonTest, DecoderIsByteLevel) {
  EXPECT_TRUE(CheckDecoder(JsonValue(kByteLevel, "decoder")).ok());
  EXPECT_TRUE(CheckDecoder(JsonValue(Sequence("decoders", {kByteLevel}), "decoder")).ok());
  ExpectRefused({{nullptr, "part is null; expected one ByteLevel decoder, found 0"},
                 {Sequence("decoders", {kByteLevel, kByteLevel}), "found 2"},
                 {Sequence("decoders", {{{"type", "Replace"}}, {{"type", "ByteFallback"}}}),
                  "part.decoders[0].type is \"Replace\"; supported: ByteLevel"}},
                [](const JsonValue& part) { return CheckDecoder(part); });
}

}  // namespace
}  // namespace kvasir::coordinator
