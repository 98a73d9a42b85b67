// Top-p pruning on the GPU: a cluster of CTAs takes a row, each CTA some of its attended pages.
//
//   estimate   a warp takes 32 tokens: logits of all heads of the group from key codes, each head's
//              written to the shared memory of the CTA that searches for it
//   search     a CTA takes one head at a time, all CTAs in parallel: the weights, and the least one
//              that is kept (top_p_threshold.cuh); all CTAs learn which tokens the head keeps
//   keep       a warp takes an entry: its tokens that any head keeps
#include "kernels/base/head_dim.h"
#include "kernels/base/hopper.cuh"
#include "kernels/base/overlapped_launch.h"
#include "kernels/sparse/key_logits/key_code_logits.cuh"
#include "kernels/sparse/top_p/top_p_launch.h"
#include "kernels/sparse/top_p/top_p_memory.cuh"
#include "kernels/sparse/top_p/top_p_rule.h"
#include "kernels/sparse/top_p/top_p_threshold.cuh"

namespace kvasir::kernels {
namespace {

// A CTA's part of a row. All functions are called by all threads of the CTA unless said otherwise.
template <int kHeadDim, bool kPlaced>
class RowPruning {
 public:
  using Memory = TopPMemory<kHeadDim>;

  __device__ RowPruning(const TopPLaunch& p, Memory& memory)
      : p_(p),
        memory_(memory),
        row_(memory.row),
        header_(memory.header),
        rank_(hopper::ClusterRank()) {}

  // Called before Run; reads no input. All CTAs of the cluster have begun when it returns.
  __device__ void Prepare(uint32_t row) {
    memory_.search.ClearBins();
    if (threadIdx.x < p_.select.group) {
      const unsigned g = threadIdx.x;
      float* const here = memory_.Weights() + g / p_.blocks_of_row * p_.shared_tokens;
      memory_.weights[g] = hopper::OfBlock(here, g % p_.blocks_of_row);
      memory_.others[g] = p_.weights + (row * p_.select.group + g) * p_.max_tokens;
    }
    if (threadIdx.x == 0) {
      const auto heads = static_cast<uint32_t>(p_.select.kv.layout.num_kv_heads);
      memory_.tile = row / heads;
      memory_.row.index = row;
      memory_.row.kv_head = row % heads;
      memory_.num_competing = memory_.num_tokens = 0;
    }
    hopper::ClusterSync();
  }

  __device__ void Run(uint32_t row) {
    SelectionEntry entry = EntryOf(row, 0);  // loaded while the header is
    LoadRow(row);
    if (!IsPruned(header_, row_.tile, row_.numbers)) return;
    LoadQueries();
    for (int64_t first = 0; first < memory_.num_items; first += p_.items_at_once) {
      if (first > 0) entry = EntryOf(row, first);
      LoadItems(first, entry, Slots::kTake);
      Estimate();
    }
    hopper::ClusterSync();
    const int64_t count = memory_.num_mandatory + *hopper::OfBlock(&memory_.num_competing, 0);
    const bool fits = count <= MostTokens();
    if (fits) {
      for (int g = static_cast<int>(rank_); g < p_.select.group;
           g += static_cast<int>(p_.blocks_of_row)) {
        FindThreshold(g, static_cast<uint32_t>(count));
      }
    }
    hopper::ClusterSync();
    for (int64_t first = 0; fits && first < memory_.num_items; first += p_.items_at_once) {
      if (memory_.num_items > p_.items_at_once) {
        LoadItems(first, EntryOf(row, first), Slots::kRecall);
      }
      Keep(first);
    }
  }

 private:
  enum class Slots { kTake, kRecall };

  __device__ int64_t MostTokens() const { return min(p_.max_tokens, kMostTokens); }

  // Loads the row and its header, and what follows from them. The row's items are its entries, then
  // the pages of the sink, then those of the window. The CTA has every blocks_of_row-th of them.
  __device__ void LoadRow(uint32_t row) {
    if (threadIdx.x < kWarpThreads) {
      Copy(p_.select.out.headers[row], memory_.header);
      Copy(p_.select.tiles[memory_.tile], memory_.row.tile);
      Copy(p_.select.numbers[memory_.tile], memory_.row.numbers);
      __syncwarp();
    }
    if (threadIdx.x == 0) {
      memory_.num_mandatory = header_.sink_end + header_.query_position + 1 - header_.window_begin;
      const int64_t window_pages = header_.query_position / kPageTokens - FirstWindowPage() + 1;
      const int64_t all = header_.count + CeilPages(header_.sink_end) + window_pages;
      memory_.num_items = (all - rank_ + p_.blocks_of_row - 1) >> p_.log_blocks_of_row;
    }
    __syncthreads();
  }
  // By a warp; each lane copies some words.
  template <typename T>
  static __device__ void Copy(const T& from, T& to) {
    for (unsigned i = threadIdx.x % kWarpThreads; i < sizeof(T) / sizeof(uint32_t);
         i += kWarpThreads) {
      reinterpret_cast<uint32_t*>(&to)[i] = reinterpret_cast<const uint32_t*>(&from)[i];
    }
  }
  __device__ SelectionEntry* Entries(int64_t row) const {
    return p_.select.out.entries + row * p_.select.out.capacity;
  }
  __device__ int64_t FirstWindowPage() const { return header_.window_begin / kPageTokens; }
  __device__ int64_t IndexOf(int64_t item) const { return rank_ + item * p_.blocks_of_row; }

