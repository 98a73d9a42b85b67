#include "kernels/sparse/tokenselect/tokenselect_selector.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <span>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/sparse/key_logits.h"
#include "kernels/sparse/ranking.h"
#include "kernels/sparse/select_common.h"

namespace kvasir::kernels {
namespace {

constexpr float kNoVote = -std::numeric_limits<float>::infinity();

// Memory of one thread of a Select call.
struct ThreadMemory {
  ThreadMemory(ScratchPieces& pieces, const SelectParams& p) : tile(pieces, p) {
    const int64_t group = p.q.dim(1) / p.kv.layout.num_kv_heads;
    int64_t context = 0;
    for (const QueryBlock& block : p.blocks) context = std::max(context, block.first_position);
    means = pieces.Take<float>(group * p.kv.layout.head_dim);
    query = pieces.Take<float>(p.kv.layout.head_dim);
    tile_logits = pieces.Take<float>(group * kTileKeys);
    logits = pieces.Take<float>(group * context);
    votes = pieces.Take<float>(context);
    ranked = pieces.Take<Ranked>(context);
  }

  KeyLogits::Memory tile;
  float* means;  // [G, head_dim]
  float* query;
  float* tile_logits;  // [G, kTileKeys]
  float* logits;       // [G, candidates]
  float* votes;        // [candidates]
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

// Calls add(j, softmax(logits)[j]). An infinite maximum is shared by all that have it; where all
// are -inf there are no votes. Changes the logits.
template <typename Add>
void ForEachVote(std::span<float> logits, const Add& add) {
  float max = kNoVote;
  for (const float x : logits) max = std::max(max, x);  // leaves out NaN
  if (max == kNoVote) return;
  double sum = 0;
  for (float& x : logits) {
    const float below = x == max ? 0.0f : x - max;
    x = below >= kLeastVoteExponent ? std::exp(below) : 0.0f;  // NaN: 0
    sum += x;
  }
  for (size_t j = 0; j < logits.size(); ++j) add(j, static_cast<double>(logits[j]) / sum);
}

// Calls add(j, vote) with the votes of the row's heads for all candidates. REQUIRES: the row has
// candidates.
template <typename Add>
void Vote(const SelectRow& row, const ThreadMemory& memory, const Add& add) {
  const int64_t candidates = NumCandidates(row.header, row.numbers);
  AverageQueries(row, memory);
  KeyLogits keys(row, KeyForm::kCached, memory.tile);
  const auto token_at = [&](int64_t j) { return row.header.sink_end + j; };
  keys.ForEachTile(candidates, token_at, [&](int64_t first, int64_t n) {
    keys.Logits(memory.means, row.group, memory.tile_logits);
    for (int64_t g = 0; g < row.group; ++g) {
      const float* from = memory.tile_logits + g * kTileKeys;
      float* to = memory.logits + g * candidates + first;
      for (int64_t j = 0; j < n; ++j) to[j] = row.p.scale * from[j];
    }
  });
  for (int64_t g = 0; g < row.group; ++g) {
    ForEachVote({memory.logits + g * candidates, static_cast<size_t>(candidates)}, add);
  }
}

// Lists the tokens of the best of `ranked`, which are tokens.
void ListBest(const SelectRow& row, std::span<Ranked> ranked) {
  const int64_t count = std::min(row.numbers.budget_tokens, std::ssize(ranked));
  KeepBest(ranked, count);
  ListWriter writer(row.header, row.list);
  for (const Ranked& best : ranked.first(static_cast<size_t>(count))) {
    writer.Add(best.item(), best.item() + 1, best.score());
  }
}

void SelectTokens(const SelectRow& row, const ThreadMemory& memory) {
  row.header = MakeHeader(row.block, row.numbers);
  const int64_t candidates = NumCandidates(row.header, row.numbers);
  if (candidates == 0) return;
  std::fill_n(memory.votes, candidates, 0.0f);
  Vote(row, memory, [&](size_t j, double vote) { memory.votes[j] += static_cast<float>(vote); });
  for (int64_t j = 0; j < candidates; ++j) {
    memory.ranked[j] = Ranked(memory.votes[j], row.header.sink_end + j);
  }
  ListBest(row, {memory.ranked, static_cast<size_t>(candidates)});
}

// Votes of a layer are integers in units of 2^-52: sums of up to 1024 heads are exact, whatever
// their order and the ranks that make them.
constexpr double kVoteUnits = 0x1p52;

// Selection at layer scope, a query block at a time: its KV heads vote side by side.
class LayerSelection {
 public:
  LayerSelection(const SelectParams& p, const PageSelection& out, Executor& executor)
      : p_(p), out_(out), executor_(executor), heads_(p.kv.layout.num_kv_heads) {
    for (const QueryBlock& block : p.blocks) context_ = std::max(context_, block.first_position);
  }

