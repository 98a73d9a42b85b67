#include "kernels/sparse/infinitehip/infinitehip_selector.h"

#include <algorithm>
#include <limits>
#include <span>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/sparse/key_logits.h"
#include "kernels/sparse/quest/page_scores.h"
#include "kernels/sparse/ranking.h"
#include "kernels/sparse/select_common.h"

namespace kvasir::kernels {
namespace {

using Stage = InfiniteHipSelector::Stage;
using Preset = InfiniteHipSelector::Preset;
using Probe = InfiniteHipSelector::Probe;

constexpr Preset kPresets[] = {
    {"3k", {{{256, 32768, 4}, {32, 8192, 4}, {8, 0, 1}}}},
    {"5k", {{{64, 32768, 4}, {32, 16384, 4}, {16, 0, 1}}}},
};
constexpr struct {
  absl::string_view name;
  Probe probe;
} kProbes[] = {{"digest", Probe::kDigest}, {"centre", Probe::kCentre}, {"first", Probe::kFirst}};

constexpr float kNoScore = -std::numeric_limits<float>::infinity();
// Chunks of so few tokens are scored by all of them.
constexpr int64_t kExactChunkTokens = 8;

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How far a list reaches into the window.
constexpr int64_t Overlap(const Preset& preset) {
  return std::max(preset.stages[0].chunk_tokens, kPageTokens);
}

int64_t KeptChunks(const Stage& stage, int64_t budget) {
  return CeilDiv(std::max(stage.keep_tokens, budget), stage.chunk_tokens);
}

// Chunks of stage 1 of a row with candidates.
int64_t FirstChunks(const Preset& preset, const SelectionHeader& header, int64_t window) {
  const int64_t last = header.query_position - (window - Overlap(preset));
  return (last - header.sink_end) / preset.stages[0].chunk_tokens + 1;
}

// Memory of one thread of a Select call.
struct ThreadMemory {
  ThreadMemory(ScratchPieces& pieces, const SelectParams& p, const Preset& preset) {
    const int64_t d = p.kv.layout.head_dim;
    int64_t rows = 0, context = 0, chunks = 0;
    for (size_t i = 0; i < p.blocks.size(); ++i) {
      rows = std::max(rows, p.blocks[i].num_rows);
      context = std::max(context, p.blocks[i].first_position);
      chunks = std::max(chunks, context / preset.stages[0].chunk_tokens + 1);
      for (size_t s = 0; s + 1 < preset.stages.size(); ++s) {
        const Stage& stage = preset.stages[s];
        chunks = std::max(chunks, KeptChunks(stage, p.numbers[i].budget_tokens) *
                                      stage.chunk_tokens / preset.stages[s + 1].chunk_tokens);
      }
    }
    const int64_t queries = rows * p.q.dim(1) / p.kv.layout.num_kv_heads;
    means = pieces.Take<float>(queries * d);
    vector = pieces.Take<float>(d);
    signed_q = pieces.Take<float>(queries * 2 * d);
    page_scores = pieces.Take<float>(CeilPages(context));
    workspace = pieces.Take<std::byte>(QuestScoreWorkspaceBytes(d));
    chunk_begins = pieces.Take<int64_t>(chunks);
    next_begins = pieces.Take<int64_t>(chunks);
    scores = pieces.Take<float>(chunks);
    ranked = pieces.Take<Ranked>(chunks);
  }

  float* means;  // [G, averaged rows, head_dim]
  float* vector;
  float* signed_q;
  float* page_scores;
  std::byte* workspace;
  int64_t* chunk_begins;
  int64_t* next_begins;
  float* scores;
  Ranked* ranked;
};

// The stages in one row with candidates.
class Pruning {
 public:
  Pruning(const SelectRow& row, const Preset& preset, Probe probe, ThreadMemory& memory)
      : row_(row),
        preset_(preset),
        probe_(probe),
        memory_(memory),
        head_dim_(row.p.kv.layout.head_dim),
        logit_(row),
        estimate_(row, memory.vector) {}

  void Run() {
    num_chunks_ = FirstChunks(preset_, row_.header, row_.numbers.window_tokens);
    for (int64_t j = 0; j < num_chunks_; ++j) {
      memory_.chunk_begins[j] = row_.header.sink_end + j * preset_.stages[0].chunk_tokens;
    }
    for (size_t s = 0; s < preset_.stages.size(); ++s) {
      if (s > 0) Split(preset_.stages[s - 1].chunk_tokens, preset_.stages[s].chunk_tokens);
      Keep(preset_.stages[s], s == 0);
    }
    const int64_t block = preset_.stages.back().chunk_tokens;
    ListWriter writer(row_.header, row_.list);
    for (int64_t j = 0; j < num_chunks_; ++j) {
      const int64_t begin = memory_.chunk_begins[j];
      writer.Add(begin, begin + block, memory_.scores[j]);
    }
  }

