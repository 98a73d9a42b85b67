#include <algorithm>
#include <type_traits>

#include "kernels/base/ampere.cuh"
#include "kernels/base/overlapped_launch.h"
#include "kernels/base/warp.cuh"
#include "kernels/dense/rms_norm.cuh"
#include "kernels/dense/silu_mul.cuh"
#include "kernels/gemm/gemm_few_rows.h"

namespace kvasir::kernels {
namespace {

using After = LinearParams::After;

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpThreads;
constexpr int kPiece = 8;          // elements that a thread reads or copies at once: 16 bytes
constexpr int kTileRows = 8;       // of the weights, of one warp
constexpr int kStepColumns = 256;  // of a tile: 512 bytes of each row
constexpr int kStepPieces = kStepColumns / kPiece;
constexpr int kMatrices = 4;  // of 8 x 8 elements, that a warp loads at once: two products' columns
constexpr int kLoads = kStepPieces / kMatrices;  // of a step
constexpr int kLeastStages = 3;                  // of copies ahead, in each warp
constexpr int kRoomForSharedMemory = 227 * 1024;

struct alignas(16) Piece {
  BFloat16 values[kPiece];
};
static_assert(sizeof(Piece) == 16);

// The weights that a warp multiplies by in one step. Pieces of each row are exchanged by the row's
// number, so that eight lanes that read a piece of each row meet all banks.
struct Step {
  Piece pieces[kTileRows][kStepPieces];

