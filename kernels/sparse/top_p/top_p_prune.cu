// Top-p pruning on the GPU, two kernels:
//
//   estimate   a warp takes half a page of what a row attends to, a lane a token: logits of all
//              heads of the group from key codes, packed densely; clears what competes
//   keep       a block of threads takes one head of a row, finds its threshold by counting, and
//   sets
//              again what reaches it
#include <algorithm>

#include "kernels/attention/row_items.h"
#include "kernels/base/overlapped_launch.h"
#include "kernels/sparse/block_select.cuh"
#include "kernels/sparse/key_code_logits.cuh"
#include "kernels/sparse/top_p/top_p_launch.h"
#include "kernels/sparse/top_p/top_p_rule.h"

namespace kvasir::kernels {
namespace {

// Rows that attend to more are left as they are.
constexpr int64_t kMostTokens = int64_t{1} << 21;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpThreads;
// Blocks of threads that estimate, all rows together.
constexpr int64_t kEstimateBlocks = 1024;
constexpr int kHalves = static_cast<int>(kPageTokens) / kWarpThreads;  // of a page, a warp each
// Entries of a row whose offsets are in shared memory. Those of more are where they are left: all
// blocks of a row write the same.
constexpr int64_t kSharedOffsets = 16 * 1024;
constexpr int kKeepThreads = 512;
constexpr int kKeepWarps = kKeepThreads / kWarpThreads;
// Of a weight's bits, so many are found at a time.
constexpr int kBinBits = 11;
constexpr unsigned kBins = 1u << kBinBits;
// Tokens of a head whose weights are searched in shared memory; more stay where they are.
constexpr int64_t kCopiedWeights = 24 * 1024;

// Tokens of one page that are estimated, where the first one's weight goes, and where they
// stand.
struct Piece {
  int64_t page;
  uint64_t tokens;
  int64_t offset;
  ItemPositions positions;
};

// The pieces of a row: its entries, then the pages of the sink, then those of the window.
class RowPieces {
 public:
  __device__ RowPieces(const SelectionHeader& header, const SelectionEntry* list,
                       const int32_t* offsets, int64_t competing)
      : header_(header),
        list_(list),
        offsets_(offsets),
        competing_(competing),
        sink_pages_(CeilPages(header.sink_end)),
        first_window_page_(header.window_begin / kPageTokens) {}

  __device__ int64_t count() const {
    const int64_t window_pages = header_.query_position / kPageTokens - first_window_page_ + 1;
    return header_.count + sink_pages_ + window_pages;
  }
  __device__ Piece at(int64_t i) const {
    if (i < header_.count) {
      return {list_[i].page,
              Competing(header_, list_[i]),
              offsets_[i],
              {list_[i].pos0, list_[i].chosen}};
    }
    i -= header_.count;
    if (i < sink_pages_) {
      const int64_t start = i * kPageTokens;
      return {i,
              TokenMask(0, header_.sink_end - start),
              competing_ + start,
              {static_cast<int32_t>(start), ~uint64_t{0}}};
    }
    const int64_t page = first_window_page_ + i - sink_pages_;
    const int64_t start = page * kPageTokens;
    const int64_t before = max(int64_t{0}, start - header_.window_begin);
    return {page,
            TokenMask(header_.window_begin - start, header_.query_position + 1 - start),
            competing_ + header_.sink_end + before,
            {static_cast<int32_t>(QueryPosition(header_, start)), ~uint64_t{0}}};
  }

