#include <algorithm>
#include <type_traits>

#include "kernels/base/ampere.cuh"
#include "kernels/base/overlapped_launch.h"
#include "kernels/base/warp.cuh"
#include "kernels/dense/gemm_few_rows.h"
#include "kernels/dense/rms_norm.cuh"

namespace kvasir::kernels {
namespace {

using After = LinearParams::After;

constexpr int kWarps = 16;
constexpr int kThreads = kWarps * kWarpThreads;
constexpr int kManyStages = 4;  // of copies, where x leaves room for them
constexpr int kFewStages = 3;
constexpr int kPiece = 8;          // elements that a thread reads or copies at once: 16 bytes
constexpr int kTileRows = 8;       // of the weights
constexpr int kStepColumns = 128;  // of a tile, for a warp: 256 bytes that lie side by side
constexpr int kStepPieces = kStepColumns / kPiece;
constexpr int kRoomForSharedMemory = 227 * 1024;

struct alignas(16) Piece {
  BFloat16 values[kPiece];
};
static_assert(sizeof(Piece) == 16);

// What a warp multiplies by in one step: rows of 16 pieces. Of odd rows the halves are exchanged,
// so that eight lanes that read four pieces of two rows meet all banks.
struct Step {
  Piece pieces[kTileRows][kStepPieces];

  __device__ Piece& At(int row, int piece) { return pieces[row][piece ^ ((row & 1) << 2)]; }
};

template <int kStages>
struct SharedMemory {
  Step ring[kWarps][kStages];
  // By each warp, [row of x][row of the tile]; of two tiles in turn.
  float partials[2][kWarps][kFewRows][kTileRows];
  float square_sums[kFewRows][kMaxNormThreads / kWarpThreads];
  float scales[kFewRows];
  // Then x: num_rows rows, XPitch pieces apart; then the weights of its norm.
};

// Outputs of a tile. A gated one has as many rows of both halves of the weights.
template <After kAfter>
constexpr int kOutputs = kAfter == After::kSiluMul ? kTileRows / 2 : kTileRows;

// Whole steps, and four pieces more, so that two rows begin half a line of banks apart.
__host__ __device__ constexpr int64_t XPitch(int64_t k) {
  return (k + kStepColumns - 1) / kStepColumns * kStepPieces + 4;
}

template <int kStages>
constexpr int64_t SharedBytes(int64_t num_rows, int64_t k, bool has_norm) {
  const int64_t pieces = num_rows * XPitch(k) + (has_norm ? k / kPiece : 0);
  return static_cast<int64_t>(sizeof(SharedMemory<kStages>)) +
         pieces * static_cast<int64_t>(sizeof(Piece));
}

// The steps of one warp, tile by tile, in the order in which it copies and multiplies.
struct Walk {
  __device__ Walk(const FewRowsLaunch& p, int outputs)
      : steps(static_cast<int>((p.k + kStepColumns - 1) / kStepColumns)),
        num_tiles(static_cast<int>((p.n + outputs - 1) / outputs)),
        tile(static_cast<int>(blockIdx.x)),
        step(static_cast<int>(threadIdx.x) / kWarpThreads) {
    if (step >= steps) tile = num_tiles;  // too few columns for this warp
  }
  __device__ bool is_over() const { return tile >= num_tiles; }
  __device__ void Next() {
    step += kWarps;
    if (step < steps) return;
    step = static_cast<int>(threadIdx.x) / kWarpThreads;
    tile += static_cast<int>(gridDim.x);
  }
  const int steps;
  const int num_tiles;
  int tile;
  int step;
};

// Begins the copies of the walk's step. Rows and columns behind the last are zeros.
template <After kAfter>
__device__ void CopyStep(const FewRowsLaunch& p, const Walk& walk, Step& to) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int piece = lane % kStepPieces;
  const int runs = static_cast<int>(p.k / kPiece);
  const int n = static_cast<int>(p.n);
  const int column = walk.step * kStepPieces + piece;
  const auto* weights = reinterpret_cast<const Piece*>(p.weights);
#pragma unroll
  for (int row = lane / kStepPieces; row < kTileRows; row += kWarpThreads / kStepPieces) {
    const int output = walk.tile * kOutputs<kAfter> + row % kOutputs<kAfter>;
    const int weight = output + row / kOutputs<kAfter> * n;
    const bool is_there = output < n && column < runs;
    CopyAsync16(&to.At(row, piece), weights + (is_there ? int64_t{weight} * runs + column : 0),
                is_there);
  }
}

using SquareSums = float[kFewRows][kMaxNormThreads / kWarpThreads];

// What a thread takes of x at once, so that as many loads are on their way: of one row several
// pieces, else a piece of each of several rows.
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

// Rows of x, with zeros behind their last column, and the sums of their squares.
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

// Adds one step's products. Lanes of a quad take neighbouring pieces of a row of either operand:
// which columns meet in one instruction is of no consequence, as long as they are the same of both.
__device__ void MultiplyStep(const Piece* x, bool has_row, Step& weights, float (&sums)[2][4]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
#pragma unroll
  for (int i = 0; i < kStepPieces; i += 4) {
    const int piece = i + lane % 4;
    const uint4 a = has_row ? *reinterpret_cast<const uint4*>(&x[piece]) : uint4{0, 0, 0, 0};
    const uint4 b = *reinterpret_cast<const uint4*>(&weights.At(lane / 4, piece));
    Mma16x8(sums[0], {a.x, 0, a.y, 0}, {b.x, b.y});
    Mma16x8(sums[1], {a.z, 0, a.w, 0}, {b.z, b.w});
  }
}

// One output of the tile, by a thread of its own: row and column of y.
template <After kAfter>
struct Output {
  __device__ Output(const FewRowsLaunch& p, int tile)
      : row(static_cast<int>(threadIdx.x) / kOutputs<kAfter>),
        column(tile * kOutputs<kAfter> + static_cast<int>(threadIdx.x) % kOutputs<kAfter>),
        is_there(row < p.num_rows && column < p.n) {}

