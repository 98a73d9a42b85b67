#include "kernels/sparse/mass_estimate.h"

#include <algorithm>
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
  ThreadMemory(ScratchPieces& pieces, const SelectParams& p) {
    const int64_t group = p.q.dim(1) / p.kv.layout.num_kv_heads;
    distant = pieces.Take<float>(group * p.kv.layout.head_dim);
    placed = pieces.Take<float>(group * p.kv.layout.head_dim);
    key = pieces.Take<float>(p.kv.layout.head_dim);
    kept = pieces.Take<ExpSum>(group);
    rest = pieces.Take<ExpSum>(group);
  }

  float* distant;  // [G, head_dim]: queries as keys between sink and window meet them
  float* placed;   // [G, head_dim]: as sink and window do, where keys are un-rotated
  float* key;
  ExpSum* kept;  // [G]
  ExpSum* rest;
};

// One row of kind list.
class RowEstimate {
 public:
  RowEstimate(const SelectRow& row, const ThreadMemory& memory)
      : row_(row), memory_(memory), logit_(row), estimate_(row, memory.key) {
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
    for (; mask != 0; mask &= mask - 1) {
      const int64_t token = page * kPageTokens + std::countr_zero(mask);
      for (int64_t g = 0; g < row_.group; ++g) {
        memory_.kept[g].Add(row_.p.scale * Logit(g, token));
      }
    }
  }
  float Logit(int64_t g, int64_t token) {
    const SelectionHeader& header = row_.header;
    const bool between = token >= header.sink_end && token < header.window_begin;
    if (row_.p.rope == nullptr || between) return logit_(Distant(g), token);
    return logit_.At(TokenPosition(header, nullptr, token), Placed(g), token, memory_.key);
  }

  void AddRest(int64_t page, uint64_t mask) {
    for (; mask != 0; mask &= mask - 1) {
      estimate_.Load(page * kPageTokens + std::countr_zero(mask));
      for (int64_t g = 0; g < row_.group; ++g) {
        memory_.rest[g].Add(row_.p.scale * estimate_(Distant(g)));
      }
    }
  }

  const SelectRow& row_;
  const ThreadMemory& memory_;
  KeyLogits logit_;
  KeyEstimates estimate_;
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