  absl::Status Run() {
    KVASIR_RETURN_IF_ERROR(LayOut());
    for (int64_t block = 0; block < std::ssize(p_.blocks); ++block) {
      KVASIR_RETURN_IF_ERROR(SelectBlock(out_.Rows(block * heads_, heads_), block * heads_));
    }
    return absl::OkStatus();
  }

 private:
  absl::Status LayOut() {
    ScratchPieces counted(nullptr);
    ThreadMemory(counted, p_);
    thread_bytes_ = counted.bytes();
    ScratchPieces votes(nullptr);
    votes.Take<int64_t>(heads_ * context_);
    KVASIR_ASSIGN_OR_RETURN(
        memory_, p_.scratch->Reserve(votes.bytes() + thread_bytes_ * executor_.num_threads()));
    ScratchPieces pieces(memory_);
    votes_ = pieces.Take<int64_t>(heads_ * context_);
    memory_ += pieces.bytes();
    return absl::OkStatus();
  }
  ThreadMemory MemoryOf(int thread) const {
    ScratchPieces pieces(memory_ + thread_bytes_ * thread);
    return ThreadMemory(pieces, p_);
  }

  absl::Status SelectBlock(const PageSelection& rows, int64_t first_row) {
    const SelectRow first(p_, out_, first_row);
    if (!IsToRun(first)) return absl::OkStatus();
    for (int64_t i = 0; i < heads_; ++i) rows.header(i) = MakeHeader(first.block, first.numbers);
    const int64_t candidates = NumCandidates(first.header, first.numbers);
    if (candidates == 0) return absl::OkStatus();
    const auto vote = [&](int64_t head, int thread) {
      int64_t* votes = votes_ + head * candidates;
      std::fill_n(votes, candidates, int64_t{0});
      Vote(SelectRow(p_, out_, first_row + head), MemoryOf(thread),
           [&](size_t j, double share) { votes[j] += std::llrint(share * kVoteUnits); });
    };
    executor_.ParallelFor(heads_, std::ref(vote));
    for (int64_t head = 1; head < heads_; ++head) {
      for (int64_t j = 0; j < candidates; ++j) votes_[j] += votes_[head * candidates + j];
    }
    const std::span votes(votes_, static_cast<size_t>(candidates));
    if (p_.ranks != nullptr) KVASIR_RETURN_IF_ERROR(p_.ranks->Sum(votes));
    const std::span ranked(MemoryOf(0).ranked, static_cast<size_t>(candidates));
    for (size_t j = 0; j < ranked.size(); ++j) {
      const double votes_for = static_cast<double>(votes[j]) / kVoteUnits;
      ranked[j] =
          Ranked(static_cast<float>(votes_for), first.header.sink_end + static_cast<int64_t>(j));
    }
    ListBest(first, ranked);
    ShareWithinBlock(rows);
    return absl::OkStatus();
  }

  const SelectParams& p_;
  const PageSelection& out_;
  Executor& executor_;
  const int64_t heads_;
  int64_t context_ = 0;
  int64_t thread_bytes_ = 0;
  std::byte* memory_ = nullptr;  // of the threads
  int64_t* votes_ = nullptr;     // [KV heads, candidates]; those of the layer in the first's place
};

}  // namespace

absl::StatusOr<std::unique_ptr<Selector>> TokenSelectSelector::Create(
    const MethodOptions& options) {
  Scope scope = Scope::kKvGroup;
  for (const MethodOption& option : options) {
    if (option.name != "scope") {
      return absl::InvalidArgumentError(
          absl::StrCat("tokenselect has no option '", option.name, "'; its option is scope"));
    }
    KVASIR_ASSIGN_OR_RETURN(scope, ScopeNamed("tokenselect", option.value));
  }
  return std::unique_ptr<Selector>(new TokenSelectSelector(scope));
}

int64_t TokenSelectSelector::MaxEntries(const SelectionNumbers& numbers, int64_t tokens) const {
  return std::min(numbers.budget_tokens, CeilPages(tokens));
}

absl::Status TokenSelectSelector::Select(const SelectParams& p, PageSelection& out,
                                         Executor& executor) const {
  KVASIR_RETURN_IF_ERROR(CheckSelect("tokenselect", p, out));
  KVASIR_RETURN_IF_ERROR(CheckCapacity("tokenselect", *this, p, out));
  ReserveDistances(p, executor);
  if (scope_ == Scope::kLayer) return LayerSelection(p, out, executor).Run();
  return WithThreadMemory(
      p, out, executor, [&](ScratchPieces& pieces) { return ThreadMemory(pieces, p); },
      SelectTokens);
}

}  // namespace kvasir::kernels
