// A trie over byte strings, built once. Hides its layout: 12 bytes per node, the children of a node
// side by side in byte order. Used to find added tokens in a text and, with failure links, by the
// stop matcher. Immutable after construction, so it may be shared between threads.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvasir::coordinator {

class ByteTrie {
 public:
  static constexpr int32_t kNone = -1;
  static constexpr int32_t kRoot = 0;

  // Takes a sort plus time linear in the total length. REQUIRES: total length < 2^31 - 1.
  explicit ByteTrie(absl::Span<const std::string> strings);

  // Nodes are numbered in breadth-first order from the root: a deeper node has a larger number, so
  // a child's is larger than its parent's.
  int32_t num_nodes() const { return static_cast<int32_t>(nodes_.size()); }
  int32_t Child(int32_t node, uint8_t byte) const;  // or kNone
  // The children of `node` are the nodes [first_child, first_child + num_children).
  int32_t first_child(int32_t node) const { return nodes_[static_cast<size_t>(node)].first_child; }
  int32_t num_children(int32_t node) const {
    return nodes_[static_cast<size_t>(node)].num_children;
  }
  // Returns the byte on the edge into `node`. REQUIRES: not the root.
  uint8_t label(int32_t node) const { return nodes_[static_cast<size_t>(node)].label; }
  // Returns the index of the string that ends here, of equal ones the first; or kNone.
  int32_t value(int32_t node) const { return nodes_[static_cast<size_t>(node)].value; }

  // Returns the index of the longest string that `text` begins with. Never finds an empty string.
  std::optional<int32_t> LongestPrefix(absl::string_view text) const;

 private:
  struct Node {
    int32_t first_child = 0;
    int32_t value = kNone;
    uint16_t num_children = 0;
    uint8_t label = 0;
  };
  std::vector<Node> nodes_;
};

}  // namespace kvasir::coordinator
