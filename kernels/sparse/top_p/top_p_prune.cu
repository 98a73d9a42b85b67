// Top-p pruning on the GPU: a cluster of blocks of threads a row, each with some of the pages that
// the row attends to.
//
//   estimate   a lane a token: logits of all heads of the group from key codes, each head's to the
//              shared memory of the block that searches for it
//   search     a block a head, side by side: the weights, and the least one that is kept
//              (top_p_threshold.cuh)
//   keep       a warp an entry: its tokens that any head keeps
#include <algorithm>

#include "kernels/attention/row_items.h"
#include "kernels/base/hopper.cuh"
#include "kernels/base/overlapped_launch.h"
#include "kernels/sparse/key_code_logits.cuh"
#include "kernels/sparse/top_p/top_p_launch.h"
#include "kernels/sparse/top_p/top_p_rule.h"
#include "kernels/sparse/top_p/top_p_threshold.cuh"

namespace kvasir::kernels {
namespace {

// Blocks of threads of all rows together, where the rows are few.
constexpr int64_t kBlocks = 128;
constexpr int kMostBlocksOfRow = 8;
// Keys that are rotated, and those of 64 elements, take a thread more registers.
constexpr int kThreads = 512;
constexpr int kPlacingThreads = 256;
// Weights of a block's heads in its shared memory; more go to device memory.
constexpr int64_t kSharedWeights = 32 * 1024;
// Pages of a block at once.
constexpr int64_t kMostItems = 256;

// Tokens of one page that are estimated.
struct Item {
  uint64_t tokens;
  uint64_t live;            // of the entry
  const std::byte* codes;   // null: the page is absent
  ItemPositions positions;  // of its tokens
  uint32_t slot;            // of its first token's weights; those of the others follow
};

// Shared memory of a block. Behind it: weights [heads of the block, shared_tokens],
// Item [items_at_once], uint16_t [items_at_once, kPageTokens].
template <int kHeadDim, int kThreads>
struct TopPMemory {
  alignas(16) float elements[kMaxCudaGroup][kHeadDim];
  float sums[kMaxCudaGroup];
  ThresholdMemory<kThreads> search;
  float* weights[kMaxCudaGroup];    // of each head, where its block has them
  float thresholds[kMaxCudaGroup];  // from the heads' blocks
  uint32_t num_competing;           // of the row: in the cluster's first block
  uint32_t num_tokens;              // that are estimated at once
};

// A block's part of a row. All by all threads of the block, unless said otherwise.
template <int kHeadDim, bool kPlaced, int kThreads>
class RowPruning {
 public:
  using Memory = TopPMemory<kHeadDim, kThreads>;

  __device__ RowPruning(const TopPLaunch& p, Memory& memory)
      : p_(p),
        memory_(memory),
        group_(static_cast<int>(p.select.group)),
        blocks_(p.blocks_of_row),
        rank_(hopper::ClusterRank()) {
    auto* const weights = reinterpret_cast<float*>(&memory + 1);
    items_ = reinterpret_cast<Item*>(weights + p.heads_of_block() * p.shared_tokens);
    tokens_ = reinterpret_cast<uint16_t*>(items_ + p.items_at_once);
  }

  // Before Run; reads nothing. The blocks of the cluster have begun when it returns.
  __device__ void Prepare() {
    memory_.search.ClearBins();
    if (threadIdx.x < kMaxCudaGroup) {
      const unsigned g = threadIdx.x;
      float* const here = reinterpret_cast<float*>(&memory_ + 1) + g / blocks_ * p_.shared_tokens;
      memory_.weights[g] = hopper::OfBlock(here, g % blocks_);
    }
    if (threadIdx.x == 0) memory_.num_competing = memory_.num_tokens = 0;
    hopper::ClusterSync();
  }

  __device__ void Run(const DeviceRow& row) {
    row_ = &row;
    list_ = p_.select.out.entries + row.index * p_.select.out.capacity;
    SelectionEntry entry = EntryOf(0);  // on its way with the header
    header_ = p_.select.out.headers[row.index];
    if (!IsPruned(header_, row.block, row.numbers)) return;
    mandatory_ = header_.sink_end + header_.query_position + 1 - header_.window_begin;
    CountItems();
    LoadQueries();
    for (int64_t first = 0; first < num_items_; first += p_.items_at_once) {
      if (first > 0) entry = EntryOf(first);
      LoadItems(first, entry, Slots::kTake);
      Estimate();
    }
    hopper::ClusterSync();
    const int64_t count = mandatory_ + *hopper::OfBlock(&memory_.num_competing, 0);
    if (count <= MostTokens()) {
      for (int g = static_cast<int>(rank_); g < group_; g += static_cast<int>(blocks_)) {
        FindThreshold(g, count);
      }
      hopper::ClusterSync();
      for (int64_t first = 0; first < num_items_; first += p_.items_at_once) {
        if (num_items_ > p_.items_at_once) LoadItems(first, EntryOf(first), Slots::kRecall);
        Keep(first);
      }
    }
    hopper::ClusterSync();  // blocks read each other's memory till here
  }