  template <typename Out>
  __device__ Out* In(const FewRowsLaunch& p) const {
    return static_cast<Out*>(p.y) + row * p.n + column;
  }
  const int row;
  const int column;
  const bool is_there;
};

// Of the row of the tile that has an output's weights, or those of its other half.
template <typename Out>
__device__ Out SumOfWarps(const FewRowsLaunch& p, const float (*partials)[kFewRows][kTileRows],
                          int row, int in_tile, int64_t weight) {
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += partials[warp][row][in_tile];
  if (p.bias != nullptr) sum += static_cast<float>(static_cast<const Out*>(p.bias)[weight]);
  return Out(sum);
}

template <After kAfter, typename Out>
__device__ void Finish(const FewRowsLaunch& p, const Output<kAfter>& output, Out before,
                       const float (*partials)[kFewRows][kTileRows]) {
  if (!output.is_there) return;
  const int in_tile = output.column % kOutputs<kAfter>;
  const Out sum = SumOfWarps<Out>(p, partials, output.row, in_tile, output.column);
  Out* const y = output.template In<Out>(p);
  if constexpr (kAfter == After::kStore) {
    *y = sum;
  } else if constexpr (kAfter == After::kAdd) {
    *y = Out(static_cast<float>(before) + static_cast<float>(sum));
  } else {
    const Out up =
        SumOfWarps<Out>(p, partials, output.row, kOutputs<kAfter> + in_tile, p.n + output.column);
    const auto gate = static_cast<float>(sum);
    const Out silu = Out(gate / (1.0f + expf(-gate)));
    *y = Out(static_cast<float>(silu) * static_cast<float>(up));
  }
}

template <After kAfter, typename Out, int kStages>
__global__ void __launch_bounds__(kThreads) FewRowsKernel(const __grid_constant__ FewRowsLaunch p) {
  extern __shared__ uint4 raw[];
  auto& shared = *reinterpret_cast<SharedMemory<kStages>*>(raw);
  auto* const x = reinterpret_cast<Piece*>(&shared + 1);
  auto* const norm = x + p.num_rows * XPitch(p.k);
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;

  // Weights do not wait for x. Each thread copies what it needs of the norm's, with the first step.
  if (p.norm != nullptr) {
    for (int64_t i = threadIdx.x; i < p.k / kPiece; i += kThreads) {
      CopyAsync16(&norm[i], p.norm + i * kPiece, true);
    }
  }
  Walk ahead(p, kOutputs<kAfter>);
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    if (!ahead.is_over()) {
      CopyStep<kAfter>(p, ahead, shared.ring[warp][stage]);
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

  const bool has_row = lane / 4 < p.num_rows;
  const Piece* const row = x + (has_row ? lane / 4 : 0) * XPitch(p.k);
  int stage = 0;
  int turn = 0;
  for (int tile = static_cast<int>(blockIdx.x); tile < ahead.num_tiles;
       tile += static_cast<int>(gridDim.x)) {
    // The next kernel's blocks begin with its weights where a block of this one has ended.
    if (tile + static_cast<int>(gridDim.x) >= ahead.num_tiles) {
      cudaTriggerProgrammaticLaunchCompletion();
    }
    const Output<kAfter> output(p, tile);
    Out before = {};
    if (kAfter == After::kAdd && output.is_there) before = *output.template In<Out>(p);
    float sums[2][4] = {};
    for (int step = warp; step < ahead.steps; step += kWarps) {
      WaitForCopies<kStages - 1>();
      __syncwarp();  // of all lanes
      MultiplyStep(row + step * kStepPieces, has_row, shared.ring[warp][stage], sums);
      __syncwarp();  // all have read
      if (!ahead.is_over()) {
        CopyStep<kAfter>(p, ahead, shared.ring[warp][stage]);
        ahead.Next();
      }
      CommitCopies();
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    float* const to = shared.partials[turn][warp][lane / 4] + lane % 4 * 2;
    to[0] = sums[0][0] + sums[1][0];
    to[1] = sums[0][1] + sums[1][1];
    __syncthreads();
    Finish(p, output, before, shared.partials[turn]);
    turn ^= 1;
  }
}

// One block a multiprocessor, also while some of them are busy with the kernel before: there must
// not be room for two.
constexpr int64_t kLeastSharedBytes = kRoomForSharedMemory / 2 + 1024;

template <After kAfter, typename Out, int kStages>
cudaError_t Launch(const FewRowsLaunch& p, int num_processors, cudaStream_t stream) {
  const auto kernel = FewRowsKernel<kAfter, Out, kStages>;
  if (const cudaError_t error = cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kRoomForSharedMemory);
      error != cudaSuccess) {
    return error;
  }
  const int64_t tiles = (p.n + kOutputs<kAfter> - 1) / kOutputs<kAfter>;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(tiles, num_processors));
  const int64_t shared_bytes =
      std::max(SharedBytes<kStages>(p.num_rows, p.k, p.norm != nullptr), kLeastSharedBytes);
  return LaunchOverlapped(kernel, blocks, kThreads, static_cast<size_t>(shared_bytes), stream, p);
}

template <After kAfter, typename Out>
cudaError_t LaunchStages(const FewRowsLaunch& p, int num_processors, cudaStream_t stream) {
  const bool fits =
      SharedBytes<kManyStages>(p.num_rows, p.k, p.norm != nullptr) <= kRoomForSharedMemory;
  return (fits ? Launch<kAfter, Out, kManyStages>
               : Launch<kAfter, Out, kFewStages>)(p, num_processors, stream);
}

}  // namespace

bool FewRowsFit(int64_t num_rows, int64_t k) {
  return num_rows <= kFewRows && k % kPiece == 0 &&
         SharedBytes<kFewStages>(num_rows, k, FewRowsNormalize(k)) <= kRoomForSharedMemory;
}

bool FewRowsNormalize(int64_t k) {
  const int64_t runs = k / kPiece;
  return k % (kPiece * kWarpThreads) == 0 && runs <= kMaxNormThreads;
}

cudaError_t LaunchFewRows(const FewRowsLaunch& p, int num_processors, cudaStream_t stream) {
  switch (p.after) {
    case After::kAdd:
      return LaunchStages<After::kAdd, BFloat16>(p, num_processors, stream);
    case After::kSiluMul:
      return LaunchStages<After::kSiluMul, BFloat16>(p, num_processors, stream);
    case After::kStore:
      break;
  }
  return p.dtype == DType::kFloat32
             ? LaunchStages<After::kStore, float>(p, num_processors, stream)
             : LaunchStages<After::kStore, BFloat16>(p, num_processors, stream);
}

}  // namespace kvasir::kernels
