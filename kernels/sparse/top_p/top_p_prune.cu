// Top-p pruning on the GPU, two kernels:
//
//   estimate   a warp takes one page of what a row attends to, a lane two of its tokens: logits of
//              all heads of the group from key codes, packed densely; clears what competes
//   keep       a block of threads takes one head of a row, finds its threshold, and sets again what
//              reaches it
#include <algorithm>

#include "kernels/attention/row_items.h"
#include "kernels/sparse/block_select.cuh"
#include "kernels/sparse/key_code_logits.cuh"
#include "kernels/sparse/top_p/top_p_launch.h"
#include "kernels/sparse/top_p/top_p_rule.h"

namespace kvasir::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpThreads;
// Blocks of threads that estimate, all rows together.
constexpr int64_t kEstimateBlocks = 1024;
// Entries of a row whose offsets are in shared memory. Those of more are where they are left: all
// blocks of a row write the same.
constexpr int64_t kSharedOffsets = 16 * 1024;
// Weights of a head that are searched in shared memory; more stay where they are.
constexpr int64_t kCopiedWeights = 24 * 1024;

// What a warp estimates: tokens of one page, where the first one's weight goes, and where they
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
                              const CodeQueries<kHeadDim>& queries) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const PagedKv& kv = p.select.kv;
  const bool is_there = kv.row(row.block.slot, piece.page) >= 0;
  const std::byte* codes =
      is_there ? kv.KeyCodes(row.block.slot, piece.page, p.select.layer, row.kv_head) : nullptr;
  float* const weights = p.weights + row.index * p.select.group * p.max_tokens;
  for (int token = lane; token < kPageTokens; token += kWarpThreads) {
    if ((piece.tokens >> token & 1) == 0) continue;
    const uint64_t before = piece.tokens & ((uint64_t{1} << token) - 1);
    float* const to = weights + piece.offset + __popcll(before);
    if (is_there) {
      CodedKey<kHeadDim> key;
      key.Load(kv.layout, codes, token);
      const auto store = [&](int g, float logit) { to[g * p.max_tokens] = p.select.scale * logit; };
      const auto group = static_cast<int>(p.select.group);
      if constexpr (kPlaced) {
        const RotationAt at(p.select.rope, kHeadDim / 2, piece.positions.of(token));
        ForEachLogit(PlacedKey<kHeadDim>(key, at), queries, group, store);
      } else {
        ForEachLogit(key, queries, group, store);
      }
    } else {
      for (int g = 0; g < p.select.group; ++g) to[g * p.max_tokens] = -INFINITY;
    }
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
    if (competing + mandatory <= p.max_tokens) {
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
  for (int64_t i = int64_t{blockIdx.y} * kWarps + threadIdx.x / kWarpThreads; i < pieces.count();
       i += stride) {
    const Piece piece = pieces.at(i);
    EstimatePiece<kHeadDim, kPlaced>(p, row, piece, queries);
    if (i < header.count && threadIdx.x % kWarpThreads == 0) list[i].live &= ~piece.tokens;
  }
}

// Sums over a block, one barrier each: two places in turn.
class BlockSum {
 public:
  __device__ explicit BlockSum(double (*places)[kWarps]) : places_(places) {}
  // The same to all threads.
  __device__ double operator()(double value) {
    for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
      value += __shfl_xor_sync(kAllLanes, value, distance);
    }
    double* const place = places_[turn_];
    turn_ ^= 1;
    if (threadIdx.x % kWarpThreads == 0) place[threadIdx.x / kWarpThreads] = value;
    __syncthreads();
    double sum = 0;
    for (int i = 0; i < kWarps; ++i) sum += place[i];
    return sum;
  }

 private:
  double (*const places_)[kWarps];
  int turn_ = 0;
};

// The largest float t >= 0 with sum of the weights >= t at least `need`, as on the CPU.
__device__ float Threshold(const float* weights, int64_t count, double need, BlockSum& sum) {
  uint32_t low = 0;
  uint32_t high = __float_as_uint(1.0f) + 1;
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    const float t = __uint_as_float(middle);
    double own = 0;
    for (int64_t j = threadIdx.x; j < count; j += kThreads) {
      const float w = weights[j];
      own += w >= t ? static_cast<double>(w) : 0.0;  // leaves out NaN
    }
    (sum(own) >= need ? low : high) = middle;
  }
  return __uint_as_float(low);
}

