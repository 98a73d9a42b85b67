#include "coordinator/tokenizer/byte_trie.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <random>
#include <string>
#include <vector>

namespace kvasir::coordinator {
namespace {

TEST(ByteTrieTest, FindsTheLongestStringThatATextBeginsWith) {
  const ByteTrie trie(std::vector<std::string>{"a", "abc", "b", "\xFF\x80", "\x7F"});
  EXPECT_EQ(trie.LongestPrefix("abcd"), 1);
  EXPECT_EQ(trie.LongestPrefix("abd"), 0);
  EXPECT_EQ(trie.LongestPrefix("\xFF\x80z"), 3);
  EXPECT_EQ(trie.LongestPrefix("\x7F"), 4);
  EXPECT_EQ(trie.LongestPrefix("\xFF"), std::nullopt);
  EXPECT_EQ(trie.LongestPrefix(""), std::nullopt);
  EXPECT_EQ(trie.LongestPrefix("ca"), std::nullopt);
}

TEST(ByteTrieTest, OfEqualStringsTheFirstCounts) {
  const ByteTrie trie(std::vector<std::string>{"x", "ab", "ab", "ab"});
  EXPECT_EQ(trie.LongestPrefix("ab"), 1);
}

TEST(ByteTrieTest, AnEmptyTrieFindsNothing) {
  EXPECT_EQ(ByteTrie({}).LongestPrefix("a"), std::nullopt);
  EXPECT_EQ(ByteTrie({}).num_nodes(), 1);
}

TEST(ByteTrieTest, AgreesWithComparingEveryString) {
  std::mt19937 random(1);
  const auto random_string = [&](size_t max_length) {
    std::string s(1 + random() % max_length, '\0');
    for (char& c : s) c = static_cast<char>("ab\x80\xFF"[random() % 4]);
    return s;
  };
  std::vector<std::string> strings;
  for (int i = 0; i < 60; ++i) strings.push_back(random_string(6));
  const ByteTrie trie(strings);
  for (int i = 0; i < 5000; ++i) {
    const std::string text = random_string(10);
    std::string longest;
    for (const std::string& s : strings) {
      if (text.compare(0, s.size(), s) == 0 && s.size() > longest.size()) longest = s;
    }
    const auto found = trie.LongestPrefix(text);
    ASSERT_EQ(found.has_value(), !longest.empty());
    if (found.has_value()) {
      EXPECT_EQ(std::find(strings.begin(), strings.end(), longest) - strings.begin(), *found);
    }
  }
}

TEST(ByteTrieTest, ChildrenComeAfterTheirParents) {
  const ByteTrie trie(std::vector<std::string>{"abc", "abd", "b", "ba"});
  EXPECT_EQ(trie.num_nodes(), 7);
  for (int32_t node = 0; node < trie.num_nodes(); ++node) {
    for (int32_t i = 0; i < trie.num_children(node); ++i) {
      const int32_t child = trie.first_child(node) + i;
      EXPECT_GT(child, node);
      EXPECT_EQ(trie.Child(node, trie.label(child)), child);
    }
  }
}

}  // namespace
}  // namespace kvasir::coordinator
