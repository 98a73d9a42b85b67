#include "kernels/sparse/quest/quest_selector.h"

#include <algorithm>
#include <span>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

#include "kernels/base/dtype.h"
#include "kernels/base/status_macros.h"
#include "kernels/sparse/common/ranking.h"
#include "kernels/sparse/common/select_common.h"
#include "kernels/sparse/key_logits/key_logits.h"
#include "kernels/sparse/page_scores/page_scores.h"

namespace kvasir::kernels {
namespace {

// Working memory of one thread of a Select call.
struct ThreadMemory {
  ThreadMemory(ScratchPieces& pieces, const SelectParams& p) {
    const int64_t d = p.kv.layout.head_dim;
    int64_t rows = 0;
    int64_t context = 0;
    for (const QueryTile& tile : p.tiles) {
      rows = std::max(rows, tile.num_rows);
      context = std::max(context, tile.first_position + 1);
    }
    query = pieces.Take<float>(d);
    signed_q = pieces.Take<float>(rows * p.q.dim(1) / p.kv.layout.num_kv_heads * 2 * d);
    scores = pieces.Take<float>(CeilPages(context));
    pages = pieces.Take<Ranked>(CeilPages(context));
    workspace = pieces.Take<std::byte>(QuestScoreWorkspaceBytes(d));
  }

  float* query;
  float* signed_q;  // [rows of the largest tile x G, 2 * head_dim], or bfloat16
  float* scores;    // [pages of the longest context]
  Ranked* pages;    // likewise
  std::byte* workspace;
};

// The selection of one (query tile, KV head).
class Row {
 public:
  Row(const SelectRow& row, QuestScore score, const PageScoreKernel& kernel,
      const ThreadMemory& memory)
      : row_(row), score_(score), kernel_(kernel), memory_(memory) {}

  void Run() {
    row_.header = MakeHeader(row_.tile, row_.numbers);
    if (row_.header.kind == SelectionHeader::Kind::kAll) return;
    const PageRange candidates = CandidatePages(row_.header, row_.numbers);
    const int64_t count = std::min(CeilPages(row_.numbers.budget_tokens), candidates.size());
    if (count == 0) return;
    ScorePages(row_, kernel_.scores, SplitQueries(), candidates.begin, candidates.end,
               memory_.scores);
    for (int64_t i = 0; i < candidates.size(); ++i) {
      memory_.pages[i] = Ranked(memory_.scores[i], candidates.begin + i);
    }
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
  template <typename From, typename To>
  void SplitQueries(To* to) {
    const int64_t d = row_.p.kv.layout.head_dim;
    for (int64_t r = 0; r < row_.tile.num_rows; ++r) {
      for (int64_t g = 0; g < row_.group; ++g) {
        To* signed_q = to + (r * row_.group + g) * 2 * d;
        if (row_.p.rope == nullptr) {
          SplitBySign(row_.p.q.As<const From>() + row_.q_row(r, g) * d, d, score_, signed_q);
        } else {
          LoadDistantQuery(row_, r, g, memory_.query);
          SplitBySign(memory_.query, d, score_, signed_q);
        }
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
            .num_queries = row_.tile.num_rows * row_.group,
            .head_dim = row_.p.kv.layout.head_dim,
            .workspace = memory_.workspace};
  }

  const SelectRow& row_;
  const QuestScore score_;
  const PageScoreKernel& kernel_;
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

absl::StatusOr<QuestScore> ScoreNamed(absl::string_view name) {
  if (name == "bound") return QuestScore::kBound;
  if (name == "estimate") return QuestScore::kEstimate;
  return absl::InvalidArgumentError(
      absl::StrCat("quest has no score '", name, "'; there are bound and estimate"));
}

}  // namespace

absl::StatusOr<QuestScore> QuestSelector::Parse(const MethodOptions& options) {
  QuestScore score = QuestScore::kEstimate;
  for (const MethodOption& option : options) {
    if (option.name != "score") {
      return absl::InvalidArgumentError(
          absl::StrCat("quest has no option '", option.name, "'; its option is score"));
    }
    KVASIR_ASSIGN_OR_RETURN(score, ScoreNamed(option.value));
  }
  return score;
}

absl::StatusOr<std::unique_ptr<Selector>> QuestSelector::Create(const MethodOptions& options) {
  KVASIR_ASSIGN_OR_RETURN(const QuestScore score, Parse(options));
  return std::make_unique<QuestSelector>(score);
}

int64_t QuestSelector::MaxEntries(const PolicyNumbers& numbers, int64_t tokens) const {
  return std::min(CeilPages(numbers.budget_tokens), CeilPages(tokens));
}

absl::Status QuestSelector::Select(const SelectParams& p, PageSelection& out,
                                   Executor& executor) const {
  KVASIR_RETURN_IF_ERROR(CheckQuest(p, out, *this));
  ReserveDistances(p, executor);
  // Queries that are rotated here stay in float32.
  const PageScoreKernel kernel =
      ChoosePageScoreKernel(p.kv.layout, p.rope == nullptr ? p.q.dtype() : DType::kFloat32);
  return WithThreadMemory(
      p, out, executor, [&](ScratchPieces& pieces) { return ThreadMemory(pieces, p); },
      [&](const SelectRow& row, const ThreadMemory& memory) {
        Row(row, score_, kernel, memory).Run();
      });
}

}  // namespace kvasir::kernels
