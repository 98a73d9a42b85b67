#include "coordinator/tokenizer/stop_matcher.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace kvasir::coordinator {

absl::StatusOr<StopStrings> StopStrings::Create(absl::Span<const std::string> stop_strings) {
  for (size_t i = 0; i < stop_strings.size(); ++i) {
    if (stop_strings[i].empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("stop string ", i, " is empty; leave it out or give it text"));
    }
  }
  return StopStrings(stop_strings);
}

StopStrings::StopStrings(absl::Span<const std::string> stop_strings) : trie_(stop_strings) {
  for (const std::string& s : stop_strings) lengths_.push_back(static_cast<int64_t>(s.size()));
  const auto num_nodes = static_cast<size_t>(trie_.num_nodes());
  fail_.assign(num_nodes, ByteTrie::kRoot);
  depth_.assign(num_nodes, 0);
  match_.assign(num_nodes, ByteTrie::kNone);
  // Breadth first, as the failure link of a node leads to a shallower node, which must be finished.
  for (int32_t node = 0; node < trie_.num_nodes(); ++node) {
    const auto n = static_cast<size_t>(node);
    match_[n] = trie_.value(node) != ByteTrie::kNone ? trie_.value(node)
                                                     : match_[static_cast<size_t>(fail_[n])];
    for (int32_t i = 0; i < trie_.num_children(node); ++i) {
      const int32_t child = trie_.first_child(node) + i;
      const auto c = static_cast<size_t>(child);
      depth_[c] = depth_[n] + 1;
      fail_[c] = node == ByteTrie::kRoot ? ByteTrie::kRoot : Next(fail_[n], trie_.label(child));
    }
  }
}

int32_t StopStrings::Next(int32_t node, uint8_t byte) const {
  while (true) {
    const int32_t child = trie_.Child(node, byte);
    if (child != ByteTrie::kNone) return child;
    if (node == ByteTrie::kRoot) return ByteTrie::kRoot;
    node = fail_[static_cast<size_t>(node)];
  }
}

StopMatcher::Output StopMatcher::Push(absl::string_view text) {
  if (stopped_) return {};
  Output output;
  const size_t new_begin = buffer_.size();
  buffer_.append(text.data(), text.size());
  size_t emit_end = 0;
  for (size_t pos = new_begin; pos < buffer_.size() && !stopped_; ++pos) {
    node_ = stops_->Next(node_, static_cast<uint8_t>(buffer_[pos]));
    const int32_t match = stops_->match_[static_cast<size_t>(node_)];
    if (match == ByteTrie::kNone) continue;
    stopped_ = true;
    output.stopped_by = match;
    emit_end = pos + 1;
    if (stop_text_ == StopText::kExclude) {
      emit_end -= static_cast<size_t>(stops_->lengths_[static_cast<size_t>(match)]);
    }
  }
  if (!stopped_) {
    emit_end = buffer_.size() - static_cast<size_t>(stops_->depth_[static_cast<size_t>(node_)]);
  }
  output.text = buffer_.substr(begin_, emit_end - begin_);
  begin_ = emit_end;
  if (begin_ > buffer_.size() / 2) {  // amortized: moves no more bytes than were emitted
    buffer_.erase(0, begin_);
    begin_ = 0;
  }
  return output;
}

std::string StopMatcher::Flush() {
  if (stopped_) return "";
  stopped_ = true;
  return buffer_.substr(begin_);
}

}  // namespace kvasir::coordinator
