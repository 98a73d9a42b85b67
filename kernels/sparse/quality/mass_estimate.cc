#include "kernels/sparse/quality/mass_estimate.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/base/status_macros.h"
#include "kernels/paged/compact_positions.h"
#include "kernels/sparse/common/select_common.h"
#include "kernels/sparse/key_logits/code_logits.h"
#include "kernels/sparse/key_logits/key_logits.h"

namespace kvasir::kernels {
namespace {

constexpr float kUnknown = std::numeric_limits<float>::quiet_NaN();

// The code of a token suffices if the token has at most this share of the weight known so far: the
// errors of that many tokens average out.
constexpr double kHeavyShare = 1.0 / 256;

// A sum of weights exp(logit), kept as one float32 per column of a tile.
class WeightSum {
 public:
  // Adds the weights of a tile's unscaled logits [kTileKeys].
  void Add(const KeyTileFunctions& functions, const float* logits, float scale) {
    const float max = scale * functions.largest(logits);
    if (max > max_) {
      const auto keep = static_cast<float>(std::exp(static_cast<double>(max_ - max)));
      for (float& sum : sums_) sum *= keep;
      max_ = max;
    }
    functions.add_weights({.logits = logits, .scale = scale, .max = max_}, sums_.data());
  }
  // Returns the sum relative to exp(max).
  double SumAt(float max) const {
    const double sum = std::accumulate(sums_.begin(), sums_.end(), 0.0);
    return sum * std::exp(static_cast<double>(max_ - max));
  }
  float max() const { return max_; }

 private:
  float max_ = std::numeric_limits<float>::lowest();  // finite, so that -inf has weight 0
  std::array<float, kTileKeys> sums_ = {};
};

// The weights of one query head so far.
struct HeadSums {
  WeightSum kept;
  WeightSum rest;
  float heavy = -std::numeric_limits<float>::infinity();  // only logits above it may be heavy

  // NaN if there is no weight.
  double Share() const {
    const float max = std::max(kept.max(), rest.max());
    const double own = kept.SumAt(max);
    return max == WeightSum().max() ? kUnknown : own / (own + rest.SumAt(max));
  }
  // The total only grows, so an old limit is too low but never too high.
  void RaiseHeavy() {
    const float max = std::max(kept.max(), rest.max());
    heavy = max + static_cast<float>(std::log(kHeavyShare * (kept.SumAt(max) + rest.SumAt(max))));
  }
};

// Working memory of one thread.
struct ThreadMemory {
  ThreadMemory(ScratchPieces& pieces, const SelectParams& p) : tile(pieces, p), codes(pieces, p) {
    const int64_t group = p.q.dim(1) / p.kv.layout.num_kv_heads;
    int64_t context = 0;
    for (const QueryTile& queries : p.tiles) {
      context = std::max(context, queries.first_position + 1);
    }
    distant = pieces.Take<float>(group * p.kv.layout.head_dim);
    placed = pieces.Take<float>(group * p.kv.layout.head_dim);
    logits = pieces.Take<float>(group * kTileKeys);
    tokens = pieces.Take<int32_t>(context);
    heads = pieces.Take<HeadSums>(group);
  }

  KeyLogits::Memory tile;
  CodeLogits::Memory codes;
  float* distant;   // [G, head_dim]: queries for keys between sink and window
  float* placed;    // [G, head_dim]: queries for keys of sink and window
  float* logits;    // [G, kTileKeys]
  int32_t* tokens;  // [context]
  HeadSums* heads;  // [G]
};

// The estimate of one row of kind kList.
class RowEstimate {
 public:
  RowEstimate(const SelectRow& row, const ThreadMemory& memory)
      : row_(row),
        memory_(memory),
        functions_(ChosenKeyTile()),
        keys_(row, KeyForm::kCached, memory.tile),
        codes_(row, LoadQueries(row, memory), memory.codes) {
    std::fill_n(memory.heads, row.group, HeadSums());
  }

  void Run(float* mass) {
    const SelectionHeader& header = row_.header;
    AddKept(0, header.sink_end, memory_.placed);
    AddKept(header.sink_end, header.window_begin, memory_.distant);
    AddKept(header.window_begin, row_.tile.first_position + 1, memory_.placed);
    AddRest();
    for (int64_t g = 0; g < row_.group; ++g) {
      mass[g] = static_cast<float>(memory_.heads[g].Share());
    }
  }

 private:
  // Fills `placed` and `distant`, and returns `distant`.
  static const float* LoadQueries(const SelectRow& row, const ThreadMemory& memory) {
    for (int64_t g = 0; g < row.group; ++g) {
      float* const placed = memory.placed + g * row.p.kv.layout.head_dim;
      LoadDistantQuery(row, 0, g, memory.distant + g * row.p.kv.layout.head_dim);
      LoadQuery(row, 0, g, placed);
      if (row.p.rope == nullptr) continue;
      row.p.rope->Rotate(placed, DType::kFloat32, 1,
                         QueryPosition(row.header, row.tile.first_position));
    }
    return memory.distant;
  }

