#include "kernels/sparse/top_p/top_p_pruner.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <span>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/paged/compact_positions.h"
#include "kernels/sparse/common/select_common.h"
#include "kernels/sparse/key_logits/key_logits.h"
#include "kernels/sparse/top_p/top_p_rule.h"

namespace kvasir::kernels {
namespace {

int64_t NumCompeting(const SelectRow& row) {
  int64_t count = 0;
  for (int32_t i = 0; i < row.header.count; ++i) {
    count += std::popcount(Competing(row.header, row.list[i]));
  }
  return count;
}

// Number of tokens in sink and window: [0, sink_end) and [window_begin, position].
int64_t NumMandatory(const SelectionHeader& header) {
  return header.sink_end + header.query_position + 1 - header.window_begin;
}

struct Sizes {
  int64_t tokens = 0;  // competing and mandatory, of the largest row
  int64_t competing = 0;
};

Sizes LargestRow(const SelectParams& p, const PageSelection& selection) {
  Sizes sizes;
  for (int64_t i = 0; i < selection.num_rows; ++i) {
    const SelectRow row(p, selection, i);
    if (!IsPruned(row.header, row.tile, row.numbers)) continue;
    const int64_t competing = NumCompeting(row);
    sizes.competing = std::max(sizes.competing, competing);
    sizes.tokens = std::max(sizes.tokens, competing + NumMandatory(row.header));
  }
  return sizes;
}

// Working memory of one thread of a Prune call.
struct ThreadMemory {
  ThreadMemory(ScratchPieces& pieces, const SelectParams& p, const Sizes& sizes)
      : stride(sizes.tokens), tile(pieces, p) {
    const int64_t group = p.q.dim(1) / p.kv.layout.num_kv_heads;
    queries = pieces.Take<float>(group * p.kv.layout.head_dim);
    tile_logits = pieces.Take<float>(group * kTileKeys);
    tokens = pieces.Take<Token>(stride);
    weights = pieces.Take<float>(group * stride);
    kept = pieces.Take<uint8_t>(sizes.competing);
  }

  // An attended token and the entry that lists it. Null entry: sink or window.
  struct Token {
    int64_t token;
    const SelectionEntry* entry;
  };

  int64_t stride;
  KeyLogits::Memory tile;
  float* queries;      // [G, head_dim]
  float* tile_logits;  // [G, kTileKeys]
  Token* tokens;       // competing ones before mandatory ones
  float* weights;      // [G, stride], of `tokens`: logits, then weights
  uint8_t* kept;       // [competing tokens]
};

// Returns the largest float t >= 0 for which the weights >= t sum to at least `need`. REQUIRES:
// need > 0.
float Threshold(std::span<const float> weights, double need) {
  const auto reaches = [&](uint32_t bits) {
    const float t = std::bit_cast<float>(bits);
    double sum = 0;
    for (const float w : weights) sum += w >= t ? static_cast<double>(w) : 0.0;  // leaves out NaN
    return sum >= need;
  };
  uint32_t low = 0, high = std::bit_cast<uint32_t>(1.0f) + 1;  // weights are at most 1
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    (reaches(middle) ? low : high) = middle;
  }
  return std::bit_cast<float>(low);
}

// The pruning of one row.
class RowPruner {
 public:
  RowPruner(const SelectRow& row, const ThreadMemory& memory) : row_(row), memory_(memory) {
    for (int64_t g = 0; g < row.group; ++g) {
      float* query = memory.queries + g * row.p.kv.layout.head_dim;
      LoadQuery(row, 0, g, query);
      if (row.p.rope == nullptr) continue;
      const int64_t position = QueryPosition(row.header, row.tile.first_position);
      row.p.rope->Rotate(query, DType::kFloat32, 1, position);
    }
  }

  void Run() {
    ListTokens();
    Estimate();
    std::fill_n(memory_.kept, num_competing_, uint8_t{0});
    for (int64_t g = 0; g < row_.group; ++g) KeepOfHead(memory_.weights + g * memory_.stride);
    ClearLive();
  }

