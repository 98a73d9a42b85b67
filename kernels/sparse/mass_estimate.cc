#include "kernels/sparse/mass_estimate.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/base/status_macros.h"
#include "kernels/paged/compact_positions.h"
#include "kernels/sparse/key_logits.h"
#include "kernels/sparse/select_common.h"

namespace kvasir::kernels {
namespace {

constexpr float kUnknown = std::numeric_limits<float>::quiet_NaN();

// The sum of exp(logit), as of AttentionState, in float64.
class ExpSum {
 public:
  void Add(float logit) {
    if (logit > max_) {
      sum_ = sum_ * std::exp(static_cast<double>(max_ - logit)) + 1;
      max_ = logit;
    } else if (logit != -std::numeric_limits<float>::infinity()) {
      sum_ += std::exp(static_cast<double>(logit - max_));  // NaN stays NaN
    }
  }
  // This sum / (this sum + `rest`); NaN where both are 0.
  double ShareBeside(const ExpSum& rest) const {
    const float max = std::max(max_, rest.max_);
    const double own = sum_ * std::exp(static_cast<double>(max_ - max));
    return own / (own + rest.sum_ * std::exp(static_cast<double>(rest.max_ - max)));
  }

 private:
  float max_ = -std::numeric_limits<float>::infinity();
  double sum_ = 0;
};

// Memory of one thread.
struct ThreadMemory {
  ThreadMemory(ScratchPieces& pieces, const SelectParams& p) : tile(pieces, p) {
    const int64_t group = p.q.dim(1) / p.kv.layout.num_kv_heads;
    distant = pieces.Take<float>(group * p.kv.layout.head_dim);
    placed = pieces.Take<float>(group * p.kv.layout.head_dim);
    logits = pieces.Take<float>(group * kTileKeys);
    kept = pieces.Take<ExpSum>(group);
    rest = pieces.Take<ExpSum>(group);
  }

  KeyLogits::Memory tile;
  float* distant;  // [G, head_dim]: queries as keys between sink and window meet them
  float* placed;   // [G, head_dim]: as sink and window do, where keys are un-rotated
  float* logits;   // [G, kTileKeys]
  ExpSum* kept;    // [G]
  ExpSum* rest;
};

// One row of kind list.
class RowEstimate {
 public:
  RowEstimate(const SelectRow& row, const ThreadMemory& memory)
      : row_(row),
        memory_(memory),
        keys_(row, KeyForm::kCached, memory.tile),
        codes_(row, KeyForm::kCodes, memory.tile) {
    for (int64_t g = 0; g < row.group; ++g) {
      LoadDistantQuery(row, 0, g, Distant(g));
      if (row.p.rope == nullptr) continue;
      LoadQuery(row, 0, g, Placed(g));
      row.p.rope->Rotate(Placed(g), DType::kFloat32, 1,
                         QueryPosition(row.header, row.block.first_position));
    }
  }

  void Run(float* mass) {
    std::fill_n(memory_.kept, row_.group, ExpSum());
    std::fill_n(memory_.rest, row_.group, ExpSum());
    const int64_t position = row_.block.first_position;
    int64_t next = 0;  // the first page of which nothing is counted yet
    for (SelectedPages walk(row_.header, row_.list, position); walk.valid(); walk.Next()) {
      for (; next < walk.page(); ++next) AddRest(next, ~uint64_t{0});
      AddKept(walk.page(), walk.mask());
      AddRest(next++, ~walk.mask() & TokenMask(0, position + 1 - walk.page() * kPageTokens));
    }
    for (int64_t g = 0; g < row_.group; ++g) {
      mass[g] = static_cast<float>(memory_.kept[g].ShareBeside(memory_.rest[g]));
    }
  }

 private:
  float* Distant(int64_t g) const { return memory_.distant + g * row_.p.kv.layout.head_dim; }
  float* Placed(int64_t g) const { return memory_.placed + g * row_.p.kv.layout.head_dim; }

  void AddKept(int64_t page, uint64_t mask) {
    const int64_t start = page * kPageTokens;
    const SelectionHeader& header = row_.header;
    if (row_.p.rope == nullptr) {
      Add(keys_, start, mask, memory_.distant, memory_.kept);
      return;
    }
    AddPlaced(start, mask & TokenMask(0, header.sink_end - start));
    Add(keys_, start, mask & TokenMask(header.sink_end - start, header.window_begin - start),
        memory_.distant, memory_.kept);
    AddPlaced(start, mask & TokenMask(header.window_begin - start, kPageTokens));
  }
  // Of sink or window.
  void AddPlaced(int64_t start, uint64_t mask) {
    Add(keys_, start, mask, memory_.placed, memory_.kept, [&](int64_t n) {
      keys_.Rotate(n, [&](int64_t i) {
        return TokenPosition(row_.header, nullptr, tokens_[static_cast<size_t>(i)]);
      });
    });
  }
  void AddRest(int64_t page, uint64_t mask) {
    Add(codes_, page * kPageTokens, mask, memory_.distant, memory_.rest);
  }

  // The tokens of the page that begins at `start`; place(n) may rotate their keys.
  template <typename Place>
  void Add(KeyLogits& logits, int64_t start, uint64_t mask, const float* queries, ExpSum* sums,
           const Place& place) {
    int64_t count = 0;
    for (int64_t t = 0; t < kPageTokens; ++t) {
      if ((mask >> t & 1) != 0) tokens_[static_cast<size_t>(count++)] = start + t;
    }
    const auto token_at = [&](int64_t i) { return tokens_[static_cast<size_t>(i)]; };
    logits.ForEachTile(count, token_at, [&](int64_t, int64_t n) {
      place(n);
      logits.Logits(queries, row_.group, memory_.logits);
      for (int64_t g = 0; g < row_.group; ++g) {
        const float* of_head = memory_.logits + g * kTileKeys;
        for (int64_t i = 0; i < n; ++i) sums[g].Add(row_.p.scale * of_head[i]);
      }
    });
  }
  void Add(KeyLogits& logits, int64_t start, uint64_t mask, const float* queries, ExpSum* sums) {
    Add(logits, start, mask, queries, sums, [](int64_t) {});
  }

  const SelectRow& row_;
  const ThreadMemory& memory_;
  KeyLogits keys_;
  KeyLogits codes_;
  std::array<int64_t, kPageTokens> tokens_;  // of a page
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
    ReservePositions(selection, p.blocks, p.kv.layout.num_kv_heads, *p.rope, executor);
  }
  return WithThreadMemory(
      p, selection, executor, [&](ScratchPieces& pieces) { return ThreadMemory(pieces, p); },
      [&](const SelectRow& row, const ThreadMemory& memory) {
        float* const to = mass.data() + row.index * row.group;
        if (row.header.kind == SelectionHeader::Kind::kAll) {
          std::fill_n(to, row.group, 1.0f);
        } else if (row.block.num_rows > 1) {
          std::fill_n(to, row.group, kUnknown);
        } else {
          RowEstimate(row, memory).Run(to);
        }
      });
}

}  // namespace kvasir::kernels