 private:
  const SelectionHeader& header_;
  const SelectionEntry* list_;
  const int32_t* offsets_;
  int64_t competing_;
  int64_t sink_pages_;
  int64_t first_window_page_;
};

// offsets[i] = competing tokens of the entries before i; returns those of all. By all threads.
__device__ int64_t CountCompeting(const SelectionHeader& header, const SelectionEntry* list,
                                  int32_t* offsets, SelectMemory& memory) {
  const int64_t share = (header.count + kThreads - 1) / kThreads;
  const int64_t begin = min(int64_t{header.count}, threadIdx.x * share);
  const int64_t end = min(int64_t{header.count}, begin + share);
  int64_t own = 0;
  for (int64_t i = begin; i < end; ++i) own += __popcll(Competing(header, list[i]));
  auto before = static_cast<int64_t>(SumBefore(static_cast<uint64_t>(own), memory));
  __shared__ int64_t total;
  if (threadIdx.x == kThreads - 1) total = before + own;
  for (int64_t i = begin; i < end; ++i) {
    offsets[i] = static_cast<int32_t>(before);
    before += __popcll(Competing(header, list[i]));
  }
  __syncthreads();
  return total;
}

template <int kHeadDim, bool kPlaced>
__device__ void EstimatePiece(const TopPLaunch& p, const DeviceRow& row, const Piece& piece,
                              int half, const CodeQueries<kHeadDim>& queries) {
  const int token = half * kWarpThreads + static_cast<int>(threadIdx.x) % kWarpThreads;
  if ((piece.tokens >> token & 1) == 0) return;
  const PagedKv& kv = p.select.kv;
  const bool is_there = kv.row(row.block.slot, piece.page) >= 0;
  const std::byte* codes =
      is_there ? kv.KeyCodes(row.block.slot, piece.page, p.select.layer, row.kv_head) : nullptr;
  const uint64_t before = piece.tokens & ((uint64_t{1} << token) - 1);
  float* const to =
      p.weights + row.index * p.select.group * p.max_tokens + piece.offset + __popcll(before);
  const auto group = static_cast<int>(p.select.group);
  if (!is_there) {
    for (int g = 0; g < group; ++g) to[g * p.max_tokens] = -INFINITY;
    return;
  }
  CodedKey<kHeadDim> key;
  key.Load(kv.layout, codes, token);
  const auto store = [&](int g, float logit) { to[g * p.max_tokens] = p.select.scale * logit; };
  if constexpr (kPlaced) {
    const RotationAt at(p.select.rope, kHeadDim / 2, piece.positions.of(token));
    ForEachLogit(PlacedKey<kHeadDim>(key, at), queries, group, store);
  } else {
    ForEachLogit(key, queries, group, store);
  }
}

// The row's queries, where it is pruned; kPlaced: rotated to their place.
template <int kHeadDim, bool kPlaced>
__device__ void LoadQueries(const SelectLaunch& p, const DeviceRow& row,
                            const SelectionHeader& header, const CodeQueries<kHeadDim>& to) {
  constexpr int kHalf = kHeadDim / 2;
  StoreCodeQueries(to, kMaxCudaGroup, [&](int g, int i) {
    if (g >= p.group) return 0.0f;
    if constexpr (kPlaced) {
      const int low = i % kHalf;
      const RotationAt at(p.rope, kHalf, QueryPosition(header, row.block.first_position));
      const float2 turned =
          at.Rotate(low, QueryElement(p, row, 0, g, low), QueryElement(p, row, 0, g, low + kHalf));
      return i < kHalf ? turned.x : turned.y;
    } else {
      return QueryElement(p, row, 0, g, i);
    }
  });
}

// kPlaced: keys are cached un-rotated, and rotated to their compact positions.
template <int kHeadDim, bool kPlaced>
__global__ void __launch_bounds__(kThreads, 1)
    EstimateKernel(const __grid_constant__ TopPLaunch p) {
  __shared__ SelectMemory memory;
  __shared__ alignas(16) float elements[kMaxCudaGroup][kHeadDim];
  __shared__ float sums[kMaxCudaGroup];
  extern __shared__ int32_t shared_offsets[];  // [capacity]
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  const DeviceRow row(p.select, blockIdx.x);
  int32_t* const offsets = p.select.out.capacity <= kSharedOffsets
                               ? shared_offsets
                               : p.offsets + row.index * p.select.out.capacity;
  const SelectionHeader header = p.select.out.headers[row.index];
  SelectionEntry* const list = p.select.out.entries + row.index * p.select.out.capacity;
  const bool tells = blockIdx.y == 0;
  TopPCounts counts;
  if (IsPruned(header, row.block, row.numbers)) {
    const int64_t competing = CountCompeting(header, list, offsets, memory);
    const int64_t mandatory = header.sink_end + header.query_position + 1 - header.window_begin;
    if (competing + mandatory <= min(p.max_tokens, kMostTokens)) {
      counts = {static_cast<int32_t>(competing), static_cast<int32_t>(mandatory)};
    }
  }
  if (tells && threadIdx.x == 0) p.counts[row.index] = counts;
  if (counts.competing == 0) return;
  const CodeQueries<kHeadDim> queries = {elements, sums};
  LoadQueries<kHeadDim, kPlaced>(p.select, row, header, queries);
  for (int64_t i = threadIdx.x; tells && i < header.count; i += kThreads) {
    p.offsets[row.index * p.select.out.capacity + i] = offsets[i];
  }
  __syncthreads();
  const RowPieces pieces(header, list, offsets, counts.competing);
  const int64_t stride = int64_t{gridDim.y} * kWarps;
  for (int64_t i = int64_t{blockIdx.y} * kWarps + threadIdx.x / kWarpThreads;
       i < kHalves * pieces.count(); i += stride) {
    const Piece piece = pieces.at(i / kHalves);
    const auto half = static_cast<int>(i % kHalves);
    EstimatePiece<kHeadDim, kPlaced>(p, row, piece, half, queries);
    const bool clears = half == 0 && threadIdx.x % kWarpThreads == 0;
    if (clears && i / kHalves < header.count) list[i / kHalves].live &= ~piece.tokens;
  }
}

// Weights, at most 1, as whole numbers of 2^-40: their sums are exact in whatever order, for up to
// kMostTokens.
__device__ uint64_t WholeOf(float weight) { return __float2ull_rn(weight * 0x1p40f); }

// A sum of such as sums of parts of its bits, as shared memory adds no more than 32 at once.
constexpr int kParts = 4;
constexpr int kPartBits = 11;
static_assert(kParts * kPartBits > 40 && kMostTokens << kPartBits <= int64_t{1} << 32);

// Shared memory of a block that keeps.
struct KeepMemory {
  float greatest[kKeepWarps];  // of the logits, by warp
  uint64_t sums[kKeepWarps];
  uint64_t totals[2];  // of the weights: those that compete, and the others
  uint32_t bins[kParts][kBins];
  uint64_t above;  // what the bins above `bin` hold
  uint32_t bin;
  uint32_t least;  // of the bits of weights that compete
  uint32_t most;
};

__device__ float MaxOverBlock(float value, KeepMemory& memory) {
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  if (threadIdx.x % kWarpThreads == 0) memory.greatest[threadIdx.x / kWarpThreads] = value;
  __syncthreads();
  for (int i = 0; i < kKeepWarps; ++i) value = fmaxf(value, memory.greatest[i]);
  return value;
}

// Adds what the threads have to memory.totals[which], which the next barrier shows.
__device__ void AddToTotal(uint64_t value, int which, KeepMemory& memory) {
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  if (threadIdx.x % kWarpThreads == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&memory.totals[which]), value);
  }
}