 private:
  enum class Slots { kTake, kRecall };

  __device__ int64_t MostTokens() const { return min(p_.max_tokens, kMostTokens); }

  // The row's items are its entries, then the pages of the sink, then those of the window; those of
  // the block are every blocks_-th of them.
  __device__ void CountItems() {
    const int64_t window_pages = header_.query_position / kPageTokens - FirstWindowPage() + 1;
    const int64_t all = header_.count + CeilPages(header_.sink_end) + window_pages;
    num_items_ = all > rank_ ? (all - rank_ - 1) / blocks_ + 1 : 0;
  }
  __device__ int64_t FirstWindowPage() const { return header_.window_begin / kPageTokens; }
  __device__ int64_t IndexOf(int64_t item) const { return rank_ + item * blocks_; }

  // Of the block's items [first, first + items_at_once) the thread has one at most, the last
  // threads first: the others load queries meanwhile.
  __device__ int64_t ItemOfThread() const { return kThreads - 1 - int64_t{threadIdx.x}; }
  // The entry that it is, if it is one: what lies there else is not looked at.
  __device__ SelectionEntry EntryOf(int64_t first) const {
    const int64_t own = ItemOfThread();
    const int64_t index = IndexOf(first + own);
    const bool may_be = own < p_.items_at_once && index < p_.select.out.capacity;
    return may_be ? list_[index] : SelectionEntry{};
  }

  // A row's item but for its codes; entries' slots are still to be given.
  __device__ Item ItemAt(int64_t index, const SelectionEntry& entry, int64_t& page) const {
    if (index < header_.count) {
      page = entry.page;
      return {.tokens = Competing(header_, entry),
              .live = entry.live,
              .positions = {entry.pos0, entry.chosen}};
    }
    index -= header_.count;
    const int64_t sink_pages = CeilPages(header_.sink_end);
    if (index < sink_pages) {
      page = index;
      const int64_t start = page * kPageTokens;
      return {.tokens = TokenMask(0, header_.sink_end - start),
              .positions = {static_cast<int32_t>(start), ~uint64_t{0}},
              .slot = static_cast<uint32_t>(start)};
    }
    page = FirstWindowPage() + index - sink_pages;
    const int64_t start = page * kPageTokens;
    const int64_t before = max(int64_t{0}, start - header_.window_begin);
    return {.tokens = TokenMask(header_.window_begin - start, header_.query_position + 1 - start),
            .positions = {static_cast<int32_t>(QueryPosition(header_, start)), ~uint64_t{0}},
            .slot = static_cast<uint32_t>(header_.sink_end + before)};
  }

  // The block's items from `first` on, and lists their tokens.
  __device__ void LoadItems(int64_t first, const SelectionEntry& entry, Slots slots) {
    if (first > 0 || slots == Slots::kRecall) {
      __syncthreads();
      if (threadIdx.x == 0) memory_.num_tokens = 0;
      __syncthreads();
    }
    const int64_t own = ItemOfThread();
    if (own < p_.items_at_once) items_[own] = MakeItem(first, entry, slots);
    __syncthreads();
  }
  // The thread's. By a warp.
  __device__ Item MakeItem(int64_t first, const SelectionEntry& entry, Slots slots) {
    const int64_t own = ItemOfThread();
    const int64_t index = IndexOf(first + own);
    const bool is_item = first + own < num_items_;
    int64_t page = 0;
    Item item = is_item ? ItemAt(index, entry, page) : Item{};
    const PagedKv& kv = p_.select.kv;
    if (item.tokens != 0 && kv.row(row_->block.slot, page) >= 0) {
      item.codes = kv.KeyCodes(row_->block.slot, page, p_.select.layer, row_->kv_head);
    }
    const bool competes = is_item && index < header_.count;
    if (slots == Slots::kTake) {
      TakeSlots(item, static_cast<int>(own), competes);
      if (competes && num_items_ > p_.items_at_once) SlotsOfEntries()[index] = item.slot;
    } else if (competes) {
      item.slot = SlotsOfEntries()[index];
    }
    return item;
  }
  __device__ uint32_t* SlotsOfEntries() const {
    return p_.slots + row_->index * p_.select.out.capacity;
  }

