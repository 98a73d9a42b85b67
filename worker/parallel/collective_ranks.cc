#include "worker/parallel/collective_ranks.h"

#include <algorithm>

#include "kernels/base/status_macros.h"

namespace kvasir::worker {

absl::Status CollectiveRanks::GatherBytes(const void* own, size_t bytes) {
  // A gather moves bits: eight bytes go as two floats.
  const size_t floats = bytes / sizeof(float);
  const auto ranks = static_cast<size_t>(shard_.num_ranks);
  gathered_.resize(bytes * ranks);
  return collective_.AllGather({static_cast<const float*>(own), floats},
                               {reinterpret_cast<float*>(gathered_.data()), floats * ranks});
}

template <typename T, typename Use>
void CollectiveRanks::ForEachRank(size_t count, const Use& use) const {
  const auto* values = reinterpret_cast<const T*>(gathered_.data());
  for (int64_t rank = 0; rank < shard_.num_ranks; rank += shard_.kv_replicas) {
    use(std::span(values + static_cast<size_t>(rank) * count, count));
  }
}

absl::Status CollectiveRanks::Sum(std::span<int64_t> values) {
  if (shard_.num_ranks == 1) return absl::OkStatus();
  KVASIR_RETURN_IF_ERROR(GatherBytes(values.data(), values.size_bytes()));
  std::fill(values.begin(), values.end(), 0);
  ForEachRank<int64_t>(values.size(), [&](std::span<const int64_t> more) {
    for (size_t i = 0; i < values.size(); ++i) values[i] += more[i];
  });
  return absl::OkStatus();
}

absl::Status CollectiveRanks::Max(std::span<float> values) {
  if (shard_.num_ranks == 1) return absl::OkStatus();
  KVASIR_RETURN_IF_ERROR(GatherBytes(values.data(), values.size_bytes()));
  ForEachRank<float>(values.size(), [&](std::span<const float> more) {
    for (size_t i = 0; i < values.size(); ++i) values[i] = std::max(values[i], more[i]);
  });
  return absl::OkStatus();
}

absl::StatusOr<std::span<const double>> CollectiveRanks::Gather(std::span<const double> own) {
  if (shard_.num_ranks == 1) return own;
  KVASIR_RETURN_IF_ERROR(GatherBytes(own.data(), own.size_bytes()));
  of_layer_.clear();
  ForEachRank<double>(own.size(), [&](std::span<const double> more) {
    of_layer_.insert(of_layer_.end(), more.begin(), more.end());
  });
  return std::span<const double>(of_layer_);
}

}  // namespace kvasir::worker