  __device__ Piece& At(int row, int piece) { return pieces[row][piece ^ row]; }
};

struct SharedMemory {
  float square_sums[kFewRows][kMaxNormThreads / kWarpThreads];
  alignas(16) float scales[kFewRows];
  // Then the ring, [warps that have tiles][stages] steps; then x: num_rows rows, XPitch pieces
  // apart; then the weights of its norm.
};

// Outputs of a tile. A gated one has as many rows of both halves of the weights.
template <After kAfter>
constexpr int kOutputs = kAfter == After::kSiluMul ? kTileRows / 2 : kTileRows;

// Whole steps, and one piece more, so that eight lanes that read a piece of each row meet all
// banks.
__host__ __device__ constexpr int64_t XPitch(int64_t k) {
  return (k + kStepColumns - 1) / kStepColumns * kStepPieces + 1;
}

// Bytes of shared memory with the rings of `warps` warps.
constexpr int64_t SharedBytes(int warps, int stages, int64_t num_rows, int64_t k, bool has_norm) {
  const int64_t pieces = num_rows * XPitch(k) + (has_norm ? k / kPiece : 0);
  return static_cast<int64_t>(sizeof(SharedMemory)) +
         int64_t{warps} * stages * static_cast<int64_t>(sizeof(Step)) +
         pieces * static_cast<int64_t>(sizeof(Piece));
}

// The tiles of one warp and their steps, in the order in which it copies and multiplies. First
// every block's first warp has a tile, then every block's second: so that blocks have as many.
struct Walk {
  __device__ Walk(const FewRowsLaunch& p, int outputs)
      : steps(static_cast<int>((p.k + kStepColumns - 1) / kStepColumns)),
        num_tiles(static_cast<int>((p.n + outputs - 1) / outputs)),
        tile(static_cast<int>(blockIdx.x + gridDim.x * (threadIdx.x / kWarpThreads))) {}
  __device__ bool is_over() const { return tile >= num_tiles; }
  __device__ void Next() {
    if (++step < steps) return;
    step = 0;
    NextTile();
  }
  __device__ void NextTile() { tile += static_cast<int>(gridDim.x) * kWarps; }
  const int steps;
  const int num_tiles;
  int tile;
  int step = 0;
};

// Begins the copies of the walk's step, a row at a time. Rows and columns after the last are
// zeros.
template <After kAfter>
__device__ void CopyStep(const FewRowsLaunch& p, const Walk& walk, Step& to) {
  static_assert(kStepPieces == kWarpThreads);
  const int piece = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int runs = static_cast<int>(p.k / kPiece);
  const int n = static_cast<int>(p.n);
  const int column = walk.step * kStepPieces + piece;
  const auto* weights = reinterpret_cast<const Piece*>(p.weights);
#pragma unroll
  for (int row = 0; row < kTileRows; ++row) {
    const int output = walk.tile * kOutputs<kAfter> + row % kOutputs<kAfter>;
    const int weight = output + row / kOutputs<kAfter> * n;
    const bool is_there = output < n && column < runs;
    CopyAsync16(&to.At(row, piece), weights + (is_there ? int64_t{weight} * runs + column : 0),
                is_there);
  }
}

// Begins the copies of the norm's weights, each thread those that it needs.
__device__ __forceinline__ void CopyNorm(const FewRowsLaunch& p, Piece* norm) {
  for (int64_t i = threadIdx.x; i < p.k / kPiece; i += kThreads) {
    CopyAsync16(&norm[i], p.norm + i * kPiece, true);
  }
}

using SquareSums = float[kFewRows][kMaxNormThreads / kWarpThreads];

// Pieces of x that a thread takes at once, so that as many loads are on their way: several pieces
// of one row, or one piece of each of several rows.
constexpr int kAtOnce = 4;

template <typename Use>
__device__ void ForEachPiece(const FewRowsLaunch& p, const Use& use) {
  const int runs = static_cast<int>(p.k / kPiece);
  const bool is_one = p.num_rows == 1;
  for (int i = static_cast<int>(threadIdx.x); i < runs;
       i += is_one ? kAtOnce * kThreads : kThreads) {
    for (int row = 0; row < p.num_rows; row += kAtOnce) {
      use([&](int j) { return is_one ? 0 : row + j; },
          [&](int j) { return is_one ? i + j * kThreads : i; },
          [&](int j) { return is_one ? i + j * kThreads < runs : row + j < p.num_rows; });
    }
  }
}

// Rows of x, with zeros after their last column, and the sums of their squares.
__device__ void StageX(const FewRowsLaunch& p, Piece* staged, SquareSums& square_sums) {
  const int pitch = static_cast<int>(XPitch(p.k));
  const int runs = static_cast<int>(p.k / kPiece);
  const auto* x = reinterpret_cast<const Piece*>(p.x);
  ForEachPiece(p, [&](const auto& row, const auto& column, const auto& is_there) {
    Piece pieces[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (is_there(j)) pieces[j] = x[int64_t{row(j)} * runs + column(j)];
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (!is_there(j)) continue;  // a whole warp alike, where there is a norm
      staged[row(j) * pitch + column(j)] = pieces[j];
      if (p.norm == nullptr) continue;
      float sum = 0;
      for (const BFloat16 value : pieces[j].values) sum = AddSquare(sum, static_cast<float>(value));
      sum = SumOfLanes(sum);
      if (threadIdx.x % kWarpThreads == 0) square_sums[row(j)][column(j) / kWarpThreads] = sum;
    }
  });
  for (int i = runs + static_cast<int>(threadIdx.x); i < pitch; i += kThreads) {
    for (int row = 0; row < p.num_rows; ++row) staged[row * pitch + i] = Piece();
  }
  __syncthreads();
}

// Each thread those pieces that it staged, as rms_norm does.
__device__ void NormalizeX(const FewRowsLaunch& p, const Piece* norm, const SquareSums& square_sums,
                           float* scales, Piece* staged) {
  const int pitch = static_cast<int>(XPitch(p.k));
  const int num_sums = static_cast<int>(p.k / kPiece) / kWarpThreads;
  if (threadIdx.x / kWarpThreads < p.num_rows) {  // a row for a warp
    const unsigned row = threadIdx.x / kWarpThreads;
    scales[row] = NormScale(square_sums[row], num_sums, p.k, p.epsilon);
  }
  __syncthreads();
  ForEachPiece(p, [&](const auto& row, const auto& column, const auto& is_there) {
#pragma unroll 1
    for (int j = 0; j < kAtOnce && is_there(j); ++j) {
      const float scale = scales[row(j)];
      const Piece weight = norm[column(j)];
      Piece piece = staged[row(j) * pitch + column(j)];
      for (int e = 0; e < kPiece; ++e) {
        piece.values[e] = Normalized(piece.values[e], scale, weight.values[e]);
      }
      staged[row(j) * pitch + column(j)] = piece;
    }
  });
  __syncthreads();
}

// A lane's part of one step's weights.
struct StepWeights {
  uint4 matrices[kLoads];

  __device__ explicit StepWeights(Step& step) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      matrices[i] = LoadMatrices(&step.At(lane % kTileRows, i * kMatrices + lane / kTileRows));
    }
  }
};