  // The number, from `first` on, of the thread's item among the CTA's items [first, first +
  // items_at_once). The last threads have the first items; the others load queries meanwhile.
  __device__ int64_t ItemOfThread() const { return kTopPThreads - 1 - int64_t{threadIdx.x}; }
  // Returns the thread's entry if its item is one. Otherwise the value is not used.
  __device__ SelectionEntry EntryOf(int64_t row, int64_t first) const {
    const int64_t own = ItemOfThread();
    const int64_t index = IndexOf(first + own);
    const bool may_be = own < p_.items_at_once && index < p_.select.out.capacity;
    return may_be ? Entries(row)[index] : SelectionEntry{};
  }

  // Returns an item of the row without its codes and, for entries, without its slot.
  __device__ TopPItem ItemAt(int64_t index, const SelectionEntry& entry, int64_t& page) const {
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

  // Loads the CTA's items from `first` on and lists their tokens.
  __device__ void LoadItems(int64_t first, const SelectionEntry& entry, Slots slots) {
    if (first > 0 || slots == Slots::kRecall) {
      __syncthreads();
      if (threadIdx.x == 0) memory_.num_tokens = 0;
      __syncthreads();
    }
    const int64_t own = ItemOfThread();
    if (own < p_.items_at_once) memory_.Items(p_)[own] = MakeItem(first, entry, slots);
    __syncthreads();
  }
  // Makes the thread's item. By a warp.
  __device__ TopPItem MakeItem(int64_t first, const SelectionEntry& entry, Slots slots) {
    const int64_t own = ItemOfThread();
    const int64_t index = IndexOf(first + own);
    const bool is_item = first + own < memory_.num_items;
    int64_t page = 0;
    TopPItem item = is_item ? ItemAt(index, entry, page) : TopPItem{};
    const PagedKv& kv = p_.select.kv;
    if (item.tokens != 0 && kv.extent(row_.tile.slot, page) >= 0) {
      item.codes = kv.KeyCodes(row_.tile.slot, page, p_.select.layer, row_.kv_head);
    }
    const bool competes = is_item && index < header_.count;
    if (slots == Slots::kTake) {
      TakeSlots(item, static_cast<int>(own), competes);
      if (competes && memory_.num_items > p_.items_at_once) SlotsOfEntries()[index] = item.slot;
    } else if (competes) {
      item.slot = SlotsOfEntries()[index];
    }
    return item;
  }
  __device__ uint32_t* SlotsOfEntries() const {
    return p_.slots + row_.index * p_.select.out.capacity;
  }

  // Gives the entries among a warp's items slots in the row, and lists all their tokens. By a warp.
  __device__ void TakeSlots(TopPItem& item, int own, bool competes) {
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
    if (competes) item.slot = static_cast<uint32_t>(memory_.num_mandatory) + slot;
    for (unsigned rest = __ballot_sync(kAllLanes, count > 0); rest != 0; rest &= rest - 1) {
      const int owner = __ffs(static_cast<int>(rest)) - 1;
      const uint64_t tokens = __shfl_sync(kAllLanes, item.tokens, owner);
      const uint32_t first = __shfl_sync(kAllLanes, place, owner);
      const int number = __shfl_sync(kAllLanes, own, owner);
      for (unsigned token = lane; token < kPageTokens; token += kWarpThreads) {
        if ((tokens >> token & 1) == 0) continue;
        memory_.Tokens(p_)[first + BitsBefore(tokens, token)] =
            static_cast<uint16_t>(number * kPageTokens + token);
      }
    }
  }
  static __device__ uint32_t BitsBefore(uint64_t mask, unsigned bit) {
    return static_cast<uint32_t>(__popcll(mask & ((uint64_t{1} << bit) - 1)));
  }

  // Loads the row's queries. kPlaced: rotates them to their position.
  __device__ void LoadQueries() {
    static_assert(kMaxCudaGroup <= kProductQueries);
    StageQueries(&memory_.queries, 1, [&](int g, int i) {
      if (g >= p_.select.group) return float4{};
      if constexpr (!kPlaced) return QueryFour(p_.select, row_, 0, g, i);
      constexpr int kHalf = kHeadDim / 2;
      const int low = i % (kHalf / 4);
      const float4 x = QueryFour(p_.select, row_, 0, g, low);
      const float4 y = QueryFour(p_.select, row_, 0, g, low + kHalf / 4);
      const RotationAt at(p_.select.rope, kHalf, QueryPosition(header_, row_.tile.first_position));
      const auto turned = [&](int e, float of_low, float of_high) {
        const float2 both = at.Rotate(4 * low + e, of_low, of_high);
        return i == low ? both.x : both.y;
      };
      return float4{turned(0, x.x, y.x), turned(1, x.y, y.y), turned(2, x.z, y.z),
                    turned(3, x.w, y.w)};
    });
  }

  // A head's weight, in the shared memory of its CTA or in device memory.
  __device__ float& Weight(int g, uint32_t slot) const {
    return (slot < p_.shared_tokens ? memory_.weights : memory_.others)[g][slot];
  }

  // Computes logits of the listed tokens, 32 by a warp.
  __device__ void Estimate() {
#pragma unroll 1
    for (unsigned listed = threadIdx.x; listed / kWarpThreads * kWarpThreads < memory_.num_tokens;
         listed += kTopPThreads) {
      const Token token = TokenAt(listed);
      TopPWarpMemory<kHeadDim>& own = memory_.of_warps[threadIdx.x / kWarpThreads];
      const bool is_there = token.codes != nullptr;
      __syncwarp();  // the previous keys have been read
      own.keys.Begin(p_.select.kv.layout, token.codes, token.in_page);
      CommitCopies();
      WaitForCopies<0>();
      own.keys.Finish();
      __syncwarp();
      const auto store = [&](int, int tile, float2 logits) {
        const unsigned lane = threadIdx.x % kWarpThreads;
        own.logits[lane / 4][tile * (kProductKeys / 2) + lane % 4] = logits;
      };
#pragma unroll 1
      for (int tile = 0; tile < kKeyTiles; ++tile) {
        if constexpr (kPlaced) {
          const auto position_of = [&](int key) {
            return __shfl_sync(kAllLanes, token.position, key);
          };
          ForEachPlacedLogit<1>(own.keys, p_.select.rope, position_of, &memory_.queries, 1, store,
                                tile);
        } else {
          ForEachLogit<1>(own.keys, &memory_.queries, 1, store, tile);
        }
      }
      __syncwarp();
      // Adjacent tokens mostly have adjacent slots.
#pragma unroll 1
      for (int g = 0; token.slot != kNoSlot && g < p_.select.group; ++g) {
        const float logit =
            reinterpret_cast<const float*>(own.logits[g])[threadIdx.x % kWarpThreads];
        Weight(g, token.slot) = is_there ? p_.select.scale * logit : -INFINITY;
      }
    }
  }
  static constexpr uint32_t kNoSlot = ~0u;
  struct Token {
    const std::byte* codes = nullptr;  // of its page; null: it is absent
    int in_page = 0;
    int32_t position = 0;
    uint32_t slot = kNoSlot;  // kNoSlot: no token, or the row is left unchanged
  };
  __device__ Token TokenAt(unsigned listed) const {
    if (listed >= memory_.num_tokens) return {};
    const int in_page = memory_.Tokens(p_)[listed] % static_cast<int>(kPageTokens);
    const TopPItem& item = memory_.Items(p_)[memory_.Tokens(p_)[listed] / kPageTokens];
    const uint32_t slot = item.slot + BitsBefore(item.tokens, static_cast<unsigned>(in_page));
    return {.codes = item.codes,
            .in_page = in_page,
            .position = static_cast<int32_t>(item.positions.of(in_page)),
            .slot = slot < MostTokens() ? slot : kNoSlot};
  }

  // Turns a head's logits into weights, and tells all CTAs which tokens it keeps.
  __device__ void FindThreshold(int g, uint32_t count) {
    if (g >= static_cast<int>(p_.blocks_of_row)) {  // not the CTA's first head
      __syncthreads();
      memory_.search.ClearBins();
      __syncthreads();
    }
    const HeadWeights weights = {
        .near = memory_.Weights() + g / p_.blocks_of_row * p_.shared_tokens,
        .far = memory_.others[g],
        .num_near = p_.shared_tokens};
    const auto num_mandatory = static_cast<uint32_t>(memory_.num_mandatory);
    const float threshold =
        ThresholdSearch<kTopPThreads>(weights, num_mandatory, count, memory_.search)
            .Run(row_.numbers.top_p);
    if (threadIdx.x < p_.blocks_of_row) {
      *hopper::OfBlock(&memory_.thresholds[g], threadIdx.x) = threshold;
    }
    const uint32_t end = min(count, p_.shared_tokens);
    for (uint32_t slot = num_mandatory / kWarpThreads * kWarpThreads + threadIdx.x;
         slot / kWarpThreads * kWarpThreads < end; slot += kTopPThreads) {
      const bool is_kept = slot < end && !(weights.near[slot] < threshold);  // NaN is kept, too
      const uint32_t kept = __ballot_sync(kAllLanes, is_kept);
      const unsigned lane = threadIdx.x % kWarpThreads;
      if (lane < p_.blocks_of_row) {
        hopper::OfBlock(memory_.KeptBy(p_, g), lane)[slot / kWarpThreads] = kept;
      }
    }
  }

  // Clears the tokens that no head keeps from the entries among the items. A warp takes an entry, a
  // lane two of its tokens.
  __device__ void Keep(int64_t first) const {
    const unsigned lane = threadIdx.x % kWarpThreads;
    const int64_t end = min(p_.items_at_once, memory_.num_items - first);
    for (int64_t i = threadIdx.x / kWarpThreads; i < end; i += kTopPThreads / kWarpThreads) {
      const TopPItem& item = memory_.Items(p_)[i];
      const int64_t index = IndexOf(first + i);
      if (index >= header_.count || item.tokens == 0) continue;
      uint64_t kept = 0;
#pragma unroll 1
      for (unsigned half = 0; half < kPageTokens; half += kWarpThreads) {
        const unsigned token = half + lane;
        const bool is_kept =
            (item.tokens >> token & 1) != 0 && IsKept(item.slot + BitsBefore(item.tokens, token));
        kept |= static_cast<uint64_t>(__ballot_sync(kAllLanes, is_kept)) << half;
      }
      if (lane == 0) Entries(row_.index)[index].live = item.live & (~item.tokens | kept);
    }
  }
  __device__ bool IsKept(uint32_t slot) const {
    const auto group = static_cast<int>(p_.select.group);
    if (slot < p_.shared_tokens) {
      uint32_t kept = 0;
#pragma unroll 4
      for (int g = 0; g < group; ++g) kept |= memory_.KeptBy(p_, g)[slot / kWarpThreads];
      return (kept >> slot % kWarpThreads & 1) != 0;
    }
    bool is_kept = false;
#pragma unroll 1
    for (int g = 0; g < group; ++g) {
      is_kept |= !(memory_.others[g][slot] < memory_.thresholds[g]);
    }
    return is_kept;
  }

  const TopPLaunch& p_;
  Memory& memory_;
  const DeviceRow& row_;
  const SelectionHeader& header_;
  const unsigned rank_;
};

// kPlaced: keys are cached un-rotated and are rotated to their compact positions.
template <int kHeadDim, bool kPlaced>
__global__ void __launch_bounds__(kTopPThreads, 1)
    PruneKernel(const __grid_constant__ TopPLaunch p) {
  extern __shared__ uint4 raw[];
  RowPruning<kHeadDim, kPlaced> pruning(p, *reinterpret_cast<TopPMemory<kHeadDim>*>(raw));
  const uint32_t row = blockIdx.x >> p.log_blocks_of_row;
  cudaTriggerProgrammaticLaunchCompletion();
  pruning.Prepare(row);
  cudaGridDependencySynchronize();
  pruning.Run(row);
}

template <int kHeadDim, bool kPlaced>
cudaError_t Launch(const TopPLaunch& p, cudaStream_t stream) {
  const int64_t bytes = TopPMemory<kHeadDim>::Bytes(p);
  const auto kernel = PruneKernel<kHeadDim, kPlaced>;
  if (const cudaError_t error = AllowSharedBytes(kernel, bytes); error != cudaSuccess) return error;
  const auto blocks = static_cast<unsigned>(p.select.out.num_rows) * p.blocks_of_row;
  return LaunchOverlappedClusters(kernel, p.blocks_of_row, blocks, kTopPThreads,
                                  static_cast<size_t>(bytes), stream, p);
}

}  // namespace

cudaError_t LaunchTopP(const TopPLaunch& p, cudaStream_t stream) {
  return ForHeadDim(p.select.kv.layout.head_dim, [&]<int kHeadDim>() {
    return p.select.rope.on() ? Launch<kHeadDim, true>(p, stream)
                              : Launch<kHeadDim, false>(p, stream);
  });
}

}  // namespace kvasir::kernels
