#include "kernels/sparse/tokenselect/tokenselect_selector.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "kernels/base/status_macros.h"
#include "kernels/sparse/key_logits.h"
#include "kernels/sparse/ranking.h"
#include "kernels/sparse/select_common.h"

namespace kvasir::kernels {
namespace {

constexpr float kNoVote = -std::numeric_limits<float>::infinity();
// exp of less is denormal.
constexpr float kLeastExponent = -87;

// Memory of one thread of a Select call.
struct ThreadMemory {
  ThreadMemory(ScratchPieces& pieces, const SelectParams& p) {
    const int64_t group = p.q.dim(1) / p.kv.layout.num_kv_heads;
    int64_t context = 0;
    for (const QueryBlock& block : p.blocks) context = std::max(context, block.first_position);
    means = pieces.Take<float>(group * p.kv.layout.head_dim);
    query = pieces.Take<float>(p.kv.layout.head_dim);
    logits = pieces.Take<float>(group * context);
    votes = pieces.Take<float>(context);
    ranked = pieces.Take<Ranked>(context);
  }

  float* means;  // [G, head_dim]
  float* query;
  float* logits;  // [G, candidates]
  float* votes;   // [candidates]
  Ranked* ranked;
};

void AverageQueries(const SelectRow& row, const ThreadMemory& memory) {
  const int64_t d = row.p.kv.layout.head_dim;
  for (int64_t g = 0; g < row.group; ++g) {
    float* mean = memory.means + g * d;
    std::fill_n(mean, d, 0.0f);
    for (int64_t r = 0; r < row.block.num_rows; ++r) {
      LoadDistantQuery(row, r, g, memory.query);
      for (int64_t i = 0; i < d; ++i) mean[i] += memory.query[i];
    }
    for (int64_t i = 0; i < d; ++i) mean[i] /= static_cast<float>(row.block.num_rows);
  }
}

// Adds softmax(logits) to the votes; the logits become weights. An infinite maximum is shared by
// all that have it.
void AddVotes(std::span<float> logits, float* votes) {
  float max = kNoVote;
  for (const float x : logits) max = std::max(max, x);  // leaves out NaN
  if (max == kNoVote) return;
  double sum = 0;
  for (float& x : logits) {
    const float below = x == max ? 0.0f : x - max;
    x = below >= kLeastExponent ? std::exp(below) : 0.0f;  // NaN: 0
    sum += x;
  }
  for (size_t j = 0; j < logits.size(); ++j) {
    votes[j] += static_cast<float>(static_cast<double>(logits[j]) / sum);
  }
}

void SelectTokens(const SelectRow& row, const ThreadMemory& memory) {
  row.header = MakeHeader(row.block, row.numbers);
  const int64_t begin = row.header.sink_end;
  const int64_t candidates = row.candidates_end() - begin;
  if (row.header.kind == SelectionHeader::Kind::kAll || candidates <= 0) return;
  AverageQueries(row, memory);
  KeyLogits logit(row);
  for (int64_t j = 0; j < candidates; ++j) {
    for (int64_t g = 0; g < row.group; ++g) {
      const float* query = memory.means + g * row.p.kv.layout.head_dim;
      memory.logits[g * candidates + j] = row.p.scale * logit(query, begin + j);
    }
  }
  std::fill_n(memory.votes, candidates, 0.0f);
  for (int64_t g = 0; g < row.group; ++g) {
    AddVotes({memory.logits + g * candidates, static_cast<size_t>(candidates)}, memory.votes);
  }
  for (int64_t j = 0; j < candidates; ++j) memory.ranked[j] = Ranked(memory.votes[j], begin + j);
  const int64_t count = std::min(row.numbers.budget_tokens, candidates);
  KeepBest({memory.ranked, static_cast<size_t>(candidates)}, count);
  ListWriter writer(row.header, row.list);
  for (int64_t i = 0; i < count; ++i) {
    const Ranked& best = memory.ranked[i];
    writer.Add(best.item(), best.item() + 1, best.score());
  }
}

}  // namespace

int64_t TokenSelectSelector::MaxEntries(const SelectionNumbers& numbers, int64_t tokens) const {
  return std::min(numbers.budget_tokens, CeilPages(tokens));
}

absl::Status TokenSelectSelector::Select(const SelectParams& p, PageSelection& out,
                                         Executor& executor) const {
  KVASIR_RETURN_IF_ERROR(CheckSelect("tokenselect", p, out));
  KVASIR_RETURN_IF_ERROR(CheckCapacity("tokenselect", *this, p, out));
  ReserveDistances(p, executor);
  return WithThreadMemory(
      p, out, executor, [&](ScratchPieces& pieces) { return ThreadMemory(pieces, p); },
      SelectTokens);
}

}  // namespace kvasir::kernels
