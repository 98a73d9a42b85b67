// How the kernel for a batch of rows (gemm_batch_rows.h) shares its work among clusters. Needs no
// GPU.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace kvasir::kernels {

inline constexpr int64_t kBatchRows = 64;      // of x, at most
inline constexpr int64_t kBatchUnitRows = 16;  // of the weights
inline constexpr int kBatchClusterBlocks = 2;  // CTAs of a cluster
// Units that a tile may have.
inline constexpr std::array kBatchTileUnits = {1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14};

struct BatchPlan {
  int x_rows = 0;  // that a CTA copies: a cluster's share of all, rounded up to 8
  int tile_units = 1;
  int64_t num_tiles = 0;
  int clusters = 1;  // of the launch; each takes tiles in turn, one for each of its CTAs
};

// `weight_rows`: all, both halves of gated ones. Chooses the tile by which the busiest CTA is done
// first: the end of a tile costs it about as much as half of a unit.
inline BatchPlan PlanBatch(int64_t weight_rows, int64_t num_rows, int num_processors) {
  constexpr int64_t kSwizzledRows = 8;
  const auto divide = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  BatchPlan plan = {.x_rows = static_cast<int>(
                        divide(num_rows, kBatchClusterBlocks * kSwizzledRows) * kSwizzledRows)};
  int64_t least = 0;
  for (const int units : kBatchTileUnits) {
    const int64_t tiles = divide(weight_rows, units * kBatchUnitRows);
    const int64_t turns = divide(tiles, kBatchClusterBlocks);
    const int64_t clusters = std::min<int64_t>(turns, num_processors / kBatchClusterBlocks);
    const int64_t cost = divide(turns, clusters) * (2 * units + 1);
    if (least != 0 && cost >= least) continue;
    least = cost;
    plan.tile_units = units;
    plan.num_tiles = tiles;
    plan.clusters = static_cast<int>(clusters);
  }
  return plan;
}

}  // namespace kvasir::kernels
