#include "coordinator/tokenizer/bpe.h"

#include <gtest/gtest.h>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace kvasir::coordinator {
namespace {

using Merges = std::vector<std::pair<std::string, std::string>>;

// A vocabulary given by its merges. The id of a byte is the byte.
struct Model {
  std::map<std::string, int32_t> ids;
  BpeModel::Params params;

  explicit Model(const Merges& merges) {
    for (int byte = 0; byte < 256; ++byte) {
      ids[std::string(1, static_cast<char>(byte))] = byte;
      params.byte_ids[static_cast<size_t>(byte)] = byte;
    }
    for (const auto& [left, right] : merges) {
      const auto id = static_cast<int32_t>(ids.size());
      const int32_t result = ids.try_emplace(left + right, id).first->second;
      params.merges.push_back({ids.at(left), ids.at(right), result});
    }
  }
};

std::vector<int32_t> Encode(const BpeModel& model, const std::string& piece) {
  BpeModel::Workspace workspace;
  std::vector<int32_t> ids;
  model.Encode(piece, &workspace, &ids);
  return ids;
}

// Encodes by the definition: merges the leftmost pair of the lowest rank until there is none.
std::vector<int32_t> EncodeByDefinition(const BpeModel::Params& params, const std::string& piece) {
  std::vector<int32_t> ids;
  for (const char c : piece) {
    const int32_t id = params.byte_ids[static_cast<uint8_t>(c)];
    if (id >= 0) ids.push_back(id);
  }
  while (true) {
    size_t best_rank = params.merges.size();
    size_t best = 0;
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      for (size_t rank = 0; rank < best_rank; ++rank) {
        const BpeModel::Merge& merge = params.merges[rank];
        if (merge.left != ids[i] || merge.right != ids[i + 1]) continue;
        best_rank = rank;
        best = i;
      }
    }
    if (best_rank == params.merges.size()) return ids;
    ids[best] = params.merges[best_rank].result;
    ids.erase(ids.begin() + static_cast<int64_t>(best) + 1);
  }
}

TEST(BpeTest, MergesTheLowestRankFirst) {
  Model model(Merges{{"b", "c"}, {"a", "b"}, {"a", "bc"}});
  const BpeModel bpe(model.params);
  EXPECT_EQ(Encode(bpe, "abc"), std::vector<int32_t>({model.ids["abc"]}));
  EXPECT_EQ(Encode(bpe, "abab"), std::vector<int32_t>({model.ids["ab"], model.ids["ab"]}));
  EXPECT_EQ(Encode(bpe, "x"), std::vector<int32_t>({'x'}));
  EXPECT_EQ(Encode(bpe, ""), std::vector<int32_t>());
}

TEST(BpeTest, AmongEqualsMergesTheLeftmostFirst) {
  Model model(Merges{{"a", "a"}});
  EXPECT_EQ(Encode(BpeModel(model.params), "aaa"), std::vector<int32_t>({model.ids["aa"], 'a'}));
  const std::string odd(101, 'a');
  std::vector<int32_t> expected(50, model.ids["aa"]);
  expected.push_back('a');
  EXPECT_EQ(Encode(BpeModel(model.params), odd), expected);
}

TEST(BpeTest, WholeTokensAreTakenBeforeMerging) {
  Model model(Merges{{"a", "b"}});
  model.params.whole_tokens = {{"abx", 300}};
  const BpeModel bpe(model.params);
  EXPECT_EQ(Encode(bpe, "abx"), std::vector<int32_t>({300}));
  EXPECT_EQ(Encode(bpe, "abxx"), std::vector<int32_t>({model.ids["ab"], 'x', 'x'}));
}

TEST(BpeTest, BytesWithoutATokenAreLeftOut) {
  Model model(Merges{{"a", "b"}});
  model.params.byte_ids[4] = -1;
  const BpeModel bpe(model.params);
  EXPECT_EQ(Encode(bpe, "x\4y"), std::vector<int32_t>({'x', 'y'}));
  EXPECT_EQ(Encode(bpe, "\4a\4b\4"), std::vector<int32_t>({model.ids["ab"]}));
  EXPECT_EQ(Encode(bpe, "\4"), std::vector<int32_t>());
  EXPECT_EQ(Encode(bpe, std::string(100, '\4')), std::vector<int32_t>());
  EXPECT_EQ(Encode(bpe, std::string(100, '\4') + "a\4b"), std::vector<int32_t>({model.ids["ab"]}));
}

