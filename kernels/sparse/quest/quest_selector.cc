#include "kernels/sparse/quest/quest_selector.h"

#include <algorithm>
#include <span>

#include "absl/strings/str_cat.h"

#include "kernels/base/dtype.h"
#include "kernels/base/status_macros.h"
#include "kernels/sparse/quest/page_ranking.h"
#include "kernels/sparse/quest/quest_score.h"
#include "kernels/sparse/select_common.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kScoreBatch = 64;  // pages scored at a time

constexpr int64_t CeilPages(int64_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

// Pages that intersect [sink_end, window_begin).
struct PageRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

PageRange Candidates(const SelectionHeader& header) {
  if (header.sink_end >= header.window_begin) return {};
  return {.begin = header.sink_end / kPageTokens, .end = CeilPages(header.window_begin)};
}

// Memory of one thread of a Select call.
struct ThreadScratch {
  float* signed_q = nullptr;    // [rows of the largest block x G, 2 * head_dim]
  RankedPage* pages = nullptr;  // [pages of the longest context]
};

struct ScratchSizes {
  int64_t signed_q_bytes = 0;
  int64_t pages_bytes = 0;
  int64_t bytes() const { return signed_q_bytes + pages_bytes; }
};

constexpr int64_t RoundUpToCacheLine(int64_t bytes) { return (bytes + 63) / 64 * 64; }

ScratchSizes SizesFor(const SelectParams& p) {
  int64_t rows = 0;
  int64_t pages = 0;
  for (const QueryBlock& block : p.blocks) {
    rows = std::max(rows, block.num_rows);
    pages = std::max(pages, CeilPages(block.first_position + 1));
  }
  const int64_t group = p.q.dim(1) / p.kv.layout.num_kv_heads;
  const int64_t signed_q = rows * group * 2 * p.kv.layout.head_dim * int64_t{sizeof(float)};
  return {.signed_q_bytes = RoundUpToCacheLine(signed_q),
          .pages_bytes = RoundUpToCacheLine(pages * int64_t{sizeof(RankedPage)})};
}

template <typename Activation>
void SplitBySign(const Activation* q, int64_t head_dim, float* signed_q) {
  for (int64_t i = 0; i < head_dim; ++i) {
    const float x = static_cast<float>(q[i]);
    // NaN goes to both halves.
    signed_q[i] = x > 0 ? 0.0f : x;
    signed_q[head_dim + i] = x < 0 ? 0.0f : x;
  }
}

// One (query block, KV head).
class Row {
 public:
  Row(const SelectParams& p, const PageSelection& out, int64_t row, ThreadScratch scratch)
      : p_(p),
        block_(p.blocks[static_cast<size_t>(row / p.kv.layout.num_kv_heads)]),
        numbers_(p.numbers[static_cast<size_t>(row / p.kv.layout.num_kv_heads)]),
        kv_head_(row % p.kv.layout.num_kv_heads),
        header_(out.header(row)),
        list_(out.list(row)),
        scratch_(scratch) {}

  void Run() {
    header_ = MakeHeader(block_, numbers_);
    if (header_.kind == SelectionHeader::Kind::kAll) return;
    const PageRange candidates = Candidates(header_);
    const int64_t count = std::min(CeilPages(numbers_.budget_tokens), candidates.size());
    if (count == 0) return;
    ScorePages(candidates);
    const std::span pages(scratch_.pages, static_cast<size_t>(candidates.size()));
    KeepBest(pages, count);
    for (int64_t i = 0; i < count; ++i) {
      const RankedPage best = pages[static_cast<size_t>(i)];
      list_[i] = {
          .page = best.page(), .chosen = ~uint64_t{0}, .live = ~uint64_t{0}, .score = best.score()};
    }
    header_.count = static_cast<int32_t>(count);
  }

 private:
  // Fills scratch_.pages.
  void ScorePages(PageRange candidates) {
    const QuestScoreParams params = SplitQueries();
    for (int64_t begin = candidates.begin; begin < candidates.end; begin += kScoreBatch) {
      const int64_t count = std::min(kScoreBatch, candidates.end - begin);
      const std::byte* bounds[kScoreBatch];
      float scores[kScoreBatch];
      for (int64_t i = 0; i < count; ++i) {
        const bool bound = p_.kv.row(block_.slot, begin + i) >= 0;
        bounds[i] = bound ? p_.kv.Bounds(block_.slot, begin + i, p_.layer, kv_head_) : nullptr;
      }
      QuestScoresReference(params, bounds, count, scores);
      for (int64_t i = 0; i < count; ++i) {
        scratch_.pages[begin - candidates.begin + i] = RankedPage(scores[i], begin + i);
      }
    }
  }

  QuestScoreParams SplitQueries() {
    const int64_t d = p_.kv.layout.head_dim;
    const int64_t heads = p_.q.dim(1);
    const int64_t group = heads / p_.kv.layout.num_kv_heads;
    for (int64_t r = 0; r < block_.num_rows; ++r) {
      for (int64_t g = 0; g < group; ++g) {
        const int64_t source = ((block_.first_row + r) * heads + kv_head_ * group + g) * d;
        float* signed_q = scratch_.signed_q + (r * group + g) * 2 * d;
        if (p_.q.dtype() == DType::kFloat32) {
          SplitBySign(p_.q.As<const float>() + source, d, signed_q);
        } else {
          SplitBySign(p_.q.As<const BFloat16>() + source, d, signed_q);
        }
      }
    }
    return {.signed_q = scratch_.signed_q,
            .num_queries = block_.num_rows * group,
            .head_dim = d,
            .dtype = p_.kv.layout.dtype};
  }

  const SelectParams& p_;
  const QueryBlock& block_;
  const SelectionNumbers& numbers_;
  const int64_t kv_head_;
  SelectionHeader& header_;
  SelectionEntry* list_;
  const ThreadScratch scratch_;
};

absl::Status CheckQuest(const SelectParams& p, const PageSelection& out,
                        const QuestSelector& selector) {
  KVASIR_RETURN_IF_ERROR(CheckSelect("quest", p, out));
  if (p.kv.bounds == nullptr) {
    return absl::FailedPreconditionError(
        "quest: the KV has no page bounds; declare the policy before the KV store is made");
  }
  for (size_t i = 0; i < p.blocks.size(); ++i) {
    const int64_t context = p.blocks[i].first_position + p.blocks[i].num_rows;
    const int64_t needed = selector.MaxEntries(p.numbers[i], context);
    if (needed <= out.capacity) continue;
    return absl::InvalidArgumentError(absl::StrCat("quest: query block ", i, " may choose ", needed,
                                                   " pages, a row of the selection holds ",
                                                   out.capacity));
  }
  return absl::OkStatus();
}

}  // namespace

int64_t QuestSelector::MaxEntries(const SelectionNumbers& numbers, int64_t tokens) const {
  return std::min(CeilPages(numbers.budget_tokens), CeilPages(tokens));
}

absl::Status QuestSelector::Select(const SelectParams& p, PageSelection& out,
                                   Executor& executor) const {
  KVASIR_RETURN_IF_ERROR(CheckQuest(p, out, *this));
  const ScratchSizes sizes = SizesFor(p);
  KVASIR_ASSIGN_OR_RETURN(std::byte* const memory,
                          p.scratch->Reserve(sizes.bytes() * executor.num_threads()));
  executor.ParallelFor(out.num_rows, [&](int64_t row, int thread) {
    std::byte* mine = memory + sizes.bytes() * thread;
    const ThreadScratch scratch = {
        .signed_q = reinterpret_cast<float*>(mine),
        .pages = reinterpret_cast<RankedPage*>(mine + sizes.signed_q_bytes)};
    Row(p, out, row, scratch).Run();
  });
  return absl::OkStatus();
}

}  // namespace kvasir::kernels
