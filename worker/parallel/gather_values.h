// Gives every rank the value of each rank, for values that ranks exchange once. A function without
// state.
#pragma once

#include <cstring>
#include <type_traits>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/base/status_macros.h"
#include "worker/parallel/collective.h"

namespace kvasir::worker {

// The result is in rank order. A gather moves bits: four bytes go as one float.
template <typename T>
absl::StatusOr<std::vector<T>> GatherValues(Collective& ranks, const T& own) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(float) == 0);
  const auto size = static_cast<size_t>(ranks.size());
  std::vector<float> in(sizeof(T) / sizeof(float)), out(size * in.size());
  std::memcpy(in.data(), &own, sizeof(T));
  KVASIR_RETURN_IF_ERROR(ranks.AllGather(in, absl::MakeSpan(out)));
  std::vector<T> values(size);
  std::memcpy(static_cast<void*>(values.data()), out.data(), size * sizeof(T));
  return values;
}

}  // namespace kvasir::worker