// Characters a, b and é have tokens; ids of bytes are those of Model.
BpeModel::Params CharacterParams(std::optional<int32_t> unknown, bool fuses) {
  BpeModel::Params params{.byte_ids = {}, .characters = {}, .merges = {}, .whole_tokens = {}};
  params.byte_ids.fill(-1);
  params.characters = BpeModel::Characters{
      .ids = {{U'a', 300}, {U'b', 301}, {U'é', 302}}, .unknown = unknown, .fuses_unknown = fuses};
  params.merges = {{300, 302, 310}, {301, 301, 311}};
  return params;
}

TEST(BpeTest, ACharacterIsASymbol) {
  const BpeModel bpe(CharacterParams({}, false));
  EXPECT_EQ(Encode(bpe, "aébbb"), std::vector<int32_t>({310, 311, 301}));
  EXPECT_EQ(Encode(bpe, std::string(49, 'b')).size(), 25u);
  EXPECT_EQ(Encode(bpe, "b日b"), std::vector<int32_t>({311}));  // left out: neighbours merge
}

TEST(BpeTest, ACharacterWithoutATokenIsItsBytesIfAllHaveOne) {
  BpeModel::Params params = CharacterParams(0, true);
  for (const int byte : {0xE6, 0x97, 0xA5}) params.byte_ids[static_cast<size_t>(byte)] = byte;
  const BpeModel bpe(params);
  EXPECT_EQ(Encode(bpe, "a日b"), std::vector<int32_t>({300, 0xE6, 0x97, 0xA5, 301}));
  EXPECT_EQ(Encode(bpe, "a月b"), std::vector<int32_t>({300, 0, 301}));  // E6 9C 88
  // The unknown one waits for the next character with a token, as in Hugging Face's library.
  EXPECT_EQ(Encode(bpe, "月日月b"), std::vector<int32_t>({0xE6, 0x97, 0xA5, 0, 301}));
}

TEST(BpeTest, NeighboursThatAreUnknownFuseIfAskedTo) {
  EXPECT_EQ(Encode(BpeModel(CharacterParams(0, true)), "xyaz"), std::vector<int32_t>({0, 300, 0}));
  EXPECT_EQ(Encode(BpeModel(CharacterParams(0, false)), "xyaz"),
            std::vector<int32_t>({0, 0, 300, 0}));
}

TEST(BpeTest, AgreesWithTheDefinitionAtEveryLength) {
  std::mt19937 random(7);
  for (int round = 0; round < 40; ++round) {
    std::vector<std::string> tokens = {"a", "b", "c"};
    Merges merges;
    std::set<std::pair<std::string, std::string>> seen;
    for (int i = 0; i < 25; ++i) {
      std::pair<std::string, std::string> merge(tokens[random() % tokens.size()],
                                                tokens[random() % tokens.size()]);
      if (!seen.insert(merge).second) continue;
      merges.push_back(merge);
      tokens.push_back(merge.first + merge.second);
    }
    Model model(merges);
    if (round % 4 == 0) model.params.byte_ids['b'] = -1;
    const BpeModel bpe(model.params);
    for (const size_t length : std::vector<size_t>{1, 2, 3, 7, 30, 47, 48, 49, 50, 90, 200}) {
      std::string piece(length, '\0');
      const size_t letters = 1 + random() % 3;
      for (char& c : piece) c = static_cast<char>('a' + random() % letters);
      ASSERT_EQ(Encode(bpe, piece), EncodeByDefinition(model.params, piece)) << piece;
    }
  }
}

TEST(BpeTest, AMegabyteOfOneCharacterIsNotQuadratic) {
  Merges merges;
  for (size_t length = 1; length <= 64; length *= 2) {
    merges.emplace_back(std::string(length, 'a'), std::string(length, 'a'));
  }
  const Model model(merges);
  const size_t length = size_t{1} << 20;
  const std::vector<int32_t> ids = Encode(BpeModel(model.params), std::string(length, 'a'));
  EXPECT_EQ(ids, std::vector<int32_t>(length / 128, model.ids.at(std::string(128, 'a'))));
}

}  // namespace
}  // namespace kvasir::coordinator