  // Gives the entries of a warp's items slots in the row, and all their tokens places in tokens_.
  // By a warp.
  __device__ void TakeSlots(Item& item, int own, bool competes) {
    const unsigned lane = threadIdx.x % kWarpThreads;
    const auto count = static_cast<uint32_t>(__popcll(item.tokens));
    const uint32_t both = count << 16 | (competes ? count : 0);
    uint32_t sum = both;
    for (unsigned distance = 1; distance < kWarpThreads; distance *= 2) {
      const uint32_t left = __shfl_up_sync(kAllLanes, sum, distance);
      if (lane >= distance) sum += left;
    }
    uint32_t slot = 0;
    uint32_t place = 0;
    if (lane == kWarpThreads - 1) {
      place = atomicAdd(&memory_.num_tokens, sum >> 16);
      slot = atomicAdd(hopper::OfBlock(&memory_.num_competing, 0), sum & 0xffff);
    }
    place = __shfl_sync(kAllLanes, place, kWarpThreads - 1) + ((sum - both) >> 16);
    slot = __shfl_sync(kAllLanes, slot, kWarpThreads - 1) + ((sum - both) & 0xffff);
    if (competes) item.slot = static_cast<uint32_t>(mandatory_) + slot;
    for (unsigned rest = __ballot_sync(kAllLanes, count > 0); rest != 0; rest &= rest - 1) {
      const int owner = __ffs(static_cast<int>(rest)) - 1;
      const uint64_t tokens = __shfl_sync(kAllLanes, item.tokens, owner);
      const uint32_t first = __shfl_sync(kAllLanes, place, owner);
      const int number = __shfl_sync(kAllLanes, own, owner);
      for (unsigned token = lane; token < kPageTokens; token += kWarpThreads) {
        if ((tokens >> token & 1) == 0) continue;
        tokens_[first + BitsBefore(tokens, token)] =
            static_cast<uint16_t>(number * kPageTokens + token);
      }
    }
  }
  static __device__ uint32_t BitsBefore(uint64_t mask, unsigned bit) {
    return static_cast<uint32_t>(__popcll(mask & ((uint64_t{1} << bit) - 1)));
  }

  // The row's queries; kPlaced: rotated to their place.
  __device__ void LoadQueries() {
    constexpr int kHalf = kHeadDim / 2;
    StoreCodeQueries(Queries(), kMaxCudaGroup, [&](int g, int i) {
      if (g >= group_) return 0.0f;
      const auto element = [&](int at) { return QueryElement(p_.select, *row_, 0, g, at); };
      if constexpr (kPlaced) {
        const int low = i % kHalf;
        const RotationAt at(p_.select.rope, kHalf,
                            QueryPosition(header_, row_->block.first_position));
        const float2 turned = at.Rotate(low, element(low), element(low + kHalf));
        return i < kHalf ? turned.x : turned.y;
      } else {
        return element(i);
      }
    });
  }
  __device__ CodeQueries<kHeadDim> Queries() const { return {memory_.elements, memory_.sums}; }

  // A head's weight, in shared memory of its block or in device memory.
  __device__ float& Weight(int g, int64_t slot) const {
    if (slot < p_.shared_tokens) return memory_.weights[g][slot];
    return p_.weights[(row_->index * group_ + g) * p_.max_tokens + slot];
  }

  // Logits of the tokens that are listed.
  __device__ void Estimate() {
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < memory_.num_tokens; i += kThreads) {
      const unsigned listed = tokens_[i];
      const unsigned token = listed % kPageTokens;
      const Item& item = items_[listed / kPageTokens];
      const int64_t slot = int64_t{item.slot} + BitsBefore(item.tokens, token);
      if (slot >= MostTokens()) continue;  // the row is left as it is
      if (item.codes == nullptr) {
        for (int g = 0; g < group_; ++g) Weight(g, slot) = -INFINITY;
        continue;
      }
      CodedKey<kHeadDim> key;
      key.Load(p_.select.kv.layout, item.codes, token);
      const auto store = [&](int g, float logit) { Weight(g, slot) = p_.select.scale * logit; };
      if constexpr (kPlaced) {
        const RotationAt at(p_.select.rope, kHeadDim / 2,
                            item.positions.of(static_cast<int>(token)));
        ForEachLogit(PlacedKey<kHeadDim>(key, at), Queries(), group_, store);
      } else {
        ForEachLogit(key, Queries(), group_, store);
      }
    }
  }

  // Makes weights of a head's logits, and tells all blocks the least that is kept.
  __device__ void FindThreshold(int g, int64_t count) {
    if (g >= static_cast<int>(blocks_)) {  // not the block's first
      __syncthreads();
      memory_.search.ClearBins();
      __syncthreads();
    }
    const auto at = [&](int64_t slot) -> float& { return Weight(g, slot); };
    const float threshold =
        ThresholdSearch<kThreads, decltype(at)>(at, mandatory_, count, memory_.search)
            .Run(row_->numbers.top_p);
    if (threadIdx.x < blocks_) *hopper::OfBlock(&memory_.thresholds[g], threadIdx.x) = threshold;
  }