 private:
  void Split(int64_t chunk, int64_t part) {
    int64_t count = 0;
    for (int64_t j = 0; j < num_chunks_; ++j) {
      for (int64_t at = 0; at < chunk; at += part) {
        memory_.next_begins[count++] = memory_.chunk_begins[j] + at;
      }
    }
    std::swap(memory_.chunk_begins, memory_.next_begins);
    num_chunks_ = count;
  }

  void Keep(const Stage& stage, bool is_first) {
    const int64_t count = KeptChunks(stage, row_.numbers.budget_tokens);
    if (num_chunks_ <= count) {
      std::fill_n(memory_.scores, num_chunks_, 0.0f);
      return;
    }
    AverageQueries(stage.query_stride);
    if (is_first && probe_ == Probe::kDigest) ScoreAllPages(stage.chunk_tokens);
    for (int64_t j = 0; j < num_chunks_; ++j) {
      memory_.ranked[j] = Ranked(Score(memory_.chunk_begins[j], stage.chunk_tokens, is_first), j);
    }
    KeepBest({memory_.ranked, static_cast<size_t>(num_chunks_)}, count);
    for (int64_t j = 0; j < count; ++j) {  // ascending: nothing is overwritten that is still read
      memory_.chunk_begins[j] = memory_.chunk_begins[memory_.ranked[j].item()];
      memory_.scores[j] = memory_.ranked[j].score();
    }
    num_chunks_ = count;
  }

  void AverageQueries(int64_t stride) {
    num_means_ = CeilDiv(row_.block.num_rows, stride);
    for (int64_t g = 0; g < row_.group; ++g) {
      for (int64_t m = 0; m < num_means_; ++m) {
        const int64_t end = std::min((m + 1) * stride, row_.block.num_rows);
        float* mean = memory_.means + (g * num_means_ + m) * head_dim_;
        std::fill_n(mean, head_dim_, 0.0f);
        for (int64_t r = m * stride; r < end; ++r) {
          LoadQuery(row_, r, g, memory_.vector);
          for (int64_t i = 0; i < head_dim_; ++i) mean[i] += memory_.vector[i];
        }
        for (int64_t i = 0; i < head_dim_; ++i) mean[i] /= static_cast<float>(end - m * stride);
      }
    }
  }
  const float* Mean(int64_t g, int64_t m) const {
    return memory_.means + (g * num_means_ + m) * head_dim_;
  }

  // Of the pages that the chunks of stage 1 touch, from first_page_ on.
  void ScoreAllPages(int64_t chunk) {
    const int64_t num_queries = row_.group * num_means_;
    for (int64_t q = 0; q < num_queries; ++q) {
      SplitBySign(memory_.means + q * head_dim_, head_dim_, memory_.signed_q + q * 2 * head_dim_);
    }
    first_page_ = memory_.chunk_begins[0] / kPageTokens;
    ScorePages(row_, ChoosePageScoreKernel(row_.p.kv.layout, DType::kFloat32).scores,
               {.signed_q = memory_.signed_q,
                .num_queries = num_queries,
                .head_dim = head_dim_,
                .workspace = memory_.workspace},
               first_page_, CeilPages(memory_.chunk_begins[num_chunks_ - 1] + chunk),
               memory_.page_scores);
  }

  float Score(int64_t begin, int64_t tokens, bool is_first) {
    if (probe_ == Probe::kDigest) {
      return is_first ? BestPage(begin, begin + tokens) : BestEstimate(begin, begin + tokens);
    }
    float best = kNoScore;
    for (int64_t g = 0; g < row_.group; ++g) {
      best = std::max(best, probe_ == Probe::kFirst ? DescendByFirst(g, begin, tokens)
                                                    : DescendByCentre(g, begin, tokens));
    }
    return best;
  }

  float BestPage(int64_t begin, int64_t end) const {
    return *std::max_element(memory_.page_scores + begin / kPageTokens - first_page_,
                             memory_.page_scores + CeilPages(end) - first_page_);
  }

  float BestEstimate(int64_t begin, int64_t end) {
    float best = kNoScore;
    for (int64_t token = begin; token < end; ++token) {
      estimate_.Load(token);
      for (int64_t g = 0; g < row_.group; ++g) {
        for (int64_t m = 0; m < num_means_; ++m) {
          best = std::max(best, estimate_(Mean(g, m)));  // leaves out NaN
        }
      }
    }
    return best;
  }

  // The largest logit of the token over the averaged rows of one head.
  float Logit(int64_t g, int64_t token) {
    float best = kNoScore;
    for (int64_t m = 0; m < num_means_; ++m) best = std::max(best, logit_(Mean(g, m), token));
    return best;
  }

