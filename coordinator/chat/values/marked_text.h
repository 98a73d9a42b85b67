// Text that knows which of its bytes come from the client (messages, tools, variables) and which
// from the chat template: special tokens are parsed in the template's bytes only. Every operation
// of the template engine carries the marks along. A value; not shared between threads.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

#include "coordinator/tokenizer/added_tokens.h"

namespace kvasir::coordinator {

class MarkedText {
 public:
  enum class Source { kTemplate, kClient };

  MarkedText() = default;
  explicit MarkedText(std::string bytes, Source source = Source::kTemplate);

  absl::string_view bytes() const { return bytes_; }
  size_t size() const { return bytes_.size(); }
  bool empty() const { return bytes_.empty(); }
  // The client's bytes: in order, disjoint, not adjacent.
  const std::vector<TextSpan>& client_spans() const { return spans_; }

  void Append(const MarkedText& other) { AppendPart(other, 0, other.size()); }
  void Append(absl::string_view bytes, Source source);
  // Appends the bytes [begin, end) of `other`, which is another object.
  void AppendPart(const MarkedText& other, size_t begin, size_t end);
  MarkedText Part(size_t begin, size_t end) const;
  // Cuts the text to its first `size` bytes.
  void Truncate(size_t size);
  // Returns `bytes`, which were made of this text: the client's if any byte here is.
  MarkedText Remade(std::string bytes) const;

 private:
  void Mark(size_t begin, size_t end);

  std::string bytes_;
  std::vector<TextSpan> spans_;
};

}  // namespace kvasir::coordinator