// Adds one step's products, 16 columns at a time in ascending order. `x`: the pieces of the step in
// the lane's row.
__device__ void MultiplyStep(const Piece* x, const StepWeights& weights, float (&sums)[4]) {
  uint4 rows[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) rows[i] = LoadMatrices(x + i * kMatrices);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const uint4& a = rows[i];
    const uint4& b = weights.matrices[i];
    Mma16x8(sums, {a.x, 0, a.y, 0}, {b.x, b.y});
    Mma16x8(sums, {a.z, 0, a.w, 0}, {b.z, b.w});
  }
}

// Two neighbouring outputs of a tile, those of one lane: row and first column of y. Of gated tiles
// half of the lanes have some, the other half the same outputs' second factors.
template <After kAfter>
struct Outputs {
  __device__ Outputs(const FewRowsLaunch& p, int tile)
      : row(static_cast<int>(threadIdx.x) % kWarpThreads / 4),
        in_tile(static_cast<int>(threadIdx.x) % 4 * 2),
        column(tile * kOutputs<kAfter> + in_tile),
        num_there(row < p.num_rows && in_tile < kOutputs<kAfter>
                      ? min(2, static_cast<int>(p.n) - column)
                      : 0) {}

  template <typename Out>
  __device__ Out* In(const FewRowsLaunch& p) const {
    return static_cast<Out*>(p.y) + row * p.n + column;
  }
  const int row;
  const int in_tile;
  const int column;
  const int num_there;  // may be negative
};

// Loads the outputs that y holds before the product.
template <After kAfter, typename Out>
__device__ __forceinline__ void LoadBefore(const FewRowsLaunch& p, const Outputs<kAfter>& outputs,
                                           Out (&before)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (i < outputs.num_there) before[i] = outputs.template In<Out>(p)[i];
  }
}

template <typename Out>
__device__ Out WithBias(const FewRowsLaunch& p, float sum, int64_t weight) {
  if (p.bias != nullptr) sum += static_cast<float>(static_cast<const Out*>(p.bias)[weight]);
  return Out(sum);
}

// By the whole warp. `before`: what y holds, of kAdd.
template <After kAfter, typename Out>
__device__ void Finish(const FewRowsLaunch& p, const Outputs<kAfter>& outputs,
                       const Out (&before)[2], const float (&sums)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float up_sum = 0;
    if constexpr (kAfter == After::kSiluMul) {
      up_sum = __shfl_down_sync(kAllLanes, sums[i], kOutputs<kAfter> / 2);
    }
    if (i >= outputs.num_there) continue;
    const int64_t column = outputs.column + i;
    const Out sum = WithBias<Out>(p, sums[i], column);
    Out& y = outputs.template In<Out>(p)[i];
    if constexpr (kAfter == After::kStore) {
      y = sum;
    } else if constexpr (kAfter == After::kAdd) {
      y = Out(static_cast<float>(before[i]) + static_cast<float>(sum));
    } else {
      const Out up = WithBias<Out>(p, up_sum, p.n + column);
      y = SiluMulOf(sum, up);
    }
  }
}

template <After kAfter, typename Out, int kStages>
__global__ void __launch_bounds__(kThreads, 1)
    FewRowsKernel(const __grid_constant__ FewRowsLaunch p, int ring_warps) {
  extern __shared__ uint4 raw[];
  auto& shared = *reinterpret_cast<SharedMemory*>(raw);
  auto* const rings = reinterpret_cast<Step*>(&shared + 1);
  auto* const x = reinterpret_cast<Piece*>(rings + ring_warps * kStages);
  auto* const norm = x + p.num_rows * XPitch(p.k);
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  Step* const ring = rings + threadIdx.x / kWarpThreads * kStages;  // of a warp that has tiles

  // Weights do not wait for x. The norm's are copied with the first step.
  if (p.norm != nullptr) CopyNorm(p, norm);
  Walk ahead(p, kOutputs<kAfter>);
  Walk at = ahead;
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    if (!ahead.is_over()) {
      CopyStep<kAfter>(p, ahead, ring[stage]);
      ahead.Next();
    }
    CommitCopies();
  }
  cudaGridDependencySynchronize();
  StageX(p, x, shared.square_sums);
  if (p.norm != nullptr) {
    WaitForCopies<kStages - 1>();
    NormalizeX(p, norm, shared.square_sums, shared.scales, x);
  }

  // Rows that are not there read those of the first, and what becomes of it is not written.
  const int row = lane % kTileRows < p.num_rows ? lane % kTileRows : 0;
  const Piece* const lane_x = x + row * XPitch(p.k) + lane / kTileRows;
  int stage = 0;
  for (; !at.is_over(); at.NextTile()) {
    // The next kernel's blocks begin with its weights where all warps of one of this have their
    // last tile, or none.
    if (at.tile + static_cast<int>(gridDim.x) * kWarps >= at.num_tiles) {
      cudaTriggerProgrammaticLaunchCompletion();
    }
    const Outputs<kAfter> outputs(p, at.tile);
    Out before[2] = {};
    if constexpr (kAfter == After::kAdd) LoadBefore(p, outputs, before);
    float sums[4] = {};
    for (int step = 0; step < at.steps; ++step) {
      WaitForCopies<kStages - 1>();
      __syncwarp();  // of all lanes
      const StepWeights weights(ring[stage]);
      __syncwarp();  // all have read
      if (!ahead.is_over()) {
        CopyStep<kAfter>(p, ahead, ring[stage]);
        ahead.Next();
      }
      CommitCopies();
      MultiplyStep(lane_x + step * kStepPieces, weights, sums);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    Finish<kAfter, Out>(p, outputs, before, sums);
  }
}