__device__ void AddToBin(uint64_t whole, uint32_t bin, KeepMemory& memory) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const uint32_t bits =
        static_cast<uint32_t>(whole >> part * kPartBits) & ((1u << kPartBits) - 1);
    if (bits != 0) atomicAdd(&memory.bins[part][bin], bits);
  }
}

__device__ uint64_t SumOfBin(uint32_t bin, const KeepMemory& memory) {
  uint64_t sum = 0;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    sum += static_cast<uint64_t>(memory.bins[part][bin]) << part * kPartBits;
  }
  return sum;
}

// Sums the weights in [low, high] by bins of 2^shift, and finds the one where the sum from the
// greatest on reaches `need`. Then `bin` and `above` are known to all. REQUIRES: all of them
// together reach it; need > 0; kBins bins are enough. Comparisons leave out NaN.
__device__ void FindBin(const float* weights, int64_t count, uint32_t low, uint32_t high, int shift,
                        uint64_t need, KeepMemory& memory) {
  for (unsigned i = threadIdx.x; i < kParts * kBins; i += kKeepThreads) memory.bins[0][i] = 0;
  __syncthreads();
  for (int64_t j = threadIdx.x; j < count; j += kKeepThreads) {
    const uint32_t bits = __float_as_uint(weights[j]);
    if (bits < low || bits > high) continue;
    AddToBin(WholeOf(weights[j]), (bits - low) >> shift, memory);
  }
  __syncthreads();
  constexpr unsigned kOwn = kBins / kKeepThreads;  // of a thread, from the greatest on
  const unsigned first = kBins - 1 - kOwn * threadIdx.x;
  uint64_t own[kOwn];
  uint64_t sum = 0;
  for (unsigned i = 0; i < kOwn; ++i) sum += own[i] = SumOfBin(first - i, memory);
  uint64_t above = SumBefore(sum, memory.sums);
  for (unsigned i = 0; i < kOwn; ++i) {
    const uint64_t next = above + own[i];
    if (above < need && need <= next) {
      memory.bin = first - i;
      memory.above = above;
    }
    above = next;
  }
  __syncthreads();
}