 private:
  void ListTokens() {
    int64_t count = 0;
    for (int32_t i = 0; i < row_.header.count; ++i) {
      const SelectionEntry& entry = row_.list[i];
      for (uint64_t rest = Competing(row_.header, entry); rest != 0; rest &= rest - 1) {
        memory_.tokens[count++] = {entry.page * kPageTokens + std::countr_zero(rest), &entry};
      }
    }
    num_competing_ = count;
    for (int64_t t = 0; t < row_.header.sink_end; ++t) memory_.tokens[count++] = {t, nullptr};
    for (int64_t t = row_.header.window_begin; t <= row_.header.query_position; ++t) {
      memory_.tokens[count++] = {t, nullptr};
    }
    num_tokens_ = count;
  }

  void Estimate() {
    KeyLogits logits(row_, KeyForm::kCodes, memory_.tile);
    const auto token_at = [&](int64_t i) { return memory_.tokens[i].token; };
    logits.ForEachTile(num_tokens_, token_at, [&](int64_t first, int64_t n) {
      if (row_.p.rope != nullptr) {
        logits.Rotate(n, [&](int64_t i) {
          const ThreadMemory::Token& token = memory_.tokens[first + i];
          return TokenPosition(row_.header, token.entry, token.token);
        });
      }
      logits.Logits(memory_.queries, row_.group, memory_.tile_logits);
      for (int64_t g = 0; g < row_.group; ++g) {
        const float* from = memory_.tile_logits + g * kTileKeys;
        float* to = memory_.weights + g * memory_.stride + first;
        for (int64_t i = 0; i < n; ++i) to[i] = row_.p.scale * from[i];
      }
    });
  }

  void KeepOfHead(float* weights) {
    const std::span all(weights, static_cast<size_t>(num_tokens_));
    float max = -std::numeric_limits<float>::infinity();
    for (const float logit : all) max = std::max(max, logit);  // leaves out NaN
    double total = 0, mandatory = 0;
    for (int64_t j = 0; j < num_tokens_; ++j) {
      weights[j] = std::exp(weights[j] - max);
      if (std::isnan(weights[j])) continue;
      total += static_cast<double>(weights[j]);
      if (j >= num_competing_) mandatory += static_cast<double>(weights[j]);
    }
    const double need =
        static_cast<double>(row_.numbers.top_p) * (1 - kTopPRounding) * total - mandatory;
    const std::span competing = all.first(static_cast<size_t>(num_competing_));
    const float threshold =
        need > 0 ? Threshold(competing, need) : std::numeric_limits<float>::infinity();
    for (int64_t j = 0; j < num_competing_; ++j) {
      if (!(weights[j] < threshold)) memory_.kept[j] = 1;  // NaN is kept, too
    }
  }

  void ClearLive() {
    int64_t j = 0;
    for (int32_t i = 0; i < row_.header.count; ++i) {
      SelectionEntry& entry = row_.list[i];
      for (uint64_t rest = Competing(row_.header, entry); rest != 0; rest &= rest - 1, ++j) {
        if (memory_.kept[j] == 0) entry.live &= ~(rest & (~rest + 1));
      }
    }
  }

  const SelectRow& row_;
  const ThreadMemory& memory_;
  int64_t num_competing_ = 0;
  int64_t num_tokens_ = 0;
};

absl::Status CheckTopP(const SelectParams& p, const PageSelection& selection) {
  KVASIR_RETURN_IF_ERROR(CheckSelect("top_p", p, selection));
  if (p.kv.key_codes == nullptr) {
    return absl::FailedPreconditionError(
        "top_p: the KV has no key codes; declare the policy before the KV store is made");
  }
  for (const PolicyNumbers& numbers : p.numbers) {
    if (!(numbers.top_p <= 0)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("top_p: the mass to keep is ", numbers.top_p, "; it is above 0, 1 keeps all"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status TopPPruner::Prune(const SelectParams& p, PageSelection& selection,
                               Executor& executor) const {
  KVASIR_RETURN_IF_ERROR(CheckTopP(p, selection));
  if (p.rope != nullptr) {
    ReservePositions(selection, p.tiles, p.kv.layout.num_kv_heads, *p.rope, executor);
  }
  const Sizes sizes = LargestRow(p, selection);
  return WithThreadMemory(
      p, selection, executor, [&](ScratchPieces& pieces) { return ThreadMemory(pieces, p, sizes); },
      [&](const SelectRow& row, const ThreadMemory& memory) {
        if (IsPruned(row.header, row.tile, row.numbers)) RowPruner(row, memory).Run();
      });
}

}  // namespace kvasir::kernels