// One block a multiprocessor, also while some of them are busy with the kernel before: there must
// not be room for two.
constexpr int64_t kLeastSharedBytes = kRoomForSharedMemory / 2 + 1024;

template <After kAfter, typename Out, int kStages>
cudaError_t Launch(const FewRowsLaunch& p, unsigned blocks, int ring_warps, int64_t shared_bytes,
                   cudaStream_t stream) {
  const auto kernel = FewRowsKernel<kAfter, Out, kStages>;
  if (const cudaError_t error = cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kRoomForSharedMemory);
      error != cudaSuccess) {
    return error;
  }
  return LaunchOverlapped(kernel, blocks, kThreads, static_cast<size_t>(shared_bytes), stream, p,
                          ring_warps);
}

// With as many stages as there is room for.
template <After kAfter, typename Out, int kStages, int... kFewer>
cudaError_t LaunchStages(const FewRowsLaunch& p, int num_processors, cudaStream_t stream) {
  const int64_t tiles = (p.n + kOutputs<kAfter> - 1) / kOutputs<kAfter>;
  const int64_t blocks = std::min<int64_t>(tiles, num_processors);
  const auto warps = static_cast<int>(std::min<int64_t>((tiles + blocks - 1) / blocks, kWarps));
  const int64_t bytes = SharedBytes(warps, kStages, p.num_rows, p.k, p.norm != nullptr);
  if constexpr (sizeof...(kFewer) > 0) {
    if (bytes > kRoomForSharedMemory) {
      return LaunchStages<kAfter, Out, kFewer...>(p, num_processors, stream);
    }
  }
  return Launch<kAfter, Out, kStages>(p, static_cast<unsigned>(blocks), warps,
                                      std::max(bytes, kLeastSharedBytes), stream);
}

template <After kAfter, typename Out>
cudaError_t LaunchAfter(const FewRowsLaunch& p, int num_processors, cudaStream_t stream) {
  return LaunchStages<kAfter, Out, 8, 6, 4, kLeastStages>(p, num_processors, stream);
}

}  // namespace

bool FewRowsFit(int64_t num_rows, int64_t k) {
  return num_rows <= kFewRows && k % kPiece == 0 &&
         SharedBytes(kWarps, kLeastStages, num_rows, k, FewRowsNormalize(k)) <=
             kRoomForSharedMemory;
}

bool FewRowsNormalize(int64_t k) {
  const int64_t runs = k / kPiece;
  return k % (kPiece * kWarpThreads) == 0 && runs <= kMaxNormThreads;
}

cudaError_t LaunchFewRows(const FewRowsLaunch& p, int num_processors, cudaStream_t stream) {
  switch (p.after) {
    case After::kAdd:
      return LaunchAfter<After::kAdd, BFloat16>(p, num_processors, stream);
    case After::kSiluMul:
      return LaunchAfter<After::kSiluMul, BFloat16>(p, num_processors, stream);
    case After::kStore:
      break;
  }
  return p.dtype == DType::kFloat32
             ? LaunchAfter<After::kStore, float>(p, num_processors, stream)
             : LaunchAfter<After::kStore, BFloat16>(p, num_processors, stream);
}

}  // namespace kvasir::kernels
