#include <algorithm>

#include "kernels/base/overlapped_launch.h"
#include "kernels/base/warp.cuh"
#include "kernels/base/wgmma/wgmma.cuh"
#include "kernels/dense/silu_mul.cuh"
#include "kernels/gemm/gemm_batch_rows.h"

namespace kvasir::kernels {
namespace {

using After = LinearParams::After;

constexpr int kConsumerWarps = 4;  // one warpgroup, whose products have 64 rows
constexpr int kConsumers = kConsumerWarps * kWarpThreads;
constexpr int kThreads = kConsumers + kWarpThreads;  // and a warp that copies
constexpr int kStepColumns = hopper::kSwizzledRowBytes / static_cast<int>(sizeof(BFloat16));
constexpr int kProductColumns = 16;
constexpr int kUnitBytes = static_cast<int>(kBatchUnitRows) * hopper::kSwizzledRowBytes;
constexpr int kMostStages = 24;
constexpr int kTileAlignment = hopper::kSwizzledGroupBytes;
constexpr int kBlocks = kBatchClusterBlocks;
constexpr int kRoomForSharedMemory = 227 * 1024;

struct Barriers {
  uint64_t full[kMostStages];   // the copies of a step have come
  uint64_t empty[kMostStages];  // all CTAs of the cluster have multiplied by them
};

// Shared memory: barriers; then, aligned, rings of x and of the weights, `stages` each.
struct Rings {
  std::byte* x;
  std::byte* weights;
};

constexpr int XBytes(int x_rows) { return kBlocks * x_rows * hopper::kSwizzledRowBytes; }
constexpr int StageBytes(int units, int x_rows) { return units * kUnitBytes + XBytes(x_rows); }
constexpr int StagesThatFit(int units, int x_rows) {
  const int room = kRoomForSharedMemory - static_cast<int>(sizeof(Barriers)) - kTileAlignment;
  return std::min(kMostStages, room / StageBytes(units, x_rows));
}
// A product reads 64 rows of x. Where a stage holds fewer, others' follow, and after the last
// stage's the weights. What becomes of them is not written.
static_assert(StagesThatFit(1, 8) * kUnitBytes >= kBatchRows * hopper::kSwizzledRowBytes);
static_assert(StagesThatFit(kBatchTileUnits.back(), kBatchRows / kBlocks) >= 3);

// Sums of 64 rows of x by kUnits units of the weights, in as few products as there are widths for:
// the thread's part, as Wgmma64x64 lays it out.
template <int kUnits>
struct Sums {
  static constexpr int kWidth = kUnits >= 8 ? 8 : kUnits >= 4 ? 4 : kUnits >= 2 ? 2 : 1;
  static constexpr int kCount = 8 * kWidth;

  float first[kCount] = {};
  Sums<kUnits - kWidth> rest;

