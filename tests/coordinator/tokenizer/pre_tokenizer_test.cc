#include "coordinator/tokenizer/pre_tokenizer.h"

#include <fstream>
#include <gtest/gtest.h>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "nlohmann/json.hpp"

#include "coordinator/tokenizer/pipeline_json.h"

namespace kvasir::coordinator {
namespace {

using nlohmann::json;
using Behavior = PreTokenizer::Behavior;

std::vector<std::string> Pieces(const PreTokenizer& pre_tokenizer, absl::string_view text,
                                TextPosition position = TextPosition::kBegin) {
  SplitRegex::Scratch scratch;
  std::vector<std::string> pieces;
  const absl::Status status =
      pre_tokenizer.Run(text, position, &scratch, [&](absl::string_view piece) {
        pieces.emplace_back(piece);
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
  return pieces;
}

PreTokenizer::Stage Split(const char* pattern, Behavior behavior = Behavior::kIsolated) {
  return PreTokenizer::Split{.regex = *SplitRegex::CompilePattern(pattern), .behavior = behavior};
}

// Every behaviour of Split, inverted and not, over patterns with look-around, classes, scripts and
// literals, as make_golden.py recorded them from Hugging Face's library.
TEST(PreTokenizerTest, SplitAgreesWithHuggingFace) {
  std::ifstream file("tests/coordinator/tokenizer/golden/split_behaviors.json");
  const json cases = json::parse(file);
  EXPECT_GT(cases.size(), 100u);
  for (const json& expected : cases) {
    const json description = {
        {"type", "Sequence"},
        {"pretokenizers",
         {{{"type", "Split"},
           {"pattern", expected["pattern"]},
           {"behavior", expected["behavior"]},
           {"invert", expected["invert"]}},
          {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}};
    auto parts = ReadPreTokenizer(JsonValue(description, "pre_tokenizer"));
    ASSERT_TRUE(parts.ok()) << parts.status();
    EXPECT_EQ(Pieces(PreTokenizer(std::move(parts->stages)), expected["text"].get<std::string>()),
              expected["pieces"].get<std::vector<std::string>>())
        << expected.dump();
  }
}

TEST(PreTokenizerTest, EachStageCutsThePiecesOfTheOneBefore) {
  const PreTokenizer chain({Split("\\p{N}"), Split(" ", Behavior::kRemoved), Split("a+")});
  EXPECT_EQ(Pieces(chain, "1 baa2c a"), (std::vector<std::string>{"1", "b", "aa", "2", "c", "a"}));
  // Look-ahead ends at the piece: the second stage does not see the digit after the space.
  const PreTokenizer ahead({Split("\\p{N}"), Split("\\s+(?!\\S)|\\s")});
  EXPECT_EQ(Pieces(ahead, "a  1"), (std::vector<std::string>{"a", "  ", "1"}));
}

TEST(PreTokenizerTest, APrefixSpaceIsAddedToEveryPieceWithoutOne) {
  const PreTokenizer prefix({Split("\\p{N}"), PreTokenizer::AddPrefixSpace{}});
  EXPECT_EQ(Pieces(prefix, "a1 b"), (std::vector<std::string>{" a", " 1", " b"}));
  EXPECT_EQ(Pieces(prefix, "\u00A0"), (std::vector<std::string>{" \u00A0"}));
  EXPECT_EQ(Pieces(prefix, ""), std::vector<std::string>());
}

TEST(PreTokenizerTest, MarksStandForSpacesAndComeFirst) {
  using Prepend = PreTokenizer::MarkSpaces::Prepend;
  const auto pieces = [](Prepend prepend, absl::string_view text, TextPosition position) {
    const PreTokenizer chain(
        {Split("\\p{N}"), PreTokenizer::MarkSpaces{.mark = "▁", .prepend = prepend}});
    return Pieces(chain, text, position);
  };
  using Strings = std::vector<std::string>;
  EXPECT_EQ(pieces(Prepend::kAlways, "a1 b", TextPosition::kInside), (Strings{"▁a", "▁1", "▁b"}));
  EXPECT_EQ(pieces(Prepend::kNever, "a1 b", TextPosition::kBegin), (Strings{"a", "1", "▁b"}));
  EXPECT_EQ(pieces(Prepend::kFirst, "a1 b", TextPosition::kBegin), (Strings{"▁a", "1", "▁b"}));
  EXPECT_EQ(pieces(Prepend::kFirst, "a1 b", TextPosition::kInside), (Strings{"a", "1", "▁b"}));
  EXPECT_EQ(pieces(Prepend::kFirst, "  a", TextPosition::kBegin), (Strings{"▁▁a"}));
}

TEST(PreTokenizerTest, WithoutStagesTheTextIsOnePiece) {
  EXPECT_EQ(Pieces(PreTokenizer({}), "a b"), (std::vector<std::string>{"a b"}));
  EXPECT_EQ(Pieces(PreTokenizer({}), ""), std::vector<std::string>());
}

TEST(PreTokenizerTest, TheFirstErrorEndsTheRun) {
  SplitRegex::Scratch scratch;
  int calls = 0;
  const PreTokenizer letters({Split("\\p{L}")});
  const absl::Status status =
      letters.Run("abcdef", TextPosition::kBegin, &scratch, [&](absl::string_view) {
        return ++calls < 3 ? absl::OkStatus() : absl::CancelledError("enough");
      });
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(calls, 3);
}

}  // namespace
}  // namespace kvasir::coordinator
