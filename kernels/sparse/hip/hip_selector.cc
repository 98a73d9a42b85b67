#include "kernels/sparse/hip/hip_selector.h"

#include <algorithm>
#include <limits>
#include <span>

#include "kernels/base/status_macros.h"
#include "kernels/sparse/common/ranking.h"
#include "kernels/sparse/common/select_common.h"
#include "kernels/sparse/hip/hip_rule.h"
#include "kernels/sparse/key_logits/key_logits.h"

namespace kvasir::kernels {
namespace {

constexpr float kNoScore = -std::numeric_limits<float>::infinity();

// A run of blocks of 2 tokens, counted from the first candidate.
struct Node {
  int64_t begin = 0;
  int64_t length = 0;
  float score = kNoScore;
};

// Working memory of one thread of a Select call.
struct ThreadMemory {
  ThreadMemory(ScratchPieces& pieces, const SelectParams& p) : tile(pieces, p) {
    int64_t rows = 0;
    int64_t nodes = 0;
    for (size_t i = 0; i < p.tiles.size(); ++i) {
      rows = std::max(rows, NumHipSamples(p.tiles[i].num_rows));
      nodes = std::max(nodes, std::min(CeilHipBlocks(p.numbers[i].budget_tokens),
                                       CeilHipBlocks(p.tiles[i].first_position)));
    }
    queries =
        pieces.Take<float>(rows * p.q.dim(1) / p.kv.layout.num_kv_heads * p.kv.layout.head_dim);
    current = pieces.Take<Node>(nodes);
    halves = pieces.Take<Node>(2 * nodes);
    ranked = pieces.Take<Ranked>(2 * nodes);
  }

  KeyLogits::Memory tile;
  float* queries;  // [sampled rows x G, head_dim]
  Node* current;
  Node* halves;
  Ranked* ranked;
};

// The search in one row that has a list.
class Search {
 public:
  Search(const SelectRow& row, const ThreadMemory& memory)
      : row_(row), memory_(memory), keys_(row, KeyForm::kCached, memory.tile) {
    num_queries_ = NumHipSamples(row.tile.num_rows) * row.group;
    for (int64_t s = 0; s < NumHipSamples(row.tile.num_rows); ++s) {
      const int64_t r = HipSample(s, row.tile.num_rows);
      for (int64_t g = 0; g < row.group; ++g) {
        LoadDistantQuery(row, r, g, Query(s * row.group + g));
      }
    }
  }

  // Returns the best nodes, one block each, ascending. REQUIRES: count <= the candidates' blocks.
  std::span<const Node> Run(int64_t count) {
    const int64_t blocks = CeilHipBlocks(row_.candidates_end() - row_.header.sink_end);
    for (int64_t j = 0; j < count; ++j) {
      const int64_t begin = HipNodeBegin(j, blocks, count);
      memory_.current[j] = {.begin = begin, .length = HipNodeBegin(j + 1, blocks, count) - begin};
    }
    for (int64_t longest = LongestHipNode(blocks, count); longest > 1;
         longest = LongestHipHalf(longest)) {
      Halve(count);
    }
    return {memory_.current, static_cast<size_t>(count)};
  }

 private:
  float* Query(int64_t i) const { return memory_.queries + i * row_.p.kv.layout.head_dim; }

  // Nodes ascend and do not overlap, so halves do too: the place of a half is its rank.
  void Halve(int64_t count) {
    int64_t halves = 0;
    for (int64_t j = 0; j < count; ++j) {
      const Node& node = memory_.current[j];
      const int64_t left = node.length / 2;
      if (left > 0) memory_.halves[halves++] = {.begin = node.begin, .length = left};
      memory_.halves[halves++] = {.begin = node.begin + left, .length = node.length - left};
    }
    Score(halves);
    for (int64_t i = 0; i < halves; ++i) memory_.ranked[i] = Ranked(memory_.halves[i].score, i);
    KeepBest({memory_.ranked, static_cast<size_t>(halves)}, count);
    for (int64_t j = 0; j < count; ++j) {
      memory_.current[j] = memory_.halves[memory_.ranked[j].item()];
    }
  }

  // Scores the halves by the tokens of their centre blocks.
  void Score(int64_t halves) {
    const auto token_at = [&](int64_t i) {
      const Node& half = memory_.halves[i / kHipBlockTokens];
      const int64_t block = half.begin + half.length / 2;
      const int64_t token = row_.header.sink_end + block * kHipBlockTokens + i % kHipBlockTokens;
      return token < row_.candidates_end() ? token : KeyLogits::kNoToken;
    };
    keys_.ForEachTile(halves * kHipBlockTokens, token_at, [&](int64_t first, int64_t n) {
      float best[kTileKeys];
      keys_.Best(memory_.queries, num_queries_, best);
      for (int64_t i = 0; i < n; ++i) {
        Node& half = memory_.halves[(first + i) / kHipBlockTokens];
        half.score = std::max(half.score, best[i]);
      }
    });
  }

  const SelectRow& row_;
  const ThreadMemory& memory_;
  KeyLogits keys_;
  int64_t num_queries_ = 0;
};

void SelectBlocks(const SelectRow& row, const ThreadMemory& memory) {
  row.header = MakeHeader(row.tile, row.numbers);
  const int64_t begin = row.header.sink_end;
  const int64_t end = row.candidates_end();
  const int64_t count = CeilHipBlocks(row.numbers.budget_tokens);
  if (row.header.kind == SelectionHeader::Kind::kAll || begin >= end || count == 0) return;
  ListWriter writer(row.header, row.list);
  if (count >= CeilHipBlocks(end - begin)) {
    writer.Add(begin, end, 0);
    return;
  }
  Search search(row, memory);
  for (const Node& node : search.Run(count)) {
    const int64_t first = begin + node.begin * kHipBlockTokens;
    writer.Add(first, std::min(first + kHipBlockTokens, end), node.score);
  }
}

}  // namespace

int64_t HipSelector::MaxEntries(const PolicyNumbers& numbers, int64_t tokens) const {
  // A block may cross into a second page.
  return std::min(2 * CeilHipBlocks(numbers.budget_tokens), CeilPages(tokens));
}

absl::Status HipSelector::Select(const SelectParams& p, PageSelection& out,
                                 Executor& executor) const {
  KVASIR_RETURN_IF_ERROR(CheckSelect("hip", p, out));
  KVASIR_RETURN_IF_ERROR(CheckCapacity("hip", *this, p, out));
  ReserveDistances(p, executor);
  return WithThreadMemory(
      p, out, executor, [&](ScratchPieces& pieces) { return ThreadMemory(pieces, p); },
      SelectBlocks);
}

}  // namespace kvasir::kernels