  float DescendByCentre(int64_t g, int64_t begin, int64_t tokens) {
    float best = kNoScore;
    if (tokens <= kExactChunkTokens) {
      for (int64_t t = begin; t < begin + tokens; ++t) best = std::max(best, Logit(g, t));
      return best;
    }
    for (int64_t half = tokens / 2; half > 0; half /= 2) {
      const float left = Logit(g, begin + half / 2);
      const float right = Logit(g, begin + half + half / 2);
      best = std::max({best, left, right});
      if (!(left > right)) begin += half;
    }
    return best;
  }

  float DescendByFirst(int64_t g, int64_t begin, int64_t tokens) {
    float score = Logit(g, begin);
    for (int64_t half = tokens / 2; half > 0; half /= 2) {
      const float right = Logit(g, begin + half);
      if (score > right) continue;
      score = right;
      begin += half;
    }
    return score;
  }

  const SelectRow& row_;
  const Preset& preset_;
  const Probe probe_;
  ThreadMemory& memory_;
  const int64_t head_dim_;
  KeyLogits logit_;
  KeyEstimates estimate_;
  int64_t num_chunks_ = 0;
  int64_t num_means_ = 0;
  int64_t first_page_ = 0;
};

template <typename Entry, size_t kCount>
absl::StatusOr<const Entry*> Find(const Entry (&entries)[kCount], const SelectorOption& option) {
  std::string known;
  for (const Entry& entry : entries) {
    if (entry.name == option.value) return &entry;
    absl::StrAppend(&known, known.empty() ? "" : ", ", entry.name);
  }
  return absl::InvalidArgumentError(absl::StrCat("infinitehip: ", option.name, " '", option.value,
                                                 "' is unknown; there are ", known));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Selector>> InfiniteHipSelector::Create(
    const SelectorOptions& options) {
  const Preset* preset = &kPresets[0];
  Probe probe = Probe::kDigest;
  for (const SelectorOption& option : options) {
    if (option.name == "preset") {
      KVASIR_ASSIGN_OR_RETURN(preset, Find(kPresets, option));
    } else if (option.name == "probe") {
      KVASIR_ASSIGN_OR_RETURN(const auto* found, Find(kProbes, option));
      probe = found->probe;
    } else {
      return absl::InvalidArgumentError(absl::StrCat("infinitehip has no option '", option.name,
                                                     "'; its options are preset and probe"));
    }
  }
  return std::unique_ptr<Selector>(new InfiniteHipSelector(*preset, probe));
}

int64_t InfiniteHipSelector::MinWindowTokens() const {
  return preset_.stages[0].chunk_tokens + Overlap(preset_);
}

int64_t InfiniteHipSelector::MaxEntries(const SelectionNumbers& numbers, int64_t tokens) const {
  const Stage& last = preset_.stages.back();
  // A block may lie across two pages.
  return std::min(2 * KeptChunks(last, numbers.budget_tokens), CeilPages(tokens));
}

absl::Status InfiniteHipSelector::Check(const SelectParams& p, const PageSelection& out) const {
  KVASIR_RETURN_IF_ERROR(CheckSelect("infinitehip", p, out));
  KVASIR_RETURN_IF_ERROR(CheckCapacity("infinitehip", *this, p, out));
  if (probe_ == Probe::kDigest && (p.kv.bounds == nullptr || p.kv.key_codes == nullptr)) {
    return absl::FailedPreconditionError(
        "infinitehip: probe 'digest' needs page bounds and key codes, which this KV does not have; "
        "declare the policy before the KV store is made");
  }
  for (size_t i = 0; i < p.blocks.size(); ++i) {
    const bool lists = MakeHeader(p.blocks[i], p.numbers[i]).kind == SelectionHeader::Kind::kList;
    if (!lists || p.numbers[i].window_tokens >= MinWindowTokens()) continue;
    return absl::InvalidArgumentError(absl::StrCat("infinitehip: a window of ",
                                                   p.numbers[i].window_tokens, " tokens; preset '",
                                                   preset_.name, "' needs ", MinWindowTokens()));
  }
  return absl::OkStatus();
}

absl::Status InfiniteHipSelector::Select(const SelectParams& p, PageSelection& out,
                                         Executor& executor) const {
  KVASIR_RETURN_IF_ERROR(Check(p, out));
  return WithThreadMemory(
      p, out, executor, [&](ScratchPieces& pieces) { return ThreadMemory(pieces, p, preset_); },
      [&](const SelectRow& row, ThreadMemory& memory) {
        row.header = MakeHeader(row.block, row.numbers);
        const bool has_candidates = row.header.kind == SelectionHeader::Kind::kList &&
                                    row.header.sink_end < row.header.window_begin;
        if (!has_candidates || row.numbers.budget_tokens == 0) return;
        Pruning(row, preset_, probe_, memory).Run();
      });
}

}  // namespace kvasir::kernels
