#include "kernels/sparse/infinitehip/chunk_scores.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "kernels/sparse/page_scores/page_scores.h"

namespace kvasir::kernels {
namespace {

constexpr float kNoScore = -std::numeric_limits<float>::infinity();
// Chunks of at most this many tokens are scored by all of them.
constexpr int64_t kExactChunkTokens = 8;

}  // namespace

ChunkScores::Memory::Memory(ScratchPieces& pieces, const SelectParams& p, const Sizes& sizes)
    : tile(pieces, p) {
  const int64_t d = p.kv.layout.head_dim;
  const int64_t queries = sizes.query_rows * p.q.dim(1) / p.kv.layout.num_kv_heads;
  means = pieces.Take<float>(queries * d);
  left = pieces.Take<float>(p.rope != nullptr ? queries * d : 0);
  right = pieces.Take<float>(p.rope != nullptr ? queries * d : 0);
  vector = pieces.Take<float>(d);
  signed_q = pieces.Take<float>(queries * 2 * d);
  page_scores = pieces.Take<float>(CeilPages(sizes.context));
  workspace = pieces.Take<std::byte>(QuestScoreWorkspaceBytes(d));
  probed = pieces.Take<int64_t>(sizes.chunks);
}

ChunkScores::ChunkScores(const SelectRow& row, Probe probe, int64_t selection_window,
                         const Memory& memory)
    : row_(row),
      probe_(probe),
      selection_window_(selection_window),
      memory_(memory),
      head_dim_(row.p.kv.layout.head_dim),
      placing_(PlacingOf(row.p)) {}

ChunkScores::Placing ChunkScores::PlacingOf(const SelectParams& p) {
  if (p.rope == nullptr) return Placing::kNative;
  return InfiniteHipSelector::IsChunkIndexed(p.layer) ? Placing::kChunkIndexed : Placing::kRelative;
}

void ChunkScores::Score(const ChunkList& chunks, int64_t query_stride, bool by_pages,
                        float* scores) {
  chunks_ = chunks;
  scores_ = scores;
  std::fill_n(scores, chunks.count, kNoScore);
  AverageQueries(query_stride);
  PlaceQueries();
  if (probe_ == Probe::kDigest) {
    by_pages ? ScoreByPages() : ScoreByAllKeys(KeyForm::kCodes);
  } else if (probe_ == Probe::kCentre && chunks.tokens <= kExactChunkTokens) {
    ScoreByAllKeys(KeyForm::kCached);
  } else {
    for (int64_t g = 0; g < row_.group; ++g) ScoreByDescent(g);
  }
}

void ChunkScores::RaiseScore(int64_t chunk, float score) {
  scores_[chunk] = std::max(scores_[chunk], score);
}

void ChunkScores::AverageQueries(int64_t stride) {
  const int64_t rows = row_.tile.num_rows;
  num_means_ = (rows + stride - 1) / stride;
  for (int64_t i = 0; i < row_.group * num_means_; ++i) {
    const int64_t g = i / num_means_, begin = i % num_means_ * stride;
    const int64_t end = std::min(begin + stride, rows);
    float* mean = memory_.means + i * head_dim_;
    std::fill_n(mean, head_dim_, 0.0f);
    for (int64_t r = begin; r < end; ++r) {
      LoadQuery(row_, r, g, memory_.vector);
      for (int64_t e = 0; e < head_dim_; ++e) mean[e] += memory_.vector[e];
    }
    for (int64_t e = 0; e < head_dim_; ++e) mean[e] /= static_cast<float>(end - begin);
  }
}

void ChunkScores::PlaceQueries() {
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

void ChunkScores::RotateMeans(int64_t distance, float* to) {
  const int64_t size = row_.group * num_means_ * head_dim_;
  std::copy_n(memory_.means, size, to);
  for (int64_t at = 0; at < size; at += head_dim_) RotateToDistance(row_, distance, to + at);
}

// Writes the scores of the pages [begin, end), by these queries, to page_scores.
void ChunkScores::ScorePagesBy(const float* queries, int64_t begin, int64_t end) {
  const int64_t num_queries = row_.group * num_means_;
  for (int64_t q = 0; q < num_queries; ++q) {
    SplitBySign(queries + q * head_dim_, head_dim_, QuestScore::kBound,
                memory_.signed_q + q * 2 * head_dim_);
  }
  ScorePages(row_, ChoosePageScoreKernel(row_.p.kv.layout, DType::kFloat32).scores,
             {.signed_q = memory_.signed_q,
              .num_queries = num_queries,
              .head_dim = head_dim_,
              .workspace = memory_.workspace},
             begin, end, memory_.page_scores);
  first_page_ = begin;
}

// Bounds cannot be rotated, so a chunk with a position of its own needs queries of its own.
void ChunkScores::ScoreByPages() {
  const auto pages_end = [&](int64_t j) { return CeilPages(chunks_.begins[j] + chunks_.tokens); };
  const bool alike = placing_ != Placing::kChunkIndexed;
  if (alike) {
    ScorePagesBy(Queries(Side::kRight, 0), chunks_.begins[0] / kPageTokens,
                 pages_end(chunks_.count - 1));
  }
  for (int64_t j = 0; j < chunks_.count; ++j) {
    const int64_t begin = chunks_.begins[j] / kPageTokens, end = pages_end(j);
    if (!alike) {
      RotateMeans(ChunkDistance(j), memory_.left);
      ScorePagesBy(memory_.left, begin, end);
    }
    RaiseScore(j, *std::max_element(memory_.page_scores + begin - first_page_,
                                    memory_.page_scores + end - first_page_));
  }
}

template <typename TokenAt, typename Use>
void ChunkScores::ForEachTile(KeyLogits& keys, int64_t keys_per_chunk, const TokenAt& token_at,
                              const Use& use) {
  const int shift = std::countr_zero(static_cast<uint64_t>(keys_per_chunk));
  const int64_t in_chunk = keys_per_chunk - 1;
  const auto token_of = [&](int64_t i) { return token_at(i >> shift, i & in_chunk); };
  keys.ForEachTile(chunks_.count << shift, token_of, [&](int64_t first, int64_t n) {
    if (placing_ == Placing::kChunkIndexed) {
      keys.Rotate(n, [&](int64_t i) { return (first + i) >> shift; });
    }
    use(first, n, shift);
  });
}

void ChunkScores::ScoreByAllKeys(KeyForm form) {
  KeyLogits keys(row_, form, memory_.tile);
  const auto token_at = [&](int64_t j, int64_t i) { return chunks_.begins[j] + i; };
  ForEachTile(keys, chunks_.tokens, token_at, [&](int64_t first, int64_t n, int shift) {
    float best[kTileKeys];
    keys.Best(Queries(Side::kRight, 0), row_.group * num_means_, best);
    for (int64_t i = 0; i < n; ++i) RaiseScore((first + i) >> shift, best[i]);
  });
}

// All chunks descend together, one level at a time. For each chunk `probed` is the begin of the
// half that it has reached.
void ChunkScores::ScoreByDescent(int64_t g) {
  KeyLogits keys(row_, KeyForm::kCached, memory_.tile);
  std::copy_n(chunks_.begins, chunks_.count, memory_.probed);
  for (int64_t half = chunks_.tokens / 2; half > 0; half /= 2) DescendTo(half, g, keys);
  if (probe_ != Probe::kFirst) return;
  const auto token_at = [&](int64_t j, int64_t) { return memory_.probed[j]; };
  ForEachTile(keys, 1, token_at, [&](int64_t first, int64_t n, int) {
    float best[kTileKeys];
    keys.Best(Queries(Side::kRight, g), num_means_, best);
    for (int64_t i = 0; i < n; ++i) RaiseScore(first + i, best[i]);
  });
}

// Descends into the better of the two halves of `half` tokens, by one key of each.
void ChunkScores::DescendTo(int64_t half, int64_t g, KeyLogits& keys) {
  const int64_t offset = probe_ == Probe::kCentre ? half / 2 : 0;
  const auto token_at = [&](int64_t j, int64_t side) {
    return memory_.probed[j] + side * half + offset;
  };
  ForEachTile(keys, 2, token_at, [&](int64_t first, int64_t n, int) {
    float left[kTileKeys], right[kTileKeys];
    keys.Best(Queries(Side::kLeft, g), num_means_, left);
    keys.Best(Queries(Side::kRight, g), num_means_, right);
    for (int64_t i = 0; i < n; i += 2) {
      const int64_t j = (first + i) / 2;
      if (probe_ == Probe::kCentre) RaiseScore(j, std::max(left[i], right[i + 1]));
      if (!(left[i] > right[i + 1])) memory_.probed[j] += half;
    }
  });
}

}  // namespace kvasir::kernels
