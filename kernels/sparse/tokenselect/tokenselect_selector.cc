#include "kernels/sparse/tokenselect/tokenselect_selector.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <span>
#include <type_traits>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/sparse/common/ranking.h"
#include "kernels/sparse/common/select_common.h"
#include "kernels/sparse/key_logits/key_logits.h"

namespace kvasir::kernels {
namespace {

constexpr float kNoVote = -std::numeric_limits<float>::infinity();

// Working memory of one thread of a Select call.
struct ThreadMemory {
  ThreadMemory(ScratchPieces& pieces, const SelectParams& p)
      : page_logits(pieces, p.kv.layout, p.q.dim(1) / p.kv.layout.num_kv_heads) {
    const int64_t group = p.q.dim(1) / p.kv.layout.num_kv_heads;
    int64_t context = 0;
    for (const QueryTile& tile : p.tiles) context = std::max(context, tile.first_position);
    means = pieces.Take<float>(group * p.kv.layout.head_dim);
    query = pieces.Take<float>(p.kv.layout.head_dim);
    largest = pieces.Take<float>(group * kTileKeys);
    logits = pieces.Take<float>(group * CeilPages(context) * kTileKeys);
    votes = pieces.Take<float>(context);
    ranked = pieces.Take<Ranked>(context);
  }

  float* means;  // [G, head_dim]
  float* query;
  PageLogits::Memory page_logits;
  float* largest;  // [G, kTileKeys]: the largest page logit at each place
  float* logits;   // [G, HeadWeights::Room(candidates)]
  float* votes;    // [candidates]
  Ranked* ranked;
};

void AverageQueries(const SelectRow& row, const ThreadMemory& memory) {
  const int64_t d = row.p.kv.layout.head_dim;
  for (int64_t g = 0; g < row.group; ++g) {
    float* mean = memory.means + g * d;
    std::fill_n(mean, d, 0.0f);
    for (int64_t r = 0; r < row.tile.num_rows; ++r) {
      LoadDistantQuery(row, r, g, memory.query);
      for (int64_t i = 0; i < d; ++i) mean[i] += memory.query[i];
    }
    for (int64_t i = 0; i < d; ++i) mean[i] /= static_cast<float>(row.tile.num_rows);
  }
}

// Logits of a head, which become the weights exp(logit - max) in place. The weights are summed in
// kSumLanes lanes, whatever the vector width of the machine.
class HeadWeights {
 public:
  // Room for the logits of `count` tokens.
  static int64_t Room(int64_t count) { return CeilPages(count) * kTileKeys; }

  // REQUIRES: logits is [Room(count)], and its places from `count` on are unused; `max` is the
  // largest logit that is not NaN.
  HeadWeights(float* logits, int64_t count, float max)
      : logits_(logits), count_(count), end_(Room(count)), max_(max) {
    std::fill(logits_ + count_, logits_ + end_, kNoVote);
  }

  // Adds the softmax of the logits to `votes` [count], as floats or in units of 1 / kVoteUnits. All
  // logits that are +inf share the votes equally. If all are -inf there are no votes.
  template <typename T>
  void AddVotes(T* votes) {
    if (max_ == kNoVote) return;
    std::isinf(max_) ? ShareInfinity() : TakeExponentials();
    const double share = 1 / Sum();
    const float* weights = logits_;
    if constexpr (std::is_integral_v<T>) {
      for (int64_t j = 0; j < count_; ++j) {
        votes[j] += std::llrint(static_cast<double>(weights[j]) * share * kVoteUnits);
      }
    } else {
      const auto rounded = static_cast<T>(share);
      for (int64_t j = 0; j < count_; ++j) votes[j] += weights[j] * rounded;
    }
  }

 private:
  static constexpr int64_t kSumLanes = 8;

  void TakeExponentials() {
    for (int64_t j = 0; j < end_; j += kTileKeys) {
      functions_.take_weights(max_, kLeastVoteExponent, logits_ + j);
    }
  }
  void ShareInfinity() {
    for (int64_t j = 0; j < end_; ++j) {
      logits_[j] = logits_[j] == std::numeric_limits<float>::infinity() ? 1.0f : 0.0f;
    }
  }
  double Sum() const {
    std::array<double, kSumLanes> sums = {};
    for (int64_t j = 0; j < end_; j += kSumLanes) {
      for (size_t lane = 0; lane < kSumLanes; ++lane) {
        sums[lane] += static_cast<double>(logits_[j + static_cast<int64_t>(lane)]);
      }
    }
    return std::accumulate(sums.begin(), sums.end(), 0.0);
  }

