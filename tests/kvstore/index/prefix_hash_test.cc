#include <gtest/gtest.h>
#include <map>
#include <random>
#include <tuple>
#include <vector>

#include "kvstore/index/prefix_index.h"

namespace kvasir::kvstore {
namespace {

std::string Hex(const PrefixHash& hash) {
  std::string text;
  for (uint8_t byte : hash) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

// The values are part of the format of stored blocks, so they may change only with its version.
// Made with hashlib from the encoding in prefix_hash.cc.
TEST(PrefixHash, ValuesAreThoseOfTheFormat) {
  const PrefixHash scope = HashScope({.tenant = "a",
                                      .weights_hash = std::string(32, 'w'),
                                      .kv_form = "rotated/bfloat16",
                                      .prefill_policy = ""});
  EXPECT_EQ(Hex(scope), "5325fd96142fcfb20a84309d3d7ed23c18a02bc6c4a06e932789a2311dc0878d");
  std::vector<int32_t> tokens(64);
  for (int32_t i = 0; i < 64; ++i) tokens[static_cast<size_t>(i)] = i * 1000;
  EXPECT_EQ(Hex(HashBlock(scope, tokens, "")),
            "1e9c36eb0cd8fbe66db3589d0ecbc9741f5fd245ff7045a66955a26853507ef0");
}

// Fields that run into each other, hold length-like bytes or are empty must not collide.
TEST(PrefixHash, DifferentScopesNeverEncodeAlike) {
  std::mt19937 rng(1);
  const auto field = [&] {
    std::string text;
    for (uint64_t n = rng() % 4; n > 0; --n) text += "\0\1\3a"[rng() % 4];
    return text;
  };
  std::map<PrefixHash, std::tuple<std::string, std::string, std::string, std::string>> seen;
  for (int i = 0; i < 100000; ++i) {
    const PrefixScope s = {
        .tenant = field(), .weights_hash = field(), .kv_form = field(), .prefill_policy = field()};
    const auto fields = std::tuple(s.tenant, s.weights_hash, s.kv_form, s.prefill_policy);
    const auto [it, is_new] = seen.try_emplace(HashScope(s), fields);
    ASSERT_EQ(it->second, fields);
  }
  EXPECT_GT(seen.size(), 10000u);
}

TEST(PrefixHash, BlocksDifferByParentTokensTheirNumberAndDecodePolicy) {
  std::mt19937 rng(2);
  using Fields = std::tuple<uint8_t, std::vector<int32_t>, std::string>;
  std::map<PrefixHash, Fields> seen;
  for (int i = 0; i < 100000; ++i) {
    Fields fields;
    auto& [parent_byte, tokens, policy] = fields;
    parent_byte = static_cast<uint8_t>(rng() % 3);
    for (uint64_t n = rng() % 5; n > 0; --n) tokens.push_back(static_cast<int32_t>(rng() % 3) - 1);
    for (uint64_t n = rng() % 9; n > 0; --n) policy += "\0\xff"[rng() % 2];
    PrefixHash parent{};
    parent[0] = parent_byte;
    const auto [it, is_new] = seen.try_emplace(HashBlock(parent, tokens, policy), fields);
    ASSERT_EQ(it->second, fields);
  }
}

TEST(PrefixHash, AScopeIsNeverABlock) { EXPECT_NE(HashScope({}), HashBlock({}, {}, "")); }

}  // namespace
}  // namespace kvasir::kvstore
