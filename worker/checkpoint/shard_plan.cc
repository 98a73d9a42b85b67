#include "worker/checkpoint/shard_plan.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace kvasir::worker {
namespace {

template <typename... Parts>
absl::Status DoesNotDivide(int64_t num_ranks, const Parts&... parts) {
  return absl::InvalidArgumentError(
      absl::StrCat("the model cannot be split over ", num_ranks, " ranks: ", parts...));
}

// Returns the rank's equal part of [0, count). REQUIRES: num_ranks divides count.
IndexRange Part(int64_t count, int64_t part, int64_t num_parts) {
  return {.begin = count / num_parts * part, .end = count / num_parts * (part + 1)};
}

// Returns the rank's part of the columns of the MLP: equal parts where the ranks divide them,
// otherwise as equal as possible with parts that begin where vectors are aligned. REQUIRES: as many
// columns as ranks.
IndexRange ColumnsPart(int64_t columns, int64_t rank, int64_t num_ranks) {
  constexpr int64_t kAligned = 64;
  if (columns % num_ranks == 0) return Part(columns, rank, num_ranks);
  int64_t unit = std::min(kAligned, columns & -columns);  // a power of two that divides them
  while (columns / unit < num_ranks) unit /= 2;
  const int64_t units = columns / unit;
  return {.begin = units * rank / num_ranks * unit, .end = units * (rank + 1) / num_ranks * unit};
}

absl::Status CheckHeadsDivide(const ModelConfig& config, int64_t num_ranks) {
  const int64_t heads = config.num_heads, kv_heads = config.num_kv_heads;
  if (num_ranks <= kv_heads) {
    if (kv_heads % num_ranks == 0) return absl::OkStatus();
    return DoesNotDivide(num_ranks, "it has ", kv_heads,
                         " KV heads; expected a number of ranks that divides them, or a multiple");
  }
  if (num_ranks % kv_heads != 0) {
    return DoesNotDivide(num_ranks, "more than its ", kv_heads,
                         " KV heads, so expected a multiple of ", kv_heads);
  }
  const int64_t replicas = num_ranks / kv_heads;
  if (config.queries_per_kv_head() % replicas != 0) {
    return DoesNotDivide(num_ranks, "each KV head would lie on ", replicas,
                         " ranks, but its query heads are ", config.queries_per_kv_head(), " (",
                         heads, " heads over ", kv_heads, " KV heads)");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ShardPlan> ShardPlan::Make(const ModelConfig& config, int64_t rank,
                                          int64_t num_ranks) {
  if (num_ranks < 1 || rank < 0 || rank >= num_ranks) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", rank, " of ", num_ranks,
                                                   " ranks: expected a rank from 0 to one less "
                                                   "than their number"));
  }
  KVASIR_RETURN_IF_ERROR(CheckHeadsDivide(config, num_ranks));
  if (config.intermediate_size < num_ranks) {
    return DoesNotDivide(num_ranks, "intermediate_size is ", config.intermediate_size);
  }
  const int64_t vocab_rows = (config.vocab_size + num_ranks - 1) / num_ranks;
  if (vocab_rows * (num_ranks - 1) >= config.vocab_size) {
    return DoesNotDivide(num_ranks, "with ", vocab_rows, " of its ", config.vocab_size,
                         " tokens each, the last rank has none");
  }
  ShardPlan plan;
  plan.rank = rank;
  plan.num_ranks = num_ranks;
  plan.kv_replicas = std::max(int64_t{1}, num_ranks / config.num_kv_heads);
  plan.kv_heads = Part(config.num_kv_heads, rank / plan.kv_replicas, num_ranks / plan.kv_replicas);
  // The ranks of one KV head are adjacent, so query heads lie in rank order in both cases.
  plan.query_heads = Part(config.num_heads, rank, num_ranks);
  plan.intermediate = ColumnsPart(config.intermediate_size, rank, num_ranks);
  plan.vocab_rows_per_rank = vocab_rows;
  plan.vocab = {.begin = rank * vocab_rows,
                .end = std::min((rank + 1) * vocab_rows, config.vocab_size)};
  return plan;
}

}  // namespace kvasir::worker
