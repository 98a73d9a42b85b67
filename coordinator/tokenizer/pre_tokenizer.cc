#include "coordinator/tokenizer/pre_tokenizer.h"

#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using Behavior = PreTokenizer::Behavior;

// Joins adjacent spans, which are matches or not, into pieces.
class Joiner {
 public:
  Joiner(Behavior behavior, absl::string_view text, PreTokenizer::Sink sink)
      : behavior_(behavior), text_(text), sink_(sink) {}

  absl::Status Add(size_t end, bool is_match) {
    const bool joins = has_previous_ && Joins(is_match);
    if (!joins) KVASIR_RETURN_IF_ERROR(Finish());
    begin_ = joins ? begin_ : end_;
    end_ = end;
    has_previous_ = true;
    previous_is_match_ = is_match;
    return absl::OkStatus();
  }

  // Hands out the last piece.
  absl::Status Finish() {
    if (!has_previous_) return absl::OkStatus();
    has_previous_ = false;
    if (behavior_ == Behavior::kRemoved && previous_is_match_) return absl::OkStatus();
    return sink_(text_.substr(begin_, end_ - begin_));
  }

 private:
  bool Joins(bool is_match) const {
    switch (behavior_) {
      case Behavior::kRemoved:
      case Behavior::kIsolated:
        return false;
      case Behavior::kMergedWithPrevious:
        return is_match && !previous_is_match_;
      case Behavior::kMergedWithNext:
        return !is_match && previous_is_match_;
      case Behavior::kContiguous:
        return is_match == previous_is_match_;
    }
    return false;
  }

  Behavior behavior_;
  absl::string_view text_;
  PreTokenizer::Sink sink_;
  size_t begin_ = 0;
  size_t end_ = 0;
  bool has_previous_ = false;
  bool previous_is_match_ = false;
};

absl::Status RunSplit(const PreTokenizer::Split& split, absl::string_view text,
                      SplitRegex::Scratch* scratch, PreTokenizer::Sink sink) {
  Joiner joiner(split.behavior, text, sink);
  size_t pos = 0;
  while (pos < text.size()) {
    KVASIR_ASSIGN_OR_RETURN(const std::optional<SplitRegex::Match> match,
                            split.regex.Find(text, pos, scratch));
    const size_t gap_end = match.has_value() ? match->begin : text.size();
    if (pos < gap_end) KVASIR_RETURN_IF_ERROR(joiner.Add(gap_end, split.invert));
    pos = gap_end;
    if (match.has_value()) {
      KVASIR_RETURN_IF_ERROR(joiner.Add(match->end, !split.invert));
      pos = match->end;
    }
  }
  return joiner.Finish();
}

std::string WithMarks(const PreTokenizer::MarkSpaces& rule, absl::string_view piece,
                      TextPosition position) {
  using Prepend = PreTokenizer::MarkSpaces::Prepend;
  std::string marked = absl::StrReplaceAll(piece, {{" ", rule.mark}});
  const bool prepends = rule.prepend == Prepend::kAlways ||
                        (rule.prepend == Prepend::kFirst && position == TextPosition::kBegin);
  if (prepends && !absl::StartsWith(marked, rule.mark)) marked.insert(0, rule.mark);
  return marked;
}

}  // namespace

absl::Status PreTokenizer::Run(absl::string_view text, TextPosition position,
                               SplitRegex::Scratch* scratch, Sink sink) const {
  return RunFrom(0, text, position, scratch, sink);
}

absl::Status PreTokenizer::RunFrom(size_t stage, absl::string_view piece, TextPosition position,
                                   SplitRegex::Scratch* scratch, Sink sink) const {
  if (piece.empty()) return absl::OkStatus();
  if (stage == stages_.size()) return sink(piece);
  if (const auto* split = std::get_if<Split>(&stages_[stage])) {
    return RunSplit(*split, piece, scratch, [&](absl::string_view part) {
      const bool begins = part.data() == piece.data();
      return RunFrom(stage + 1, part, begins ? position : TextPosition::kInside, scratch, sink);
    });
  }
  if (const auto* marks = std::get_if<MarkSpaces>(&stages_[stage])) {
    return RunFrom(stage + 1, WithMarks(*marks, piece, position), position, scratch, sink);
  }
  if (absl::StartsWith(piece, " ")) return RunFrom(stage + 1, piece, position, scratch, sink);
  return RunFrom(stage + 1, absl::StrCat(" ", piece), position, scratch, sink);
}

}  // namespace kvasir::coordinator
