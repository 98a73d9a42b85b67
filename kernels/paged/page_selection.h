// PageSelection: the one type between all sparse methods. Row (query tile q, KV head h) says which
// tokens the queries of q attend to in the KV of h:
//
//   kind all :  [0, p]                                                          (dense)
//   kind list:  [0, sink_end)  +  entries inside [sink_end, window_begin)  +  [window_begin, p]
//
// for the query at position p. The attention op applies causality to each query. Sink and window
// are ranges and never appear in the list. An entry may hold any token: the attention op masks
// those outside [sink_end, window_begin), so a list stays right while the window slides over it.
// Pages are logical (block number in the sequence), so moving a page between tiers changes nothing
// here. Entries are unique and ascending by page. A view that owns nothing. Thread-compatible.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "kernels/paged/paged_kv.h"

namespace kvasir::kernels {

struct SelectionHeader {
  enum class Kind : int32_t { kAll = 0, kList = 1 };

  Kind kind = Kind::kAll;
  int32_t count = 0;           // entries in the list
  int64_t sink_end = 0;        // first position after the sink
  int64_t window_begin = 0;    // first position of the window of the tile's first query
  int64_t query_position = 0;  // position of the tile's first query
  int64_t made_at = 0;         // query_position at which the list was made (differs under reuse)
  int64_t compact_length = 0;  // positions of sink and list (compact_positions.h)
  int32_t reused_stages = 0;   // number of the selector's first stages that did not run
};

struct SelectionEntry {
  int64_t page = 0;     // block number in the sequence
  uint64_t chosen = 0;  // bit t: the selector chose token 64 page + t
  uint64_t live = 0;    // subset of `chosen` that pruners kept
  float score = 0;      // the selector's score, larger is better
  int32_t pos0 = 0;     // position of the first chosen token (compact_positions.h)
};

// Counts of the pages and tokens that a row attends to, for its tile's last query.
struct SelectedCounts {
  int32_t pages = 0;
  int32_t tokens = 0;
  int32_t pruned_pages = 0;  // listed pages whose tokens were all pruned
  int32_t unread_pages = 0;  // part of `pages`: attention ended before them
  int32_t is_list = 0;       // 1: the row's kind is kList
  int32_t reused_stages = 0;
};

struct PageSelection {
  SelectionHeader* headers = nullptr;  // [num_rows]
  SelectionEntry* entries = nullptr;   // [num_rows, capacity]
  int64_t num_rows = 0;                // query tiles x KV heads, head fastest
  int64_t capacity = 0;                // entries a row can hold

  SelectionHeader& header(int64_t row) const { return headers[row]; }
  SelectionEntry* list(int64_t row) const { return entries + row * capacity; }
  PageSelection Rows(int64_t begin, int64_t count) const {
    return {.headers = headers + begin,
            .entries = list(begin),
            .num_rows = count,
            .capacity = capacity};
  }
};

// Bits [begin, end) of a page's 64, clamped to the page. `begin` and `end` are offsets in the page.
constexpr uint64_t TokenMask(int64_t begin, int64_t end) {
  // Copies: std::clamp takes references, and on the GPU there is no kPageTokens to refer to.
  begin = std::clamp<int64_t>(begin, 0, int64_t{kPageTokens});
  end = std::clamp<int64_t>(end, 0, int64_t{kPageTokens});
  if (begin >= end) return 0;
  const uint64_t below_end = end == kPageTokens ? ~uint64_t{0} : (uint64_t{1} << end) - 1;
  return below_end & (~uint64_t{0} << begin);
}

// Tokens of a page that lie before the layer's window of the query at `position` (AttendCall in
// attend.h). None where the layer has no window.
KVASIR_HOST_DEVICE constexpr uint64_t BeforeWindow(int64_t window_tokens, int64_t page,
                                                   int64_t position) {
  if (window_tokens == 0) return 0;
  return TokenMask(0, position + 1 - window_tokens - page * kPageTokens);
}

// Whether pruning left nothing of a listed page. Pages that touch sink or window stay attended to.
KVASIR_HOST_DEVICE inline bool IsPrunedPage(const SelectionHeader& header,
                                            const SelectionEntry& entry) {
  const int64_t start = entry.page * kPageTokens;
  const bool in_ranges = start < header.sink_end || start + kPageTokens > header.window_begin;
  return entry.live == 0 && !in_ranges;
}

// Walks the pages that a selection row attends to, ascending, each once, with the mask of its
// tokens. This is the one definition of "attended to", used by attention, accounting and tests.
// Tokens after `last_position` (the tile's last query) are masked. The caller applies causality to
// each query.
//
//   for (SelectedPages walk(header, list, last_position); walk.valid(); walk.Next())
//     use(walk.page(), walk.mask());
class SelectedPages {
 public:
  SelectedPages(const SelectionHeader& header, const SelectionEntry* list, int64_t last_position)
      : header_(header), list_(list), end_(last_position + 1), page_(-1) {
    Next();
  }

  bool valid() const { return page_ * kPageTokens < end_; }
  int64_t page() const { return page_; }
  uint64_t mask() const { return mask_; }
  // Returns the list's entry of the page, or null.
  const SelectionEntry* entry() const {
    return next_ < header_.count && list_[next_].page == page_ ? list_ + next_ : nullptr;
  }
  void Next() { MoveTo(page_ + 1); }
  // Moves forward to the first page that is not before `page`.
  void SkipTo(int64_t page) {
    if (page > page_) MoveTo(page);
  }

 private:
  void MoveTo(int64_t page) {
    do {
      page_ = Follow(page);
      mask_ = MaskOf(page_);
      page = page_ + 1;
    } while (valid() && mask_ == 0);
  }
  // Returns the first page >= `page` that can hold attended tokens.
  int64_t Follow(int64_t page) {
    if (header_.kind == SelectionHeader::Kind::kAll) return page;
    const int64_t start = page * kPageTokens;
    if (start < header_.sink_end) return page;
    if (start + kPageTokens > header_.window_begin) return page;
    while (next_ < header_.count && list_[next_].page < page) ++next_;
    const int64_t window_page = header_.window_begin / kPageTokens;
    if (next_ >= header_.count) return window_page;
    return std::min(list_[next_].page, window_page);
  }
  uint64_t MaskOf(int64_t page) {
    const int64_t start = page * kPageTokens;
    const uint64_t exists = TokenMask(0, end_ - start);
    if (header_.kind == SelectionHeader::Kind::kAll) return exists;
    uint64_t mask = TokenMask(0, header_.sink_end - start) |
                    TokenMask(header_.window_begin - start, kPageTokens);
    while (next_ < header_.count && list_[next_].page < page) ++next_;
    if (next_ < header_.count && list_[next_].page == page) mask |= list_[next_].live;
    return mask & exists;
  }

  const SelectionHeader header_;
  const SelectionEntry* list_;
  int64_t end_;
  int64_t page_;
  uint64_t mask_ = 0;
  int32_t next_ = 0;  // first entry whose page is not below page_
};

}  // namespace kvasir::kernels
