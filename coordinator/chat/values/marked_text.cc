#include "coordinator/chat/values/marked_text.h"

#include <algorithm>

namespace kvasir::coordinator {

MarkedText::MarkedText(std::string bytes, Source source) : bytes_(std::move(bytes)) {
  if (source == Source::kClient) Mark(0, bytes_.size());
}

void MarkedText::Mark(size_t begin, size_t end) {
  if (begin == end) return;
  if (!spans_.empty() && spans_.back().end == begin) {
    spans_.back().end = end;
  } else {
    spans_.push_back({begin, end});
  }
}

void MarkedText::Append(absl::string_view bytes, Source source) {
  bytes_.append(bytes.data(), bytes.size());
  if (source == Source::kClient) Mark(bytes_.size() - bytes.size(), bytes_.size());
}

void MarkedText::AppendPart(const MarkedText& other, size_t begin, size_t end) {
  const size_t offset = bytes_.size();
  bytes_.append(other.bytes_, begin, end - begin);
  auto span =
      std::partition_point(other.spans_.begin(), other.spans_.end(),
                           [&](const TextSpan& candidate) { return candidate.end <= begin; });
  for (; span != other.spans_.end() && span->begin < end; ++span) {
    Mark(offset + std::max(span->begin, begin) - begin, offset + std::min(span->end, end) - begin);
  }
}

MarkedText MarkedText::Part(size_t begin, size_t end) const {
  MarkedText part;
  part.AppendPart(*this, begin, end);
  return part;
}

void MarkedText::Truncate(size_t size) {
  bytes_.resize(size);
  while (!spans_.empty() && spans_.back().begin >= size) spans_.pop_back();
  if (!spans_.empty()) spans_.back().end = std::min(spans_.back().end, size);
}

MarkedText MarkedText::Remade(std::string bytes) const {
  return MarkedText(std::move(bytes), spans_.empty() ? Source::kTemplate : Source::kClient);
}

}  // namespace kvasir::coordinator
