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
    {"3k", {{{256, 32768, 4}, {32, 8192, 4}, {8, 0, 1}}}, {16, 8, 4}},
    {"3k-fast", {{{256, 32768, 4}, {32, 8192, 4}, {8, 0, 1}}}, {32, 16, 8}},
    {"3k-flash", {{{256, 32768, 4}, {32, 8192, 4}, {8, 0, 1}}}, {96, 24, 8}},
    {"5k", {{{64, 32768, 4}, {32, 16384, 4}, {16, 0, 1}}}, {16, 8, 4}},
};
constexpr struct {
  absl::string_view name;
  Probe probe;
} kProbes[] = {{"digest", Probe::kDigest}, {"centre", Probe::kCentre}, {"first", Probe::kFirst}};

constexpr float kNoScore = -std::numeric_limits<float>::infinity();
// Chunks of so few tokens are scored by all of them.
constexpr int64_t kExactChunkTokens = 8;

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How far a list reaches into the window, for as many steps as it may serve at least.
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

// Chunks that a stage of a row may have.
int64_t MaxChunks(const Preset& preset, const QueryBlock& block, const SelectionNumbers& numbers) {
  int64_t chunks = block.first_position / preset.stages[0].chunk_tokens + 1;
  for (size_t s = 0; s + 1 < preset.stages.size(); ++s) {
    const Stage& stage = preset.stages[s];
    chunks = std::max(chunks, KeptChunks(stage, numbers.budget_tokens) * stage.chunk_tokens /
                                  preset.stages[s + 1].chunk_tokens);
  }
  return chunks;
}

// Layers whose chunks stand at positions of their own.
constexpr int64_t kChunkIndexedLayers = 3;

// Where queries and keys stand while chunks are judged.
enum class Placing {
  kNative,        // they are cached rotated
  kRelative,      // the query at Wm + 1, a left probe at 0, a right one at 1
  kChunkIndexed,  // of n chunks: the query at n - 1 + Wm, all keys of chunk c at c
};

Placing PlacingOf(const SelectParams& p) {
  if (p.rope == nullptr) return Placing::kNative;
  return p.layer < kChunkIndexedLayers ? Placing::kChunkIndexed : Placing::kRelative;
}

// Makes the positions of all placings known.
void ReservePlacings(const SelectParams& p, const Preset& preset, Executor& executor) {
  if (p.rope == nullptr) return;
  int64_t last = 0;
  for (size_t i = 0; i < p.blocks.size(); ++i) {
    if (MakeHeader(p.blocks[i], p.numbers[i]).kind == SelectionHeader::Kind::kAll) continue;
    last =
        std::max(last, p.numbers[i].window_tokens + MaxChunks(preset, p.blocks[i], p.numbers[i]));
  }
  p.rope->Reserve(last + 1, executor);
}

