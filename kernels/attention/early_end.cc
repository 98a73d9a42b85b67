#include "kernels/attention/early_end.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvasir::kernels {
namespace {

// Larger than every segment of absolute pages.
constexpr int64_t kFirstSortedSegment = int64_t{1} << 40;

float ScoreOf(const PageStep& step) {
  return step.entry == nullptr || std::isnan(step.entry->score)
             ? -std::numeric_limits<float>::infinity()
             : step.entry->score;
}

// Sorts by descending score, and equal scores by descending page.
void SortByScore(std::span<PageStep> steps) {
  std::sort(steps.begin(), steps.end(), [](const PageStep& a, const PageStep& b) {
    const float x = ScoreOf(a), y = ScoreOf(b);
    return x != y ? x > y : a.page > b.page;
  });
  for (size_t i = 0; i < steps.size(); ++i) {
    steps[i].segment = kFirstSortedSegment + static_cast<int64_t>(i) / kSegmentPages;
  }
}

}  // namespace

int64_t EarlyEnd::MemoryBytes(const AttendParams& p, int64_t pages) {
  const int64_t group = p.q.dim(1) / p.kv.layout.num_kv_heads;
  int64_t bytes = 0;
  for (const Termination& termination : p.terminations) {
    if (termination.terminator == nullptr) continue;
    bytes = std::max(bytes, termination.terminator->RowBytes(group, p.kv.layout.head_dim, pages));
  }
  return bytes;
}

EarlyEnd::EarlyEnd(const AttendParams& p, int64_t row, std::span<PageStep> steps, std::byte* memory)
    : params_(p),
      row_(row),
      steps_(steps),
      watched_{.params = p,
               .tile = p.tiles[static_cast<size_t>(row / p.kv.layout.num_kv_heads)],
               .header = p.selection.header(row),
               .kv_head = row % p.kv.layout.num_kv_heads,
               .skippable = {}} {
  if (p.terminations.empty()) return;
  const Termination& termination =
      p.terminations[static_cast<size_t>(row / p.kv.layout.num_kv_heads)];
  if (termination.terminator == nullptr) return;
  FindSkippable(termination);
  if (skippable_ == end_) return;
  const auto skippable =
      steps_.subspan(static_cast<size_t>(skippable_), static_cast<size_t>(end_ - skippable_));
  if (termination.terminator->order() == ReadingOrder::kImportance) SortByScore(skippable);
  watched_.patience = termination.patience;
  watched_.num_steps = end_ - first_;
  watched_.skippable = skippable;
  terminator_ = termination.terminator->Begin(watched_, memory);
}

void EarlyEnd::FindSkippable(const Termination& termination) {
  const bool lists = watched_.header.kind == SelectionHeader::Kind::kList;
  const int64_t sink_end = lists ? watched_.header.sink_end : termination.sink_end;
  const int64_t window_begin = lists ? watched_.header.window_begin : termination.window_begin;
  const int64_t count = std::ssize(steps_);
  const auto page = [&](int64_t i) { return steps_[static_cast<size_t>(i)].page; };
  first_ = count > 0 && page(0) == 0 ? 1 : 0;
  skippable_ = first_;
  while (skippable_ < count && (page(skippable_) + 1) * kPageTokens > window_begin) ++skippable_;
  end_ = skippable_;
  while (end_ < count && page(end_) * kPageTokens >= sink_end) ++end_;
}

bool EarlyEnd::MaySkip(int64_t next) const {
  return next >= skippable_ && next < end_ && terminator_->MaySettle(next - skippable_);
}

int64_t EarlyEnd::After(const RowProgress& progress, int64_t next) {
  if (next <= first_ || next >= end_) return next;
  const bool settled = terminator_->Settles(progress, std::max<int64_t>(0, next - skippable_));
  if (!settled || next < skippable_) return next;
  CountUnread(next);
  return end_;
}

void EarlyEnd::CountUnread(int64_t begin) {
  UnreadPages& unread = params_.unread[static_cast<size_t>(row_)];
  for (int64_t i = begin; i < end_; ++i) {
    const PageTier tier = params_.kv
                              .Peek(watched_.tile.slot, steps_[static_cast<size_t>(i)].page,
                                    params_.layer, watched_.kv_head)
                              .tier();
    ++(tier == PageTier::kDevice ? unread.device : unread.host);
  }
}

}  // namespace kvasir::kernels