// The largest float t with sum of the weights >= t at least `need`, which all in [memory.least,
// memory.most] reach: the range that holds it is cut into bins again and again. Of floats above
// 0 the bits have the same order.
__device__ float Threshold(const float* weights, int64_t count, uint64_t need, KeepMemory& memory) {
  uint32_t low = memory.least;
  uint32_t high = memory.most;
  while (low < high) {
    const int shift = max(0, 32 - __clz(static_cast<int>(high - low)) - kBinBits);
    FindBin(weights, count, low, high, shift, need, memory);
    low += memory.bin << shift;
    high = min(high, low + ((1u << shift) - 1));
    need -= memory.above;
  }
  return __uint_as_float(low);
}

// Sets what a head keeps: a warp takes an entry, a lane two of its tokens.
__device__ void KeepTokens(const TopPLaunch& p, int64_t row, const float* weights,
                           float threshold) {
  const SelectionHeader header = p.select.out.headers[row];
  SelectionEntry* const list = p.select.out.entries + row * p.select.out.capacity;
  const int32_t* const offsets = p.offsets + row * p.select.out.capacity;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  for (int64_t i = threadIdx.x / kWarpThreads; i < header.count; i += kKeepWarps) {
    const uint64_t competing = Competing(header, list[i]);
    uint64_t kept = 0;
    for (int first = 0; first < kPageTokens; first += kWarpThreads) {
      const uint64_t token = uint64_t{1} << (first + lane);
      const bool is_kept = (competing & token) != 0 &&
                           !(weights[offsets[i] + __popcll(competing & (token - 1))] < threshold);
      kept |= static_cast<uint64_t>(__ballot_sync(kAllLanes, is_kept)) << first;  // and NaN
    }
    if (lane == 0 && kept != 0) {
      atomicOr(reinterpret_cast<unsigned long long*>(&list[i].live), kept);
    }
  }
}