__device__ float MaxOverBlock(float value) {
  __shared__ float places[kWarps];
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  if (threadIdx.x % kWarpThreads == 0) places[threadIdx.x / kWarpThreads] = value;
  __syncthreads();
  for (int i = 0; i < kWarps; ++i) value = fmaxf(value, places[i]);
  return value;
}

__global__ void __launch_bounds__(kThreads) KeepKernel(const __grid_constant__ TopPLaunch p) {
  __shared__ double places[2][kWarps];
  extern __shared__ float copied[];  // [kCopiedWeights]
  const DeviceRow row(p.select, blockIdx.x);
  const TopPCounts counts = p.counts[row.index];
  if (counts.competing == 0) return;
  float* const logits = p.weights + (row.index * p.select.group + blockIdx.y) * p.max_tokens;
  float* const weights = counts.competing <= kCopiedWeights ? copied : logits;
  const int64_t num_tokens = counts.competing + counts.mandatory;
  float max = -INFINITY;
  for (int64_t j = threadIdx.x; j < num_tokens; j += kThreads) max = fmaxf(max, logits[j]);
  max = MaxOverBlock(max);  // fmaxf leaves out NaN
  double total = 0;
  double mandatory = 0;
  for (int64_t j = threadIdx.x; j < num_tokens; j += kThreads) {
    const float weight = expf(logits[j] - max);
    if (j < counts.competing) weights[j] = weight;
    if (isnan(weight)) continue;
    total += static_cast<double>(weight);
    if (j >= counts.competing) mandatory += static_cast<double>(weight);
  }
  BlockSum sum(places);
  total = sum(total);
  mandatory = sum(mandatory);
  const double need =
      static_cast<double>(row.numbers.top_p) * (1 - kTopPRounding) * total - mandatory;
  const float threshold = need > 0 ? Threshold(weights, counts.competing, need, sum) : INFINITY;
  const SelectionHeader header = p.select.out.headers[row.index];
  SelectionEntry* const list = p.select.out.entries + row.index * p.select.out.capacity;
  const int32_t* const offsets = p.offsets + row.index * p.select.out.capacity;
  for (int64_t i = threadIdx.x; i < header.count; i += kThreads) {
    int64_t j = offsets[i];
    uint64_t kept = 0;
    for (uint64_t rest = Competing(header, list[i]); rest != 0; rest &= rest - 1, ++j) {
      if (!(weights[j] < threshold)) kept |= rest & (~rest + 1);  // and NaN
    }
    if (kept != 0) {
      atomicOr(reinterpret_cast<unsigned long long*>(&list[i].live), kept);
    }
  }
}

template <int kHeadDim, bool kPlaced>
cudaError_t Launch(const TopPLaunch& p, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(p.select.out.num_rows);
  const int64_t most_pieces =
      p.select.out.capacity + CeilPages(p.max_tokens) + 2;  // sink and window may begin in a page
  const int64_t useful = (most_pieces + kWarps - 1) / kWarps;
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
  EstimateKernel<kHeadDim, kPlaced><<<dim3(rows, static_cast<unsigned>(std::min(useful, share))),
                                      kThreads, offset_bytes, stream>>>(p);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  const int copy_bytes = static_cast<int>(std::min(kCopiedWeights, p.max_tokens) *
                                          static_cast<int64_t>(sizeof(float)));
  if (const cudaError_t error =
          cudaFuncSetAttribute(KeepKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, copy_bytes);
      error != cudaSuccess) {
    return error;
  }
  KeepKernel<<<dim3(rows, static_cast<unsigned>(p.select.group)), kThreads, copy_bytes, stream>>>(
      p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchTopP(const TopPLaunch& p, cudaStream_t stream) {
  const bool is_wide = p.select.kv.layout.head_dim == 128;
  if (p.select.rope.on()) return (is_wide ? Launch<128, true> : Launch<64, true>)(p, stream);
  return (is_wide ? Launch<128, false> : Launch<64, false>)(p, stream);
}

}  // namespace kvasir::kernels