  // Adds the tokens of [begin, end) that are attended to.
  void AddKept(int64_t begin, int64_t end, const float* queries) {
    int64_t count = 0;
    SelectedPages walk(row_.header, row_.list, row_.tile.first_position);
    for (walk.SkipTo(begin / kPageTokens); walk.page() * kPageTokens < end; walk.Next()) {
      const int64_t start = walk.page() * kPageTokens;
      uint64_t mask = walk.mask() & TokenMask(begin - start, end - start);
      for (; mask != 0; mask &= mask - 1) {
        memory_.tokens[count++] = static_cast<int32_t>(start + std::countr_zero(mask));
      }
    }
    const bool moves = row_.p.rope != nullptr && queries == memory_.placed;
    const auto token_at = [&](int64_t i) { return int64_t{memory_.tokens[i]}; };
    keys_.ForEachTile(count, token_at, [&](int64_t first, int64_t n) {
      if (moves) {
        keys_.Rotate(
            n, [&](int64_t i) { return TokenPosition(row_.header, nullptr, token_at(first + i)); });
      }
      keys_.Logits(queries, row_.group, memory_.logits);
      for (int64_t g = 0; g < row_.group; ++g) {
        memory_.heads[g].kept.Add(functions_, Logits(g), row_.p.scale);
      }
    });
  }

  // Adds the tokens that are not attended to, all of which lie between sink and window.
  void AddRest() {
    const int64_t begin = row_.header.sink_end, end = row_.header.window_begin;
    SelectedPages walk(row_.header, row_.list, row_.tile.first_position);
    for (int64_t page = begin / kPageTokens; page * kPageTokens < end; ++page) {
      walk.SkipTo(page);
      const uint64_t attended = walk.valid() && walk.page() == page ? walk.mask() : 0;
      const int64_t start = page * kPageTokens;
      AddRestOfPage(page, TokenMask(begin - start, end - start) & ~attended);
    }
    AddHeavy();
  }
  void AddRestOfPage(int64_t page, uint64_t tokens) {
    if (tokens == 0 || !codes_.Has(page)) return;
    if ((page + 1) * kPageTokens < row_.header.window_begin) codes_.Prefetch(page + 1);
    codes_.Logits(page, memory_.logits);
    TakeOut(~tokens);
    TakeHeavy(page);
    for (int64_t g = 0; g < row_.group; ++g) {
      memory_.heads[g].rest.Add(functions_, Logits(g), row_.p.scale);
    }
    if (num_heavy_ >= kTileKeys) AddHeavy();
  }

  // Puts aside the tokens that are heavy for some head.
  void TakeHeavy(int64_t page) {
    uint64_t heavy = 0;
    for (int64_t g = 0; g < row_.group; ++g) {
      HeadSums& head = memory_.heads[g];
      const float largest = row_.p.scale * functions_.largest(Logits(g));
      if (!(largest > head.heavy)) continue;
      head.RaiseHeavy();
      for (int64_t t = 0; t < kPageTokens && largest > head.heavy; ++t) {
        if (row_.p.scale * Logits(g)[t] > head.heavy) heavy |= uint64_t{1} << t;
      }
    }
    TakeOut(heavy);
    for (; heavy != 0; heavy &= heavy - 1) {
      heavy_[static_cast<size_t>(num_heavy_++)] = page * kPageTokens + std::countr_zero(heavy);
    }
  }
  // Sets these tokens' logits in the page to -inf, so that they have weight 0.
  void TakeOut(uint64_t tokens) {
    for (; tokens != 0; tokens &= tokens - 1) {
      for (int64_t g = 0; g < row_.group; ++g) {
        Logits(g)[std::countr_zero(tokens)] = -std::numeric_limits<float>::infinity();
      }
    }
  }
  void AddHeavy() {
    const auto token_at = [&](int64_t i) { return heavy_[static_cast<size_t>(i)]; };
    keys_.ForEachTile(num_heavy_, token_at, [&](int64_t, int64_t) {
      keys_.Logits(memory_.distant, row_.group, memory_.logits);
      for (int64_t g = 0; g < row_.group; ++g) {
        memory_.heads[g].rest.Add(functions_, Logits(g), row_.p.scale);
      }
    });
    num_heavy_ = 0;
  }

  float* Logits(int64_t g) const { return memory_.logits + g * kTileKeys; }

  const SelectRow& row_;
  const ThreadMemory& memory_;
  const KeyTileFunctions& functions_;
  KeyLogits keys_;
  const CodeLogits codes_;
  std::array<int64_t, 2 * kTileKeys> heavy_;  // tokens that were put aside
  int64_t num_heavy_ = 0;
};

absl::Status CheckEstimate(const SelectParams& p, const PageSelection& selection, size_t masses) {
  KVASIR_RETURN_IF_ERROR(CheckSelect("estimate_mass", p, selection));
  const int64_t group = p.q.dim(1) / p.kv.layout.num_kv_heads;
  if (static_cast<int64_t>(masses) != selection.num_rows * group) {
    return absl::InvalidArgumentError("estimate_mass: mass must be [rows, heads of a group]");
  }
  if (p.kv.key_codes != nullptr) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "estimate_mass: the KV has no key codes; declare min_mass before the KV store is made");
}

}  // namespace

absl::Status EstimateMass(const SelectParams& p, const PageSelection& selection,
                          std::span<float> mass, Executor& executor) {
  KVASIR_RETURN_IF_ERROR(CheckEstimate(p, selection, mass.size()));
  ReserveDistances(p, executor);
  if (p.rope != nullptr) {
    ReservePositions(selection, p.tiles, p.kv.layout.num_kv_heads, *p.rope, executor);
  }
  return WithThreadMemory(
      p, selection, executor, [&](ScratchPieces& pieces) { return ThreadMemory(pieces, p); },
      [&](const SelectRow& row, const ThreadMemory& memory) {
        float* const to = mass.data() + row.index * row.group;
        if (row.header.kind == SelectionHeader::Kind::kAll) {
          std::fill_n(to, row.group, 1.0f);
        } else if (row.tile.num_rows > 1) {
          std::fill_n(to, row.group, kUnknown);
        } else {
          RowEstimate(row, memory).Run(to);
        }
      });
}

}  // namespace kvasir::kernels