  const KeyTileFunctions& functions_ = ChosenKeyTile();
  float* const logits_;
  const int64_t count_;
  const int64_t end_;
  const float max_;
};

// Sets votes [candidates] to the sums of the row's heads. REQUIRES: the row has candidates.
template <typename T>
void Vote(const SelectRow& row, const ThreadMemory& memory, T* votes) {
  const int64_t candidates = NumCandidates(row.header, row.numbers);
  const int64_t room = HeadWeights::Room(candidates);
  const int64_t begin = row.header.sink_end;
  AverageQueries(row, memory);
  const TileQueries queries = {
      .queries = memory.means, .count = row.group, .head_dim = row.p.kv.layout.head_dim};
  std::fill_n(votes, candidates, T{0});
  std::fill_n(memory.largest, row.group * kTileKeys, kNoVote);
  const auto take = [&, scale = row.p.scale](int64_t first, int64_t n, const float* logits) {
    for (int64_t g = 0; g < row.group; ++g) {
      const float* from = logits + g * kTileKeys;
      float* to = memory.logits + g * room + first - begin;
      float* largest = memory.largest + g * kTileKeys;
      for (int64_t j = 0; j < n; ++j) {
        const float logit = scale * from[j];
        to[j] = logit;
        largest[j] = logit > largest[j] ? logit : largest[j];  // leaves out NaN
      }
    }
  };
  PageLogits(row, queries, memory.page_logits).ForEachPage(begin, begin + candidates, take);
  for (int64_t g = 0; g < row.group; ++g) {
    const float* largest = memory.largest + g * kTileKeys;
    const float max = *std::max_element(largest, largest + kTileKeys);
    HeadWeights(memory.logits + g * room, candidates, max).AddVotes(votes);
  }
}

// Lists the best of `ranked`, whose items are tokens.
void ListBest(const SelectRow& row, std::span<Ranked> ranked) {
  const int64_t count = std::min(row.numbers.budget_tokens, std::ssize(ranked));
  KeepBest(ranked, count);
  ListWriter writer(row.header, row.list);
  for (const Ranked& best : ranked.first(static_cast<size_t>(count))) {
    writer.Add(best.item(), best.item() + 1, best.score());
  }
}

void SelectTokens(const SelectRow& row, const ThreadMemory& memory) {
  row.header = MakeHeader(row.tile, row.numbers);
  const int64_t candidates = NumCandidates(row.header, row.numbers);
  if (candidates == 0) return;
  Vote(row, memory, memory.votes);
  for (int64_t j = 0; j < candidates; ++j) {
    memory.ranked[j] = Ranked(memory.votes[j], row.header.sink_end + j);
  }
  ListBest(row, {memory.ranked, static_cast<size_t>(candidates)});
}

// Selects at layer scope, one query tile at a time: its KV heads vote in parallel.
class LayerSelection {
 public:
  LayerSelection(const SelectParams& p, const PageSelection& out, Executor& executor)
      : p_(p), out_(out), executor_(executor), heads_(p.kv.layout.num_kv_heads) {
    for (const QueryTile& tile : p.tiles) context_ = std::max(context_, tile.first_position);
  }

  absl::Status Run() {
    KVASIR_RETURN_IF_ERROR(LayOut());
    for (int64_t block = 0; block < std::ssize(p_.tiles); ++block) {
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
    for (int64_t i = 0; i < heads_; ++i) rows.header(i) = MakeHeader(first.tile, first.numbers);
    const int64_t candidates = NumCandidates(first.header, first.numbers);
    if (candidates == 0) return absl::OkStatus();
    const auto vote = [&](int64_t head, int thread) {
      Vote(SelectRow(p_, out_, first_row + head), MemoryOf(thread), votes_ + head * candidates);
    };
    executor_.ParallelFor(heads_, std::ref(vote));
    for (int64_t head = 1; head < heads_; ++head) {
      for (int64_t j = 0; j < candidates; ++j) votes_[j] += votes_[head * candidates + j];
    }
    const std::span votes(votes_, static_cast<size_t>(candidates));
    if (p_.ranks != nullptr) KVASIR_RETURN_IF_ERROR(p_.ranks->Sum(votes));
    const std::span ranked(MemoryOf(0).ranked, static_cast<size_t>(candidates));
    for (size_t j = 0; j < ranked.size(); ++j) {
      ranked[j] = Ranked(VoteOfUnits(votes[j]), first.header.sink_end + static_cast<int64_t>(j));
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
  int64_t* votes_ = nullptr;     // [KV heads, candidates]; the first row becomes the layer's votes
};

}  // namespace

absl::StatusOr<Scope> TokenSelectSelector::Parse(const MethodOptions& options) {
  Scope scope = Scope::kKvGroup;
  for (const MethodOption& option : options) {
    if (option.name != "scope") {
      return absl::InvalidArgumentError(
          absl::StrCat("tokenselect has no option '", option.name, "'; its option is scope"));
    }
    KVASIR_ASSIGN_OR_RETURN(scope, ScopeNamed("tokenselect", option.value));
  }
  return scope;
}

absl::StatusOr<std::unique_ptr<Selector>> TokenSelectSelector::Create(
    const MethodOptions& options) {
  KVASIR_ASSIGN_OR_RETURN(const Scope scope, Parse(options));
  return std::unique_ptr<Selector>(new TokenSelectSelector(scope));
}

int64_t TokenSelectSelector::MaxEntries(const PolicyNumbers& numbers, int64_t tokens) const {
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
