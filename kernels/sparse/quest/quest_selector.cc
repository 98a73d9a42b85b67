#include "kernels/sparse/quest/quest_selector.h"

#include <algorithm>
#include <array>
#include <functional>
#include <span>

#include "absl/strings/str_cat.h"

#include "kernels/base/cpu_features.h"
#include "kernels/base/dtype.h"
#include "kernels/base/status_macros.h"
#include "kernels/sparse/quest/page_ranking.h"
#include "kernels/sparse/quest/quest_score.h"
#include "kernels/sparse/select_common.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kCacheLine = 64;

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

// Which score function serves a call, and whether it takes queries in bfloat16.
struct ScoreKernel {
  QuestScoreFn* scores = nullptr;
  bool bf16_queries = false;
};

ScoreKernel ChooseKernel(const SelectParams& p) {
  const bool bf16_kv = p.kv.layout.dtype == DType::kBFloat16;
  if (p.kv.layout.head_dim % kQuestScoreHeadDimStep == 0) {
    if (bf16_kv && p.q.dtype() == DType::kBFloat16 && CpuHasAvx512Bf16()) {
      return {.scores = QuestScoresAvx512Bf16Pairs, .bf16_queries = true};
    }
    if (CpuHasAvx512()) {
      return {.scores = bf16_kv ? QuestScoresAvx512BFloat16 : QuestScoresAvx512Float32};
    }
  }
  return {.scores = bf16_kv ? QuestScoresBFloat16 : QuestScoresFloat32};
}

// Memory of one thread of a Select call.
struct ThreadMemory {
  ThreadMemory(ScratchPieces& pieces, const SelectParams& p) {
    const int64_t d = p.kv.layout.head_dim;
    int64_t rows = 0;
    int64_t context = 0;
    for (const QueryBlock& block : p.blocks) {
      rows = std::max(rows, block.num_rows);
      context = std::max(context, block.first_position + 1);
    }
    signed_q = pieces.Take<float>(rows * p.q.dim(1) / p.kv.layout.num_kv_heads * 2 * d);
    pages = pieces.Take<RankedPage>(CeilPages(context));
    workspace = pieces.Take<std::byte>(QuestScoreWorkspaceBytes(d));
  }

  float* signed_q;    // [rows of the largest block x G, 2 * head_dim], or bfloat16
  RankedPage* pages;  // [pages of the longest context]
  std::byte* workspace;
};

template <typename From, typename To>
void SplitBySign(const From* q, int64_t head_dim, To* signed_q) {
  for (int64_t i = 0; i < head_dim; ++i) {
    const float x = static_cast<float>(q[i]);
    // NaN goes to both halves.
    signed_q[i] = static_cast<To>(x > 0 ? 0.0f : x);
    signed_q[head_dim + i] = static_cast<To>(x < 0 ? 0.0f : x);
  }
}

// One (query block, KV head).
class Row {
 public:
  Row(const SelectParams& p, const PageSelection& out, int64_t row, const ScoreKernel& kernel,
      const ThreadMemory& memory)
      : p_(p),
        block_(p.blocks[static_cast<size_t>(row / p.kv.layout.num_kv_heads)]),
        numbers_(p.numbers[static_cast<size_t>(row / p.kv.layout.num_kv_heads)]),
        kv_head_(row % p.kv.layout.num_kv_heads),
        header_(out.header(row)),
        list_(out.list(row)),
        kernel_(kernel),
        memory_(memory) {}

  void Run() {
    header_ = MakeHeader(block_, numbers_);
    if (header_.kind == SelectionHeader::Kind::kAll) return;
    const PageRange candidates = Candidates(header_);
    const int64_t count = std::min(CeilPages(numbers_.budget_tokens), candidates.size());
    if (count == 0) return;
    ScorePages(candidates);
    const std::span pages(memory_.pages, static_cast<size_t>(candidates.size()));
    KeepBest(pages, count);
    for (int64_t i = 0; i < count; ++i) {
      const RankedPage best = pages[static_cast<size_t>(i)];
      list_[i] = {
          .page = best.page(), .chosen = ~uint64_t{0}, .live = ~uint64_t{0}, .score = best.score()};
    }
    header_.count = static_cast<int32_t>(count);
  }