  // What is left of the entries among the items: of each by a warp, a lane two of its tokens.
  __device__ void Keep(int64_t first) const {
    const unsigned lane = threadIdx.x % kWarpThreads;
    const int64_t end = min(p_.items_at_once, num_items_ - first);
    for (int64_t i = threadIdx.x / kWarpThreads; i < end; i += kThreads / kWarpThreads) {
      const Item& item = items_[i];
      const int64_t index = IndexOf(first + i);
      if (index >= header_.count || item.tokens == 0) continue;
      uint64_t kept = 0;
#pragma unroll
      for (unsigned half = 0; half < kPageTokens; half += kWarpThreads) {
        const unsigned token = half + lane;
        const bool is_kept = (item.tokens >> token & 1) != 0 &&
                             IsKept(int64_t{item.slot} + BitsBefore(item.tokens, token));
        kept |= static_cast<uint64_t>(__ballot_sync(kAllLanes, is_kept)) << half;
      }
      if (lane == 0) list_[index].live = item.live & (~item.tokens | kept);
    }
  }
  __device__ bool IsKept(int64_t slot) const {
    bool is_kept = false;
#pragma unroll 4
    for (int g = 0; g < group_; ++g) is_kept |= !(Weight(g, slot) < memory_.thresholds[g]);
    return is_kept;  // and NaN
  }

  const TopPLaunch& p_;
  Memory& memory_;
  const int group_;
  const unsigned blocks_;
  const unsigned rank_;
  Item* items_;
  uint16_t* tokens_;
  const DeviceRow* row_ = nullptr;
  SelectionHeader header_;
  SelectionEntry* list_ = nullptr;
  int64_t mandatory_ = 0;
  int64_t num_items_ = 0;
};

// kPlaced: keys are cached un-rotated, and rotated to their compact positions.
template <int kHeadDim, bool kPlaced, int kThreads>
__global__ void __launch_bounds__(kThreads, 1) PruneKernel(const __grid_constant__ TopPLaunch p) {
  extern __shared__ uint4 raw[];
  RowPruning<kHeadDim, kPlaced, kThreads> pruning(
      p, *reinterpret_cast<TopPMemory<kHeadDim, kThreads>*>(raw));
  cudaTriggerProgrammaticLaunchCompletion();
  pruning.Prepare();
  cudaGridDependencySynchronize();
  pruning.Run(DeviceRow(p.select, blockIdx.x / p.blocks_of_row));
}

template <int kHeadDim, bool kPlaced>
cudaError_t Launch(TopPLaunch p, cudaStream_t stream) {
  constexpr int kBlockThreads = kPlaced || kHeadDim == 64 ? kPlacingThreads : kThreads;
  p.blocks_of_row = kMostBlocksOfRow;
  while (p.blocks_of_row > 1 && p.select.out.num_rows * p.blocks_of_row > kBlocks) {
    p.blocks_of_row /= 2;
  }
  p.shared_tokens = std::min(p.max_tokens, kSharedWeights / p.heads_of_block()) / 4 * 4;
  const int64_t most_items =
      p.select.out.capacity + CeilPages(p.max_tokens) + 2;  // sink and window may begin in a page
  const int64_t of_block = (most_items + p.blocks_of_row - 1) / p.blocks_of_row;
  p.items_at_once =
      std::min(kMostItems, (of_block + kWarpThreads - 1) / kWarpThreads * kWarpThreads);
  const int64_t bytes =
      static_cast<int64_t>(sizeof(TopPMemory<kHeadDim, kBlockThreads>)) +
      p.heads_of_block() * p.shared_tokens * static_cast<int64_t>(sizeof(float)) +
      p.items_at_once * static_cast<int64_t>(sizeof(Item) + kPageTokens * sizeof(uint16_t));
  const auto kernel = PruneKernel<kHeadDim, kPlaced, kBlockThreads>;
  if (const cudaError_t error = cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
      error != cudaSuccess) {
    return error;
  }
  const auto blocks = static_cast<unsigned>(p.select.out.num_rows) * p.blocks_of_row;
  return LaunchOverlappedClusters(kernel, p.blocks_of_row, blocks, kBlockThreads,
                                  static_cast<size_t>(bytes), stream, p);
}

}  // namespace

cudaError_t LaunchTopP(const TopPLaunch& p, cudaStream_t stream) {
  const bool is_wide = p.select.kv.layout.head_dim == 128;
  if (p.select.rope.on()) return (is_wide ? Launch<128, true> : Launch<64, true>)(p, stream);
  return (is_wide ? Launch<128, false> : Launch<64, false>)(p, stream);
}

}  // namespace kvasir::kernels