// Memory of one thread of a Select call.
struct ThreadMemory {
  ThreadMemory(ScratchPieces& pieces, const SelectParams& p, const Preset& preset) {
    const int64_t d = p.kv.layout.head_dim;
    int64_t rows = 0, context = 0, chunks = 0;
    for (size_t i = 0; i < p.blocks.size(); ++i) {
      rows = std::max(rows, p.blocks[i].num_rows);
      context = std::max(context, p.blocks[i].first_position);
      chunks = std::max(chunks, MaxChunks(preset, p.blocks[i], p.numbers[i]));
    }
    const int64_t queries = rows * p.q.dim(1) / p.kv.layout.num_kv_heads;
    means = pieces.Take<float>(queries * d);
    left = pieces.Take<float>(p.rope != nullptr ? queries * d : 0);
    right = pieces.Take<float>(p.rope != nullptr ? queries * d : 0);
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
  float* left;   // the same, placed for left probes
  float* right;  // and for all others
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
        placing_(PlacingOf(row.p)),
        selection_window_(row.numbers.window_tokens - Overlap(preset)),
        logit_(row),
        estimate_(row, memory.vector) {}

  void Run() {
    const size_t first = row_.memory == nullptr ? 0 : row_.memory->first_stage;
    first == 0 ? TakeAllChunks() : Recall(first - 1);
    for (size_t s = first; s < preset_.stages.size(); ++s) {
      if (s > 0) Split(preset_.stages[s - 1].chunk_tokens, preset_.stages[s].chunk_tokens);
      Keep(preset_.stages[s], s == 0);
      if (row_.memory != nullptr && s + 1 < preset_.stages.size()) Remember(s);
    }
    const int64_t block = preset_.stages.back().chunk_tokens;
    ListWriter writer(row_.header, row_.list);
    for (int64_t j = 0; j < num_chunks_; ++j) {
      const int64_t begin = memory_.chunk_begins[j];
      writer.Add(begin, begin + block, memory_.scores[j]);
    }
  }

 private:
  void TakeAllChunks() {
    num_chunks_ = FirstChunks(preset_, row_.header, row_.numbers.window_tokens);
    for (int64_t j = 0; j < num_chunks_; ++j) {
      memory_.chunk_begins[j] = row_.header.sink_end + j * preset_.stages[0].chunk_tokens;
    }
  }

  // What a stage left, in this step and in an earlier one.
  void Remember(size_t stage) {
    RowMemory::StageItems& left = row_.memory->stages[stage];
    left.count = num_chunks_;
    std::copy_n(memory_.chunk_begins, num_chunks_, left.items);
  }
  void Recall(size_t stage) {
    const RowMemory::StageItems& left = row_.memory->stages[stage];
    num_chunks_ = left.count;
    std::copy_n(left.items, num_chunks_, memory_.chunk_begins);
  }

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
    PlaceQueries();
    const bool by_pages = is_first && probe_ == Probe::kDigest;
    if (by_pages && placing_ != Placing::kChunkIndexed) ScoreAllPages(stage.chunk_tokens);
    for (int64_t j = 0; j < num_chunks_; ++j) {
      const Chunk chunk = {
          .index = j, .begin = memory_.chunk_begins[j], .tokens = stage.chunk_tokens};
      memory_.ranked[j] = Ranked(by_pages ? BestPage(chunk) : Score(chunk), j);
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
  // A chunk among num_chunks_.
  struct Chunk {
    int64_t index = 0;
    int64_t begin = 0;
    int64_t tokens = 0;
  };
  enum class Side { kLeft, kRight };

  const float* Query(Side side, int64_t g, int64_t m) const {
    const float* queries = placing_ == Placing::kNative ? memory_.means
                           : side == Side::kLeft        ? memory_.left
                                                        : memory_.right;
    return queries + (g * num_means_ + m) * head_dim_;
  }

  void PlaceQueries() {
    if (placing_ == Placing::kNative) return;
    if (placing_ == Placing::kRelative) {
      RotateMeans(selection_window_ + 1, memory_.left);
      RotateMeans(selection_window_, memory_.right);
      return;
    }
    const int64_t size = row_.group * num_means_ * head_dim_;
    std::copy_n(memory_.means, size, memory_.right);
    for (int64_t at = 0; at < size; at += head_dim_) {
      row_.p.rope->Rotate(memory_.right + at, DType::kFloat32, 1, ChunkDistance(0));
    }
    std::copy_n(memory_.right, size, memory_.left);
  }
  void RotateMeans(int64_t distance, float* to) {
    const int64_t size = row_.group * num_means_ * head_dim_;
    std::copy_n(memory_.means, size, to);
    for (int64_t at = 0; at < size; at += head_dim_) RotateToDistance(row_, distance, to + at);
  }
  // Of chunk-indexed placing.
  int64_t ChunkDistance(int64_t index) const { return num_chunks_ - 1 + selection_window_ - index; }

  // Page scores of [begin, end) by these queries, to page_scores.
  void ScorePagesBy(const float* queries, int64_t begin, int64_t end) {
    const int64_t num_queries = row_.group * num_means_;
    for (int64_t q = 0; q < num_queries; ++q) {
      SplitBySign(queries + q * head_dim_, head_dim_, memory_.signed_q + q * 2 * head_dim_);
    }
    ScorePages(row_, ChoosePageScoreKernel(row_.p.kv.layout, DType::kFloat32).scores,
               {.signed_q = memory_.signed_q,
                .num_queries = num_queries,
                .head_dim = head_dim_,
                .workspace = memory_.workspace},
               begin, end, memory_.page_scores);
    first_page_ = begin;
  }
  // Of the pages that the chunks of stage 1 touch.
  void ScoreAllPages(int64_t chunk) {
    ScorePagesBy(Query(Side::kRight, 0, 0), memory_.chunk_begins[0] / kPageTokens,
                 CeilPages(memory_.chunk_begins[num_chunks_ - 1] + chunk));
  }
  // Bounds cannot be rotated: each chunk has queries of its own when it has a position of its own.
  float BestPage(const Chunk& chunk) {
    const int64_t begin = chunk.begin / kPageTokens, end = CeilPages(chunk.begin + chunk.tokens);
    if (placing_ == Placing::kChunkIndexed) {
      RotateMeans(ChunkDistance(chunk.index), memory_.left);
      ScorePagesBy(memory_.left, begin, end);
    }
    return *std::max_element(memory_.page_scores + begin - first_page_,
                             memory_.page_scores + end - first_page_);
  }

  float Score(const Chunk& chunk) {
    if (probe_ == Probe::kDigest) return BestEstimate(chunk);
    float best = kNoScore;
    for (int64_t g = 0; g < row_.group; ++g) {
      best = std::max(
          best, probe_ == Probe::kFirst ? DescendByFirst(g, chunk) : DescendByCentre(g, chunk));
    }
    return best;
  }

  float BestEstimate(const Chunk& chunk) {
    float best = kNoScore;
    for (int64_t token = chunk.begin; token < chunk.begin + chunk.tokens; ++token) {
      estimate_.Load(token);
      if (placing_ == Placing::kChunkIndexed) estimate_.Rotate(chunk.index);
      for (int64_t g = 0; g < row_.group; ++g) {
        for (int64_t m = 0; m < num_means_; ++m) {
          best = std::max(best, estimate_(Query(Side::kRight, g, m)));  // leaves out NaN
        }
      }
    }
    return best;
  }

  // The largest logit of a token of the chunk over the averaged rows of one head.
  float Logit(int64_t g, const Chunk& chunk, int64_t token, Side side) {
    float best = kNoScore;
    for (int64_t m = 0; m < num_means_; ++m) {
      const float* query = Query(side, g, m);
      best = std::max(best, placing_ == Placing::kChunkIndexed
                                ? logit_.At(chunk.index, query, token, memory_.vector)
                                : logit_(query, token));
    }
    return best;
  }

  float DescendByCentre(int64_t g, const Chunk& chunk) {
    float best = kNoScore;
    if (chunk.tokens <= kExactChunkTokens) {
      for (int64_t t = chunk.begin; t < chunk.begin + chunk.tokens; ++t) {
        best = std::max(best, Logit(g, chunk, t, Side::kRight));
      }
      return best;
    }
    int64_t begin = chunk.begin;
    for (int64_t half = chunk.tokens / 2; half > 0; half /= 2) {
      const float left = Logit(g, chunk, begin + half / 2, Side::kLeft);
      const float right = Logit(g, chunk, begin + half + half / 2, Side::kRight);
      best = std::max({best, left, right});
      if (!(left > right)) begin += half;
    }
    return best;
  }

  float DescendByFirst(int64_t g, const Chunk& chunk) {
    int64_t begin = chunk.begin;
    for (int64_t half = chunk.tokens / 2; half > 0; half /= 2) {
      const float left = Logit(g, chunk, begin, Side::kLeft);
      if (!(left > Logit(g, chunk, begin + half, Side::kRight))) begin += half;
    }
    return Logit(g, chunk, begin, Side::kRight);
  }

  const SelectRow& row_;
  const Preset& preset_;
  const Probe probe_;
  ThreadMemory& memory_;
  const int64_t head_dim_;
  const Placing placing_;
  const int64_t selection_window_;  // Wm
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

int64_t InfiniteHipSelector::MaxStageItems(const SelectionNumbers& numbers, int64_t tokens) const {
  int64_t items = 0;
  for (size_t s = 0; s + 1 < preset_.stages.size(); ++s) {
    const Stage& stage = preset_.stages[s];
    items = std::max(items, std::min(KeptChunks(stage, numbers.budget_tokens),
                                     CeilDiv(tokens, stage.chunk_tokens)));
  }
  return items;
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
  ReservePlacings(p, preset_, executor);
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