  __device__ __forceinline__ void AddProduct(uint64_t x, uint64_t weights) {
    if constexpr (kWidth == 8) {
      hopper::Wgmma64x128(first, x, weights);
    } else if constexpr (kWidth == 4) {
      hopper::Wgmma64x64<hopper::Major::kK>(first, x, weights, true);
    } else if constexpr (kWidth == 2) {
      hopper::Wgmma64x32(first, x, weights);
    } else {
      hopper::Wgmma64x16(first, x, weights);
    }
    rest.AddProduct(x, hopper::Advance(weights, kWidth * kUnitBytes));
  }
  // The sum of one of the two outputs that the thread has in a column of 8, in a half of its rows.
  __device__ __forceinline__ float At(int eight, int half, int e) const {
    const int i = 4 * eight + 2 * half + e;
    if (i < kCount) return first[i < kCount ? i : 0];
    return rest.At(eight - kCount / 4, half, e);
  }
};
template <>
struct Sums<0> {
  __device__ void AddProduct(uint64_t, uint64_t) {}
  __device__ float At(int, int, int) const { return 0; }
};

// The steps of a CTA's tiles, in order, and their places in the rings. All CTAs of a cluster have
// as many, though a last tile may have no rows.
struct Walk {
  __device__ Walk(const BatchRowsLaunch& p, int stages)
      : steps((p.k + kStepColumns - 1) / kStepColumns),
        stages(stages),
        num_tiles(static_cast<int>(p.plan.num_tiles)),
        rank(static_cast<int>(hopper::ClusterRank())),
        tile(static_cast<int>(blockIdx.x)) {}
  __device__ bool is_over() const { return tile - rank >= num_tiles; }
  __device__ void Next() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
    if (++step < steps) return;
    step = 0;
    tile += static_cast<int>(gridDim.x);
  }
  const int steps, stages, num_tiles, rank;
  int tile;
  int step = 0;
  int stage = 0;
  uint32_t parity = 0;
};

// Begins the copies of the walk's step. By one thread.
template <After kAfter, int kUnits>
__device__ __forceinline__ void CopyWeights(const BatchRowsLaunch& p, const Walk& walk,
                                            const Rings& rings, Barriers& barriers) {
  uint64_t* const full = &barriers.full[walk.stage];
  hopper::BarrierArriveExpecting(full, StageBytes(kUnits, p.plan.x_rows));
  std::byte* const to = rings.weights + walk.stage * kUnits * kUnitBytes;
  const int column = walk.step * kStepColumns;
  constexpr int kBoxRows = BatchBoxRows(kUnits, kAfter);
  hopper::CopyBoxOnce(to, &p.weights, column, walk.tile * kBoxRows, full);
  if constexpr (kAfter == After::kSiluMul) {
    hopper::CopyBoxOnce(to + kBoxRows * hopper::kSwizzledRowBytes, &p.weights, column,
                        p.n + walk.tile * kBoxRows, full);
  }
}
// The rows of x, to both CTAs of the cluster.
__device__ __forceinline__ void CopyX(const BatchRowsLaunch& p, const Walk& walk,
                                      const Rings& rings, Barriers& barriers) {
  hopper::CopyBoxesToCluster<kBlocks>(
      rings.x + walk.stage * XBytes(p.plan.x_rows), p.plan.x_rows * hopper::kSwizzledRowBytes, &p.x,
      walk.step * kStepColumns, p.plan.x_rows, &barriers.full[walk.stage]);
}

// By one thread. Weights do not wait for x.
template <After kAfter, int kUnits>
__device__ void Produce(const BatchRowsLaunch& p, int stages, const Rings& rings,
                        Barriers& barriers) {
  Walk weights(p, stages);
  for (int i = 0; i < stages && !weights.is_over(); ++i, weights.Next()) {
    CopyWeights<kAfter, kUnits>(p, weights, rings, barriers);
  }
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  Walk x(p, stages);
  for (int i = 0; i < stages && !x.is_over(); ++i, x.Next()) CopyX(p, x, rings, barriers);
  for (; !weights.is_over(); weights.Next()) {
    hopper::BarrierWait(&barriers.empty[weights.stage], weights.parity ^ 1);
    CopyWeights<kAfter, kUnits>(p, weights, rings, barriers);
    CopyX(p, weights, rings, barriers);
  }
}

// Tells both CTAs of the cluster that this warp has no more use for the stage.
__device__ __forceinline__ void Release(uint64_t* empty) {
  const unsigned lane = threadIdx.x % kWarpThreads;
  if (lane < kBlocks) hopper::BarrierArriveIn(empty, lane);
}

// The sum of a weight, in the thread's half of the rows and one of its two columns of 8, with its
// bias. Columns after the last have any bias.
template <typename Out, int kUnits>
__device__ Out WithBias(const BatchRowsLaunch& p, const Sums<kUnits>& sums, int eight, int half,
                        int e, int first_weight, int last_weight) {
  float sum = sums.At(eight, half, e);
  const int weight = min(first_weight + e, last_weight);
  if (p.bias != nullptr) sum += static_cast<float>(static_cast<const Out*>(p.bias)[weight]);
  return Out(sum);
}

// The outputs of a thread in a half of its rows.
template <typename Out, int kEights>
struct Outputs {
  Out values[kEights][2];

  template <typename Use>
  __device__ void ForEach(const Use& use) {
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
#pragma unroll
      for (int e = 0; e < 2; ++e) use(values[eight][e], eight, e);
    }
  }
};

template <After kAfter, typename Out, int kUnits>
__device__ void Finish(const BatchRowsLaunch& p, int tile, const Sums<kUnits>& sums) {
  constexpr int kEights = kAfter == After::kSiluMul ? kUnits : 2 * kUnits;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int first_row = static_cast<int>(threadIdx.x) / kWarpThreads * 16 + lane / 4;
  const int first_column = tile * kEights * 8 + lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + 8 * half;
    if (row >= p.num_rows) continue;
    Outputs<Out, kEights> outputs;
    bool all_usual = true;
    const auto gate_of = [&](int eight, int e) {
      return WithBias<Out>(p, sums, eight, half, e, first_column + 8 * eight, p.n - 1);
    };
    const auto up_of = [&](int eight, int e) {
      return WithBias<Out>(p, sums, eight + kUnits, half, e, p.n + first_column + 8 * eight,
                           2 * p.n - 1);
    };
    outputs.ForEach([&](Out& y, int eight, int e) {
      y = gate_of(eight, e);
      if constexpr (kAfter == After::kSiluMul) {
        const UsualSilu silu(static_cast<float>(y));
        all_usual &= silu.is_usual();
        y = Out(static_cast<float>(Out(silu.value())) * static_cast<float>(up_of(eight, e)));
      }
    });
    if constexpr (kAfter == After::kSiluMul) {
      if (!all_usual) {
        outputs.ForEach(
            [&](Out& y, int eight, int e) { y = SiluMulOf(gate_of(eight, e), up_of(eight, e)); });
      }
    }
    Out* const y = static_cast<Out*>(p.y) + int64_t{row} * p.n + first_column;
    outputs.ForEach([&](const Out& value, int eight, int e) {
      if (first_column + 8 * eight + e < p.n) y[8 * eight + e] = value;
    });
  }
}

