#include "kernels/sparse/hip/hip_selector.h"

#include <algorithm>
#include <limits>
#include <span>

#include "kernels/base/status_macros.h"
#include "kernels/sparse/key_logits.h"
#include "kernels/sparse/ranking.h"
#include "kernels/sparse/select_common.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kBlockTokens = 2;
constexpr int64_t kQueryStride = 2;
constexpr float kNoScore = -std::numeric_limits<float>::infinity();

// Of a budget, or of candidates.
constexpr int64_t CeilBlocks(int64_t tokens) { return (tokens + kBlockTokens - 1) / kBlockTokens; }

constexpr int64_t SampledRows(int64_t num_rows) {
  return (num_rows + kQueryStride - 1) / kQueryStride;
}

// A run of blocks, relative to the first candidate.
struct Node {
  int64_t begin = 0;
  int64_t length = 0;
  float score = kNoScore;
};

// Memory of one thread of a Select call.
struct ThreadMemory {
  ThreadMemory(ScratchPieces& pieces, const SelectParams& p) : tile(pieces, p) {
    int64_t rows = 0;
    int64_t nodes = 0;
    for (size_t i = 0; i < p.blocks.size(); ++i) {
      rows = std::max(rows, SampledRows(p.blocks[i].num_rows));
      nodes = std::max(nodes, std::min(CeilBlocks(p.numbers[i].budget_tokens),
                                       CeilBlocks(p.blocks[i].first_position)));
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

// The search in one row with a list.
class Search {
 public:
  Search(const SelectRow& row, const ThreadMemory& memory)
      : row_(row), memory_(memory), keys_(row, KeyForm::kCached, memory.tile) {
    num_queries_ = SampledRows(row.block.num_rows) * row.group;
    for (int64_t s = 0; s < SampledRows(row.block.num_rows); ++s) {
      const int64_t r = std::min(s * kQueryStride + kQueryStride, row.block.num_rows) - 1;
      for (int64_t g = 0; g < row.group; ++g) {
        LoadDistantQuery(row, r, g, Query(s * row.group + g));
      }
    }
  }

  // The best nodes of one block each, ascending. REQUIRES: count <= the candidates' blocks.
  std::span<const Node> Run(int64_t count) {
    const int64_t blocks = CeilBlocks(row_.candidates_end() - row_.header.sink_end);
    int64_t longest = 0;
    for (int64_t j = 0; j < count; ++j) {
      const int64_t begin = Round(j * blocks, count);
      memory_.current[j] = {.begin = begin, .length = Round((j + 1) * blocks, count) - begin};
      longest = std::max(longest, memory_.current[j].length);
    }
    for (; longest > 1; longest -= longest / 2) Halve(count);
    return {memory_.current, static_cast<size_t>(count)};
  }

 private:
  // a / b to the nearest integer, halves up.
  static int64_t Round(int64_t a, int64_t b) { return (2 * a + b) / (2 * b); }
  float* Query(int64_t i) const { return memory_.queries + i * row_.p.kv.layout.head_dim; }

  // Nodes ascend and do not overlap, so halves do too: the rank of a half is its place.
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

  // By the tokens of their centre blocks.
  void Score(int64_t halves) {
    const auto token_at = [&](int64_t i) {
      const Node& half = memory_.halves[i / kBlockTokens];
      const int64_t block = half.begin + half.length / 2;
      const int64_t token = row_.header.sink_end + block * kBlockTokens + i % kBlockTokens;
      return token < row_.candidates_end() ? token : KeyLogits::kNoToken;
    };
    keys_.ForEachTile(halves * kBlockTokens, token_at, [&](int64_t first, int64_t n) {
      float best[kTileKeys];
      keys_.Best(memory_.queries, num_queries_, best);
      for (int64_t i = 0; i < n; ++i) {
        Node& half = memory_.halves[(first + i) / kBlockTokens];
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
  row.header = MakeHeader(row.block, row.numbers);
  const int64_t begin = row.header.sink_end;
  const int64_t end = row.candidates_end();
  const int64_t count = CeilBlocks(row.numbers.budget_tokens);
  if (row.header.kind == SelectionHeader::Kind::kAll || begin >= end || count == 0) return;
  ListWriter writer(row.header, row.list);
  if (count >= CeilBlocks(end - begin)) {
    writer.Add(begin, end, 0);
    return;
  }
  Search search(row, memory);
  for (const Node& node : search.Run(count)) {
    const int64_t first = begin + node.begin * kBlockTokens;
    writer.Add(first, std::min(first + kBlockTokens, end), node.score);
  }
}

}  // namespace

int64_t HipSelector::MaxEntries(const SelectionNumbers& numbers, int64_t tokens) const {
  // A block may lie across two pages.
  return std::min(2 * CeilBlocks(numbers.budget_tokens), CeilPages(tokens));
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
