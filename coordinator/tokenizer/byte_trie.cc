#include "coordinator/tokenizer/byte_trie.h"

#include <algorithm>
#include <numeric>

namespace kvasir::coordinator {

ByteTrie::ByteTrie(absl::Span<const std::string> strings) {
  std::vector<int32_t> order(strings.size());
  std::iota(order.begin(), order.end(), 0);
  // Stable, so that equal strings stay in order. std::string compares as unsigned bytes.
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return strings[static_cast<size_t>(a)] < strings[static_cast<size_t>(b)];
  });
  // Sorted strings [begin, end) of node i, which agree in their first `depth` bytes.
  struct Range {
    size_t begin, end, depth;
  };
  std::vector<Range> ranges = {{0, order.size(), 0}};
  nodes_.resize(1);
  const auto string_at = [&](size_t i) -> const std::string& {
    return strings[static_cast<size_t>(order[i])];
  };
  for (size_t node = 0; node < nodes_.size(); ++node) {
    auto [begin, end, depth] = ranges[node];
    if (begin < end && string_at(begin).size() == depth) nodes_[node].value = order[begin];
    while (begin < end && string_at(begin).size() == depth) ++begin;
    nodes_[node].first_child = static_cast<int32_t>(nodes_.size());
    while (begin < end) {
      const char byte = string_at(begin)[depth];
      size_t child_end = begin + 1;
      while (child_end < end && string_at(child_end)[depth] == byte) ++child_end;
      nodes_.push_back({.label = static_cast<uint8_t>(byte)});
      ranges.push_back({begin, child_end, depth + 1});
      ++nodes_[node].num_children;
      begin = child_end;
    }
  }
}

int32_t ByteTrie::Child(int32_t node, uint8_t byte) const {
  const Node& parent = nodes_[static_cast<size_t>(node)];
  const auto begin = nodes_.begin() + parent.first_child;
  const auto end = begin + parent.num_children;
  const auto child = std::lower_bound(
      begin, end, byte, [](const Node& candidate, uint8_t b) { return candidate.label < b; });
  if (child == end || child->label != byte) return kNone;
  return static_cast<int32_t>(child - nodes_.begin());
}

std::optional<int32_t> ByteTrie::LongestPrefix(absl::string_view text) const {
  std::optional<int32_t> longest;
  int32_t node = kRoot;
  for (const char byte : text) {
    node = Child(node, static_cast<uint8_t>(byte));
    if (node == kNone) break;
    if (value(node) != kNone) longest = value(node);
  }
  return longest;
}

}  // namespace kvasir::coordinator
