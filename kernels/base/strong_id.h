// Strongly typed ids: a BlockId is not a SlotId. Compared and hashed by value, printed as a number.
#pragma once

#include <cstdint>
#include <functional>
#include <ostream>
#include <utility>

namespace kvasir::kernels {

template <typename Tag>
struct StrongId {
  int64_t value = -1;

  constexpr StrongId() = default;
  constexpr explicit StrongId(int64_t v) : value(v) {}
  friend constexpr auto operator<=>(const StrongId&, const StrongId&) = default;
  friend std::ostream& operator<<(std::ostream& out, StrongId id) { return out << id.value; }
  template <typename H>
  friend H AbslHashValue(H h, StrongId id) {
    return H::combine(std::move(h), id.value);
  }
};

using BlockId = StrongId<struct BlockIdTag>;        // a token block, the same on every rank
using SequenceId = StrongId<struct SequenceIdTag>;  // one sequence of one request

}  // namespace kvasir::kernels
