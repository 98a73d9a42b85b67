// The check that opens every op over query tiles. AppendKv, Attend and selectors rely on it.
// Thread-safe.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "kernels/paged/paged_kv.h"

namespace kvasir::kernels {

// INVALID_ARGUMENT, naming the op and the tile, unless every tile has 1..64 rows inside [0,
// num_tokens), a slot of `kv`, and positions inside one block that the slot's table can hold.
absl::Status CheckQueryTiles(absl::string_view op, std::span<const QueryTile> tiles,
                             int64_t num_tokens, const PagedKv& kv);

}  // namespace kvasir::kernels