// By the consumers' warpgroup.
template <After kAfter, typename Out, int kUnits>
__device__ void Consume(const BatchRowsLaunch& p, int stages, const Rings& rings,
                        Barriers& barriers) {
  const int x_bytes = XBytes(p.plan.x_rows);
  Walk walk(p, stages);
  while (!walk.is_over()) {
    const int tile = walk.tile;
    Sums<kUnits> sums;
    int before = -1;  // the stage of the step before, whose products may be under way
    for (int step = 0; step < walk.steps; ++step, walk.Next()) {
      hopper::BarrierWait(&barriers.full[walk.stage], walk.parity);
      const uint64_t x = hopper::TileDescriptor(rings.x + walk.stage * x_bytes);
      const uint64_t weights =
          hopper::TileDescriptor(rings.weights + walk.stage * kUnits * kUnitBytes);
      hopper::WgmmaFence();
#pragma unroll
      for (int column = 0; column < kStepColumns; column += kProductColumns) {
        constexpr int kBytes = static_cast<int>(sizeof(BFloat16));
        sums.AddProduct(hopper::Advance(x, column * kBytes),
                        hopper::Advance(weights, column * kBytes));
      }
      hopper::WgmmaCommit();
      hopper::WgmmaWait<1>();
      if (before >= 0) Release(&barriers.empty[before]);
      before = walk.stage;
    }
    hopper::WgmmaWait<0>();
    Release(&barriers.empty[before]);
    Finish<kAfter, Out>(p, tile, sums);
  }
}

template <After kAfter, typename Out, int kUnits>
__global__ void __launch_bounds__(kThreads, 1)
    BatchRowsKernel(const __grid_constant__ BatchRowsLaunch p, int stages) {
  extern __shared__ std::byte raw[];
  auto& barriers = *reinterpret_cast<Barriers*>(raw);
  std::byte* const tiles = raw + sizeof(Barriers);
  std::byte* const aligned = tiles + (0u - hopper::SharedAddress(tiles)) % kTileAlignment;
  const Rings rings = {.x = aligned, .weights = aligned + stages * XBytes(p.plan.x_rows)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; ++i) {
      hopper::BarrierInit(&barriers.full[i], 1);
      hopper::BarrierInit(&barriers.empty[i], kConsumerWarps * kBlocks);
    }
    hopper::FenceBarrierInit();
  }
  hopper::ClusterSync();
  if (threadIdx.x >= kConsumers) {
    if (threadIdx.x == kConsumers) Produce<kAfter, kUnits>(p, stages, rings, barriers);
    __syncwarp();
  } else {
    Consume<kAfter, Out, kUnits>(p, stages, rings, barriers);
  }
  hopper::ClusterSync();  // others may still copy to this CTA, or arrive at its barriers
}

template <After kAfter, typename Out, int kUnits>
cudaError_t Launch(const BatchRowsLaunch& p, cudaStream_t stream) {
  const auto kernel = BatchRowsKernel<kAfter, Out, kUnits>;
  if (const cudaError_t error = AllowSharedBytes(kernel, kRoomForSharedMemory);
      error != cudaSuccess) {
    return error;
  }
  return LaunchOverlappedClusters(kernel, kBlocks, static_cast<unsigned>(p.plan.clusters) * kBlocks,
                                  kThreads, kRoomForSharedMemory, stream, p,
                                  StagesThatFit(kUnits, p.plan.x_rows));
}

template <After kAfter, typename Out, size_t kIndex = 0>
cudaError_t LaunchUnits(const BatchRowsLaunch& p, cudaStream_t stream) {
  if constexpr (kIndex < kBatchTileUnits.size()) {
    if (p.plan.tile_units != kBatchTileUnits[kIndex]) {
      return LaunchUnits<kAfter, Out, kIndex + 1>(p, stream);
    }
    return Launch<kAfter, Out, kBatchTileUnits[kIndex]>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t LaunchBatchRows(const BatchRowsLaunch& p, cudaStream_t stream) {
  if (p.after == After::kSiluMul) return LaunchUnits<After::kSiluMul, BFloat16>(p, stream);
  return p.dtype == DType::kFloat32 ? LaunchUnits<After::kStore, float>(p, stream)
                                    : LaunchUnits<After::kStore, BFloat16>(p, stream);
}

}  // namespace kvasir::kernels
