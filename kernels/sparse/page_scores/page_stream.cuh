// Scores of the pages of one row for the queries of one token (quest_score.h), by a CTA. Each warp
// takes 16 pages at a time: it loads their bounds into registers and multiplies them by tensor
// cores. For the decode kernels of selectors that choose by these scores.
//
// In a step whose query tiles are all one query, some bounds may be read before the kernel ahead on
// the stream has ended, so that they arrive with the queries. Tiles, numbers and page tables were
// written when the step began. Bounds of pages that hold no token of this step were written in
// earlier steps. Their writers must have ended, and they have: a kernel with such tiles begins when
// the kernels ahead have let it, each through the next, and the step's product for q, k and v does
// so only after its own cudaGridDependencySynchronize.
#pragma once

#include <cuda_bf16.h>

#include "kernels/base/ampere.cuh"
#include "kernels/base/hopper.cuh"
#include "kernels/sparse/common/ranking.h"
#include "kernels/sparse/common/select_row.cuh"
#include "kernels/sparse/page_scores/page_tile.cuh"

namespace kvasir::kernels {

// The queries of a group, split by sign (quest_rule.h): for min, then for max. Places after the
// last query repeat it, which changes no maximum.
template <int kHeadDim>
struct GroupQueries {
  static constexpr int kQueries = static_cast<int>(kMaxCudaGroup);
  // Distance of rows at which threads that read at once use all banks.
  static constexpr int kPitch = 2 * kHeadDim + 32;
  alignas(16) __nv_bfloat16 at[kQueries][kPitch];

  // Loads the queries of the row's only token, by all threads of the CTA.
  __device__ void Load(const SelectLaunch& p, const DeviceRow& row, float low_weight) {
    const auto group = static_cast<int>(p.group);
    const auto* from =
        static_cast<const __nv_bfloat162*>(p.q) +
        (row.tile.first_row * p.kv.layout.num_kv_heads + row.kv_head) * group * (kHeadDim / 2);
    for (int i = static_cast<int>(threadIdx.x); i < kQueries * kHeadDim / 2;
         i += static_cast<int>(blockDim.x)) {
      const int query = i / (kHeadDim / 2);
      const int pair = i % (kHeadDim / 2);
      const float2 q = __bfloat1622float2(from[min(query, group - 1) * (kHeadDim / 2) + pair]);
      *reinterpret_cast<uint32_t*>(&at[query][2 * pair]) = PairForMin(q, low_weight);
      *reinterpret_cast<uint32_t*>(&at[query][kHeadDim + 2 * pair]) = PairForMax(q, low_weight);
    }
  }
};

// Streams the pages [pages.begin, pages.end) of a row through the registers of a CTA's warps.
template <int kHeadDim>
class PageStream {
 public:
  // Begins to load the addresses of the first reads.
  __device__ PageStream(const SelectLaunch& p, const DeviceRow& row, const PageRange& pages)
      : p_(p),
        row_(row),
        pages_(pages),
        lane_(static_cast<int>(threadIdx.x) % kWarpThreads),
        first_(pages.begin + threadIdx.x / kWarpThreads * kTilePages),
        step_(blockDim.x / kWarpThreads * kTilePages) {
    const Rows rows = RowsOf(first_);
    rows_ = RowsOf(first_ + step_);
    bounds_ = BoundsOf(rows);
  }

  // Begins to load the first pages, if they hold no token of this step. Beside a prompt that is
  // not known: the step may have filled any page before the row's own.
  __device__ void BeginEarly() {
    if (!p_.is_whole_step) return;
    // Two query tiles of a step may be adjacent, at the end of a page and the begin of the next.
    const int64_t end = row_.tile.first_position / kPageTokens - 1;
    is_loaded_ = first_ < pages_.end && min(first_ + kTilePages, pages_.end) <= end;
    if (is_loaded_) Load();
  }

