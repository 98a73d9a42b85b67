// The scores by which `infinitehip` keeps chunks (defined in infinitehip_selector.h), for the query
// heads of one KV head. Called by the selector. Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/sparse/common/select_common.h"
#include "kernels/sparse/infinitehip/infinitehip_selector.h"
#include "kernels/sparse/key_logits/key_logits.h"

namespace kvasir::kernels {

// Chunks of one size, ascending.
struct ChunkList {
  int64_t count = 0;
  int64_t tokens = 0;               // of each chunk; a power of two
  const int64_t* begins = nullptr;  // [count]
};

class ChunkScores {
 public:
  using Probe = InfiniteHipSelector::Probe;
  // Upper limits of a Select call.
  struct Sizes {
    int64_t chunks = 0;
    int64_t query_rows = 0;
    int64_t context = 0;
  };
  // Working memory of one thread.
  struct Memory {
    Memory(ScratchPieces& pieces, const SelectParams& params, const Sizes& sizes);

    KeyLogits::Memory tile;
    float* means;  // [G, averaged rows, head_dim]
    float* left;   // the same, placed for left probes; only where keys are un-rotated
    float* right;  // the same, placed for all other probes
    float* vector;
    float* signed_q;
    float* page_scores;
    std::byte* workspace;
    int64_t* probed;  // [chunks]
  };

  // `selection_window` is Wm.
  ChunkScores(const SelectRow& row, Probe probe, int64_t selection_window, const Memory& memory);

  // scores[j] = score of chunk j, by queries averaged by `query_stride`. `by_pages`: with probe
  // digest, from page bounds.
  void Score(const ChunkList& chunks, int64_t query_stride, bool by_pages, float* scores);

 private:
  // The positions of queries and keys while chunks are judged.
  enum class Placing {
    kNative,        // their own: keys are cached rotated
    kRelative,      // the query at Wm + 1, a left probe at 0, a right one at 1
    kChunkIndexed,  // of n chunks: the query at n - 1 + Wm, all keys of chunk c at c
  };
  enum class Side { kLeft, kRight };
  static Placing PlacingOf(const SelectParams& params);

  void AverageQueries(int64_t stride);
  void PlaceQueries();
  void RotateMeans(int64_t distance, float* to);
  // Returns the num_means_ queries of head g of the group. Those of the next head follow.
  const float* Queries(Side side, int64_t g) const {
    const float* queries = placing_ == Placing::kNative ? memory_.means
                           : side == Side::kLeft        ? memory_.left
                                                        : memory_.right;
    return queries + g * num_means_ * head_dim_;
  }
  // The query's distance to a chunk in chunk-indexed placing.
  int64_t ChunkDistance(int64_t index) const {
    return chunks_.count - 1 + selection_window_ - index;
  }
  void RaiseScore(int64_t chunk, float score);

  void ScoreByPages();
  void ScorePagesBy(const float* queries, int64_t begin, int64_t end);
  void ScoreByAllKeys(KeyForm form);
  void ScoreByDescent(int64_t g);
  void DescendTo(int64_t half, int64_t g, KeyLogits& keys);
  // KeyLogits::ForEachTile for a power of two of keys per chunk: token_at(chunk, key). Calls
  // use(first, n, shift); key i belongs to chunk i >> shift.
  template <typename TokenAt, typename Use>
  void ForEachTile(KeyLogits& keys, int64_t keys_per_chunk, const TokenAt& token_at,
                   const Use& use);

  const SelectRow& row_;
  const Probe probe_;
  const int64_t selection_window_;
  const Memory& memory_;
  const int64_t head_dim_;
  const Placing placing_;
  ChunkList chunks_;
  float* scores_ = nullptr;
  int64_t num_means_ = 0;
  int64_t first_page_ = 0;  // that page_scores begins with
};

}  // namespace kvasir::kernels