__global__ void __launch_bounds__(kKeepThreads) KeepKernel(const __grid_constant__ TopPLaunch p) {
  __shared__ KeepMemory memory;
  extern __shared__ float copied[];  // [kCopiedWeights]
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  const DeviceRow row(p.select, blockIdx.x);
  const TopPCounts counts = p.counts[row.index];
  if (counts.competing == 0) return;
  float* const logits = p.weights + (row.index * p.select.group + blockIdx.y) * p.max_tokens;
  const int64_t num_tokens = int64_t{counts.competing} + counts.mandatory;
  float* const weights = num_tokens <= kCopiedWeights ? copied : logits;
  if (threadIdx.x < 2) memory.totals[threadIdx.x] = 0;
  if (threadIdx.x == 0) memory.least = __float_as_uint(1.0f);
  if (threadIdx.x == 0) memory.most = 0;
  float greatest = -INFINITY;
  for (int64_t j = threadIdx.x; j < num_tokens; j += kKeepThreads) {
    const float logit = logits[j];
    weights[j] = logit;
    greatest = fmaxf(greatest, logit);
  }
  greatest = MaxOverBlock(greatest, memory);  // fmaxf leaves out NaN
  uint64_t sums[2] = {};
  uint32_t least = __float_as_uint(1.0f);
  uint32_t most = 0;
  for (int64_t j = threadIdx.x; j < num_tokens; j += kKeepThreads) {
    const float weight = expf(weights[j] - greatest);
    weights[j] = weight;
    if (isnan(weight)) continue;
    sums[j < counts.competing ? 0 : 1] += WholeOf(weight);
    if (j >= counts.competing) continue;
    least = min(least, __float_as_uint(weight));
    most = max(most, __float_as_uint(weight));
  }
  least = __reduce_min_sync(kAllLanes, least);
  most = __reduce_max_sync(kAllLanes, most);
  if (threadIdx.x % kWarpThreads == 0) {
    atomicMin(&memory.least, least);
    atomicMax(&memory.most, most);
  }
  for (int i = 0; i < 2; ++i) AddToTotal(sums[i], i, memory);
  __syncthreads();
  const uint64_t competing = memory.totals[0];
  const uint64_t mandatory = memory.totals[1];
  const double wanted = ceil(static_cast<double>(row.numbers.top_p) * (1 - kTopPRounding) *
                             static_cast<double>(competing + mandatory));
  float threshold = INFINITY;
  if (wanted > static_cast<double>(mandatory)) {
    const uint64_t need = static_cast<uint64_t>(wanted) - mandatory;
    threshold = need <= competing ? Threshold(weights, counts.competing, need, memory) : 0.0f;
  }
  KeepTokens(p, row.index, weights, threshold);
}

template <int kHeadDim, bool kPlaced>
cudaError_t Launch(const TopPLaunch& p, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(p.select.out.num_rows);
  const int64_t most_pieces =
      p.select.out.capacity + CeilPages(p.max_tokens) + 2;  // sink and window may begin in a page
  const int64_t useful = (kHalves * most_pieces + kWarps - 1) / kWarps;
  const int64_t share = std::max<int64_t>(1, kEstimateBlocks / rows);
  const bool in_shared = p.select.out.capacity <= kSharedOffsets;
  const auto offset_bytes =
      static_cast<int>(in_shared ? p.select.out.capacity * sizeof(int32_t) : 0);
  if (const cudaError_t error =
          cudaFuncSetAttribute(EstimateKernel<kHeadDim, kPlaced>,
                               cudaFuncAttributeMaxDynamicSharedMemorySize, offset_bytes);
      error != cudaSuccess) {
    return error;
  }
  const dim3 blocks(rows, static_cast<unsigned>(std::min(useful, share)));
  if (const cudaError_t error = LaunchOverlapped(EstimateKernel<kHeadDim, kPlaced>, blocks,
                                                 kThreads, offset_bytes, stream, p);
      error != cudaSuccess) {
    return error;
  }
  const int copy_bytes = static_cast<int>(std::min(kCopiedWeights, p.max_tokens) *
                                          static_cast<int64_t>(sizeof(float)));
  if (const cudaError_t error =
          cudaFuncSetAttribute(KeepKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, copy_bytes);
      error != cudaSuccess) {
    return error;
  }
  return LaunchOverlapped(KeepKernel, dim3(rows, static_cast<unsigned>(p.select.group)),
                          kKeepThreads, copy_bytes, stream, p);
}

}  // namespace

cudaError_t LaunchTopP(const TopPLaunch& p, cudaStream_t stream) {
  const bool is_wide = p.select.kv.layout.head_dim == 128;
  if (p.select.rope.on()) return (is_wide ? Launch<128, true> : Launch<64, true>)(p, stream);
  return (is_wide ? Launch<128, false> : Launch<64, false>)(p, stream);
}

}  // namespace kvasir::kernels
