// A row in the later stages of infinitehip, as a CTA of its cluster sees it: how the launch divides
// it, which stages run, and where earlier ones left their chunks. For infinitehip_stages.cu.
#pragma once

#include <cstdint>

#include "kernels/base/hopper.cuh"
#include "kernels/base/warp.cuh"
#include "kernels/sparse/common/block_list.cuh"
#include "kernels/sparse/infinitehip/infinitehip_launch.h"
#include "kernels/sparse/key_logits/key_code_logits.cuh"
#include "kernels/sparse/reuse/reuse_row.cuh"

namespace kvasir::kernels {

inline constexpr int kStageThreads = 512;
inline constexpr int kStageWarps = kStageThreads / kWarpThreads;

// How a launch divides the rows, and the sizes of what is in shared memory.
struct StagesCut {
  unsigned blocks_of_row;  // CTAs; a power of two
  int tiles_at_once;
  int runs_at_once;
  int shared_chunks;  // 0: they are in device memory
};

// Shared memory of a CTA.
template <int kHeadDim>
struct StageMemory {
  using Tile = StagedQueries<kHeadDim>;
  using Keys = StagedKeys<kHeadDim>;
  // Scores of stage 1, which in the end are those of the chunks that the last stage left; scores of
  // stage 2; begins of the chunks that each left.
  static constexpr int kChunkArrays = 4;

  SelectMemory select;

  // The arrays after it.
  // [tiles_at_once]
  __device__ Tile* Tiles() { return reinterpret_cast<Tile*>(this + 1); }
  // [kStageWarps, runs_at_once]
  __device__ Keys* KeysOfRuns(const StagesCut& cut) {
    return reinterpret_cast<Keys*>(Tiles() + cut.tiles_at_once);
  }
  // [kChunkArrays, shared_chunks]
  __device__ uint32_t* Chunks(const StagesCut& cut) {
    return reinterpret_cast<uint32_t*>(KeysOfRuns(cut) + kStageWarps * cut.runs_at_once);
  }

  // Bytes with the arrays.
  static size_t Bytes(const StagesCut& cut) {
    return sizeof(StageMemory) + sizeof(Tile) * static_cast<size_t>(cut.tiles_at_once) +
           sizeof(Keys) * static_cast<size_t>(kStageWarps * cut.runs_at_once) +
           sizeof(uint32_t) * static_cast<size_t>(kChunkArrays * cut.shared_chunks);
  }
};

// Log2 of the number of parts in a whole. Both are powers of two.
__device__ inline int PartsLog2(int whole, int part) { return __ffs(whole) - __ffs(part); }

// The queries in the tiles: means over `stride` queries, from a tile on, rotated to a position.
struct HeldQueries {
  int stride = 0;
  int first_tile = 0;
  int64_t position = 0;
  __device__ bool operator==(const HeldQueries& other) const {
    return stride == other.stride && first_tile == other.first_tile && position == other.position;
  }
};

// The facts of a row. All functions are called by all threads of the CTA, and alike by
// the whole cluster.
class StageRow {
 protected:
  static constexpr int kLast = InfiniteHipSelector::kStages - 1;

  // The chunks that a stage left, ascending.
  struct Parents {
    const int32_t* begins;
    int count;
    int tokens;  // of a chunk
  };

  __device__ StageRow(const InfiniteHipLaunch& p, const StagesCut& cut, const DeviceRow& row)
      : p_(p),
        cut_(cut),
        row_(row),
        header_(MakeHeader(row.tile, row.numbers)),
        reuse_(p.select, row),
        first_stage_(reuse_.FirstStage(header_)),
        rank_(static_cast<int>(hopper::ClusterRank())) {}

  __device__ bool together() const { return p_.layer_scores != nullptr; }
  __device__ bool in_shared() const { return cut_.shared_chunks > 0; }
  __device__ int tokens_of(int stage) const {
    return static_cast<int>(p_.stages[stage].chunk_tokens);
  }
  __device__ int NumKept(int stage) const {
    return static_cast<int>(p_.stages[stage].KeptChunks(row_.numbers.budget_tokens));
  }

  template <typename T>
  __device__ T* OfRow(T* of_rows) const {
    return of_rows + row_.index * p_.max_chunks;
  }
  __device__ bool tells() const { return in_shared() && !together(); }
  __device__ Parents LeftBy(int stage) const {
    if (first_stage_ == stage + 1) {
      return {reuse_.items(stage), reuse_.remembered().kept[stage], tokens_of(stage)};
    }
    return {OfRow(p_.kept[stage].begins), p_.kept[stage].counts[row_.index], tokens_of(stage)};
  }

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarpThreads; }
  __device__ static int warp() { return static_cast<int>(threadIdx.x) / kWarpThreads; }
  __device__ int num_ctas() const { return static_cast<int>(cut_.blocks_of_row); }

  const InfiniteHipLaunch& p_;
  const StagesCut& cut_;
  const DeviceRow& row_;
  SelectionHeader header_;
  const RowReuse reuse_;
  const int first_stage_;
  const int rank_;
};

}  // namespace kvasir::kernels