  // Writes scores[i] of page pages.begin + i. -inf where it is absent, or all its products are NaN.
  __device__ void Score(const GroupQueries<kHeadDim>& queries, uint32_t* scores) {
    for (; first_ < pages_.end; first_ += step_) {
      if (!is_loaded_) Load();
      is_loaded_ = false;
      const bool exist[2] = {bounds_.of[0] != nullptr, bounds_.of[1] != nullptr};
      bounds_ = BoundsOf(rows_);
      Prefetch();
      rows_ = RowsOf(first_ + 2 * step_);
      float best[2] = {-INFINITY, -INFINITY};
      Multiply(queries, best);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        best[i] = fmaxf(best[i], __shfl_xor_sync(kAllLanes, best[i], 1));
        best[i] = fmaxf(best[i], __shfl_xor_sync(kAllLanes, best[i], 2));
        const int64_t page = PageAt(first_, i);
        if (lane_ % 4 != 0 || page >= pages_.end) continue;
        scores[page - pages_.begin] = OrderedScore(exist[i] ? best[i] : -INFINITY);
      }
    }
  }

 private:
  static constexpr int kTilePages = 16;
  // Rows and bounds of the lane's two pages; -1 and null where there is no page.
  struct Rows {
    int32_t of[2];
  };
  struct Bounds {
    const std::byte* of[2];
  };

  __device__ int64_t PageAt(int64_t first, int which) const {
    return first + lane_ / 4 + 8 * which;
  }
  __device__ Rows RowsOf(int64_t first) const {
    Rows rows;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t page = PageAt(first, i);
      rows.of[i] = -1;
      if (page < pages_.end) {
        rows.of[i] = static_cast<int32_t>(p_.kv.extent(row_.tile.slot, page));
      }
    }
    return rows;
  }
  __device__ Bounds BoundsOf(const Rows& rows) const {
    const int64_t offset =
        p_.kv.layout.page_in_block(p_.layer, row_.kv_head) * p_.kv.layout.page_bounds_bytes();
    Bounds bounds;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      bounds.of[i] = rows.of[i] >= 0 ? p_.kv.bounds[rows.of[i]] + offset : nullptr;
    }
    return bounds;
  }
  __device__ void Load() {
#pragma unroll
    for (int i = 0; i < 2; ++i) tile_.Load(bounds_.of[i], i, lane_ % 4);
  }

  // Prefetches the next pages' bounds; four threads share the cache lines of a page. So the bounds
  // of two pages are loading at a time, and registers hold those of one.
  __device__ void Prefetch() const {
    constexpr int kLineBytes = 128;
    static_assert(kHeadDim * 4 <= 4 * kLineBytes);
    if (lane_ % 4 * kLineBytes >= kHeadDim * 4) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (bounds_.of[i] != nullptr) hopper::PrefetchLine(bounds_.of[i] + lane_ % 4 * kLineBytes);
    }
  }

  // Raises best[i] to the greatest product of page i with a query of this thread, ignoring NaN.
  __device__ void Multiply(const GroupQueries<kHeadDim>& queries, float (&best)[2]) const {
    float sums[2][4] = {};
    const __nv_bfloat16* const own = queries.at[lane_ / 4] + lane_ % 4 * 8;
#pragma unroll
    for (int i = 0; i < PageTile<kHeadDim>::kSteps / 2; ++i) {
      const uint4 q = *reinterpret_cast<const uint4*>(own + i * 32);
      const uint32_t left[2] = {q.x, q.y};
      const uint32_t right[2] = {q.z, q.w};
      Mma16x8(sums[0], tile_.at[2 * i], left);
      Mma16x8(sums[1], tile_.at[2 * i + 1], right);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) best[i / 2] = fmaxf(best[i / 2], sums[0][i] + sums[1][i]);
  }

  const SelectLaunch& p_;
  const DeviceRow& row_;
  const PageRange pages_;
  const int lane_;
  int64_t first_;  // of the warp's next 16 pages
  const int64_t step_;
  Rows rows_;      // of the 16 pages after those
  Bounds bounds_;  // of the next 16 pages
  PageTile<kHeadDim> tile_;
  bool is_loaded_ = false;
};

}  // namespace kvasir::kernels