 private:
  using Bounds = std::array<const std::byte*, kQuestScorePages>;

  // Fills memory_.pages. The bounds of pages to come are fetched while others are scored: they lie
  // wherever their blocks do.
  void ScorePages(PageRange candidates) {
    const QuestScoreParams params = SplitQueries();
    Bounds bounds = FindBounds(candidates, candidates.begin);
    for (int64_t begin = candidates.begin; begin < candidates.end; begin += kQuestScorePages) {
      const Bounds next = FindBounds(candidates, begin + kQuestScorePages);
      float scores[kQuestScorePages];
      kernel_.scores(params, bounds.data(), scores);
      const int64_t count = std::min(kQuestScorePages, candidates.end - begin);
      for (int64_t i = 0; i < count; ++i) {
        memory_.pages[begin - candidates.begin + i] = RankedPage(scores[i], begin + i);
      }
      bounds = next;
    }
  }

  // Of kQuestScorePages pages from `begin`; null behind the candidates and where there is no block.
  Bounds FindBounds(PageRange candidates, int64_t begin) const {
    Bounds bounds = {};
    const int64_t count = std::min(kQuestScorePages, candidates.end - begin);
    for (int64_t i = 0; i < count; ++i) {
      if (p_.kv.row(block_.slot, begin + i) < 0) continue;
      const std::byte* found = p_.kv.Bounds(block_.slot, begin + i, p_.layer, kv_head_);
      for (int64_t at = 0; at < p_.kv.layout.page_bounds_bytes(); at += kCacheLine) {
        __builtin_prefetch(found + at);
      }
      bounds[static_cast<size_t>(i)] = found;
    }
    return bounds;
  }

  template <typename From, typename To>
  void SplitQueries(To* to) {
    const int64_t d = p_.kv.layout.head_dim;
    const int64_t heads = p_.q.dim(1);
    const int64_t group = heads / p_.kv.layout.num_kv_heads;
    for (int64_t r = 0; r < block_.num_rows; ++r) {
      for (int64_t g = 0; g < group; ++g) {
        const int64_t row = (block_.first_row + r) * heads + kv_head_ * group + g;
        SplitBySign(p_.q.As<const From>() + row * d, d, to + (r * group + g) * 2 * d);
      }
    }
  }
  QuestScoreParams SplitQueries() {
    if (kernel_.bf16_queries) {
      SplitQueries<BFloat16>(reinterpret_cast<BFloat16*>(memory_.signed_q));
    } else if (p_.q.dtype() == DType::kFloat32) {
      SplitQueries<float>(memory_.signed_q);
    } else {
      SplitQueries<BFloat16>(memory_.signed_q);
    }
    return {.signed_q = memory_.signed_q,
            .num_queries = block_.num_rows * p_.q.dim(1) / p_.kv.layout.num_kv_heads,
            .head_dim = p_.kv.layout.head_dim,
            .workspace = memory_.workspace};
  }

  const SelectParams& p_;
  const QueryBlock& block_;
  const SelectionNumbers& numbers_;
  const int64_t kv_head_;
  SelectionHeader& header_;
  SelectionEntry* list_;
  const ScoreKernel& kernel_;
  const ThreadMemory& memory_;
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
  const ScoreKernel kernel = ChooseKernel(p);
  ScratchPieces counted(nullptr);
  ThreadMemory(counted, p);
  KVASIR_ASSIGN_OR_RETURN(std::byte* const memory,
                          p.scratch->Reserve(counted.bytes() * executor.num_threads()));
  // std::ref: a std::function of a larger closure would allocate.
  const auto select_row = [&](int64_t row, int thread) {
    ScratchPieces pieces(memory + counted.bytes() * thread);
    Row(p, out, row, kernel, ThreadMemory(pieces, p)).Run();
  };
  executor.ParallelFor(out.num_rows, std::ref(select_row));
  return absl::OkStatus();
}

}  // namespace kvasir::kernels
