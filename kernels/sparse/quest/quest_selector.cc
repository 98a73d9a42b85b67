#include "kernels/sparse/quest/quest_selector.h"

#include <algorithm>
#include <array>
#include <span>

#include "kernels/base/cpu_features.h"
#include "kernels/base/dtype.h"
#include "kernels/base/status_macros.h"
#include "kernels/sparse/quest/quest_score.h"
#include "kernels/sparse/ranking.h"
#include "kernels/sparse/select_common.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kCacheLine = 64;

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
    pages = pieces.Take<Ranked>(CeilPages(context));
    workspace = pieces.Take<std::byte>(QuestScoreWorkspaceBytes(d));
  }

  float* signed_q;  // [rows of the largest block x G, 2 * head_dim], or bfloat16
  Ranked* pages;    // [pages of the longest context]
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
  Row(const SelectRow& row, const ScoreKernel& kernel, const ThreadMemory& memory)
      : row_(row), kernel_(kernel), memory_(memory) {}

  void Run() {
    row_.header = MakeHeader(row_.block, row_.numbers);
    if (row_.header.kind == SelectionHeader::Kind::kAll) return;
    const PageRange candidates = Candidates(row_.header);
    const int64_t count = std::min(CeilPages(row_.numbers.budget_tokens), candidates.size());
    if (count == 0) return;
    ScorePages(candidates);
    const std::span pages(memory_.pages, static_cast<size_t>(candidates.size()));
    KeepBest(pages, count);
    for (int64_t i = 0; i < count; ++i) {
      const Ranked best = pages[static_cast<size_t>(i)];
      row_.list[i] = {
          .page = best.item(), .chosen = ~uint64_t{0}, .live = ~uint64_t{0}, .score = best.score()};
    }
    row_.header.count = static_cast<int32_t>(count);
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
        memory_.pages[begin - candidates.begin + i] = Ranked(scores[i], begin + i);
      }
      bounds = next;
    }
  }

  // Of kQuestScorePages pages from `begin`; null behind the candidates and where there is no block.
  Bounds FindBounds(PageRange candidates, int64_t begin) const {
    Bounds bounds = {};
    const int64_t count = std::min(kQuestScorePages, candidates.end - begin);
    for (int64_t i = 0; i < count; ++i) {
      if (row_.p.kv.row(row_.block.slot, begin + i) < 0) continue;
      const std::byte* found =
          row_.p.kv.Bounds(row_.block.slot, begin + i, row_.p.layer, row_.kv_head);
      for (int64_t at = 0; at < row_.p.kv.layout.page_bounds_bytes(); at += kCacheLine) {
        __builtin_prefetch(found + at);
      }
      bounds[static_cast<size_t>(i)] = found;
    }
    return bounds;
  }

  template <typename From, typename To>
  void SplitQueries(To* to) {
    const int64_t d = row_.p.kv.layout.head_dim;
    for (int64_t r = 0; r < row_.block.num_rows; ++r) {
      for (int64_t g = 0; g < row_.group; ++g) {
        SplitBySign(row_.p.q.As<const From>() + row_.q_row(r, g) * d, d,
                    to + (r * row_.group + g) * 2 * d);
      }
    }
  }
  QuestScoreParams SplitQueries() {
    if (kernel_.bf16_queries) {
      SplitQueries<BFloat16>(reinterpret_cast<BFloat16*>(memory_.signed_q));
    } else if (row_.p.q.dtype() == DType::kFloat32) {
      SplitQueries<float>(memory_.signed_q);
    } else {
      SplitQueries<BFloat16>(memory_.signed_q);
    }
    return {.signed_q = memory_.signed_q,
            .num_queries = row_.block.num_rows * row_.group,
            .head_dim = row_.p.kv.layout.head_dim,
            .workspace = memory_.workspace};
  }

  const SelectRow& row_;
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
  return CheckCapacity("quest", selector, p, out);
}

}  // namespace

int64_t QuestSelector::MaxEntries(const SelectionNumbers& numbers, int64_t tokens) const {
  return std::min(CeilPages(numbers.budget_tokens), CeilPages(tokens));
}

absl::Status QuestSelector::Select(const SelectParams& p, PageSelection& out,
                                   Executor& executor) const {
  KVASIR_RETURN_IF_ERROR(CheckQuest(p, out, *this));
  const ScoreKernel kernel = ChooseKernel(p);
  return WithThreadMemory<ThreadMemory>(
      p, out, executor,
      [&](const SelectRow& row, const ThreadMemory& memory) { Row(row, kernel, memory).Run(); });
}

}  // namespace kvasir::kernels
