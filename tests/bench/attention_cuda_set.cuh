// The data of attention_cuda_bench: one sequence of the 8B shape in device
// memory, with query tiles, a selection, workspaces, and what earlier steps left to remember.
#pragma once

#include <algorithm>
#include <cmath>
#include <cuda_bf16.h>
#include <optional>
#include <random>
#include <vector>

#include "kernels/attention/attend_cuda.h"
#include "kernels/paged/compact_positions_cuda.h"
#include "kernels/rope/rope_positions_cuda.h"
#include "kernels/sparse/infinitehip/infinitehip_cuda.h"
#include "kernels/sparse/quest/quest_cuda.h"
#include "kernels/sparse/tokenselect/tokenselect_cuda.h"
#include "kernels/sparse/top_p/top_p_cuda.h"
#include "tests/bench/cuda_timing.h"

namespace kvasir::kernels {

inline constexpr int64_t kKvHeads = 8;
inline constexpr int64_t kGroup = 4;
inline constexpr int64_t kHeadDim = 128;
// Layout of the KV, sink, window and budget of all selections here, and infinitehip's preset.
// Constant once main has read its arguments.
inline KvLayout kv_layout = {
    .num_layers = 1, .num_kv_heads = kKvHeads, .head_dim = kHeadDim, .dtype = DType::kBFloat16};
inline PolicyNumbers selection_numbers = {
    .sink_tokens = 128, .window_tokens = 1024, .budget_tokens = 2048, .top_p = 0.95f};
inline const char* infinitehip_preset = "3k";
inline constexpr int64_t kListCapacity = 2048;  // entries of one token
inline constexpr int64_t kCycle = 16;           // steps of a refresh cycle
inline constexpr int64_t kInterval = 8;         // steps between two runs of a method's first stage

// Returns the most tokens in a row's list: sink, window and a budget in whole pages.
inline int64_t MaxListTokens() {
  return selection_numbers.sink_tokens + selection_numbers.window_tokens +
         CeilPages(selection_numbers.budget_tokens) * kPageTokens;
}

// Fills in roughly normal values from a counter: sums of four uniform ones.
inline __global__ void FillRandom(__nv_bfloat16* values, int64_t count, uint64_t seed) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += stride) {
    uint64_t x = (static_cast<uint64_t>(i) + seed) * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 31)) * 0xbf58476d1ce4e5b9ull;
    x ^= x >> 29;
    float sum = 0;
    for (int part = 0; part < 4; ++part) sum += static_cast<float>(x >> (16 * part) & 0xffff);
    values[i] = __float2bfloat16_rn((sum / 65536.0f - 2.0f) * 1.7f);
  }
}

// Gives all tokens of quantized KV one scale, by a CTA for each page.
inline __global__ void FillScales(std::byte* pages, const __grid_constant__ KvLayout layout) {
  pages[blockIdx.x * layout.page_bytes() + layout.scales_offset() + threadIdx.x] = std::byte{119};
}

// One sequence with its own pages, in a random order of memory.
struct Set {
  DeviceBuffer pages, table, block_extents, q, out, workspace, arrivals, blocks, headers, entries,
      faults;
  DeviceBuffer bounds, bounds_table, codes, codes_table, numbers, work, pruning;
  DeviceBuffer step_blocks, remembered, lists, stage_items, memories, staged_memories;
  InfiniteHipCuda hip = {.preset = Value(InfiniteHipSelector::FindPreset(infinitehip_preset)),
                         .max_budget_tokens = selection_numbers.budget_tokens};
  KvTensorMaps maps;
  std::vector<QueryTile> host_tiles;  // as in `blocks`
  std::optional<CudaRopePositions> rope;
  CudaAttendParams params;
  CudaSelectParams select;

  // Makes query tiles of `block_queries` queries at the end of the context.
  Set(int64_t tokens, int64_t num_queries, int64_t block_queries, const SelectionHeader& header,
      const std::vector<SelectionEntry>& list, uint64_t seed) {
    const int64_t num_blocks = CeilPages(tokens);
    MakePages(num_blocks, seed);
    MakeDigests(num_blocks, seed);
    MakeQueries(num_queries, seed);
    MakeQueryTiles(tokens, num_queries, block_queries);
    const int64_t num_query_tiles = num_queries / block_queries;
    MakeSelection(num_query_tiles * kKvHeads, header, list);
    const auto count = static_cast<size_t>(num_query_tiles);
    const auto tensor = [&](const DeviceBuffer& buffer) {
      return TensorView(buffer.data(), DType::kBFloat16, {num_queries, kKvHeads * kGroup, kHeadDim},
                        Device::kCuda);
    };
    params = {{.q = tensor(q),
               .out = tensor(out),
               .kv = {.layout = kv_layout,
                      .block_extents = block_extents.As<int32_t>(),
                      .num_slots = 1,
                      .max_blocks_per_slot = num_blocks,
                      .pages = table.As<PageRef>(),
                      .bounds = bounds_table.As<std::byte*>(),
                      .key_codes = codes_table.As<std::byte*>()},
               .scale = 0.0883883476f,
               .tiles = {blocks.As<QueryTile>(), count},
               .selection = {.headers = headers.As<SelectionHeader>(),
                             .entries = entries.As<SelectionEntry>(),
                             .num_rows = num_query_tiles * kKvHeads,
                             .capacity = kListCapacity},
               .faults = {faults.As<uint8_t>(), 1}}};
    select = {{.q = params.q,
               .kv = params.kv,
               .scale = params.scale,
               .tiles = params.tiles,
               .numbers = {numbers.As<PolicyNumbers>(), count},
               .faults = params.faults}};
    MakeWorkspaces(num_query_tiles);
    MakeMemories();
  }

  // Makes the keys count as cached unrotated from now on.
  void Place(int64_t tokens, const GroupedPositions& grouped) {
    std::vector<double> inv_freq;
    for (int64_t i = 0; i < kHeadDim / 2; ++i) {
      inv_freq.push_back(std::pow(5e5, -2.0 * static_cast<double>(i) / kHeadDim));
    }
    rope.emplace(Value(CudaRopePositions::Create(inv_freq, 1)));
    Check(rope->Reserve(tokens, nullptr));
    Check(AssignPositions(params.selection, nullptr));
    params.device_rope = rope->view();
    params.grouped = grouped;
  }

  // Divides the set into `streams` decoding sequences, each with its share of the tokens.
  void Split(int64_t streams) {
    const int64_t blocks_each = params.kv.max_blocks_per_slot / streams;
    std::vector<QueryTile> last;
    for (int64_t i = 0; i < streams; ++i) {
      last.push_back({.slot = i,
                      .first_row = i,
                      .num_rows = 1,
                      .first_position = blocks_each * kPageTokens - 1});
    }
    blocks = Upload(last);
    faults = Upload(std::vector<uint8_t>(static_cast<size_t>(streams)));
    params.kv.num_slots = streams;
    params.kv.max_blocks_per_slot = blocks_each;
    params.tiles = {blocks.As<QueryTile>(), last.size()};
    params.faults = {faults.As<uint8_t>(), last.size()};
  }

  // For one decoding sequence: makes `step` of a cycle the next step.
  void StandAt(int64_t step, const DeviceBuffer& memory) {
    const size_t count = params.tiles.size();
    params.tiles = {step_blocks.As<QueryTile>() + step * std::ssize(params.tiles), count};
    select.tiles = params.tiles;
    select.device_memories = {memory.As<DeviceSelectionMemory>(), count};
  }

 private:
  void MakePages(int64_t num_blocks, uint64_t seed) {
    const int64_t bytes = num_blocks * kv_layout.block_bytes();
    pages = Value(DeviceBuffer::Allocate(bytes));
    FillRandom<<<1024, 256>>>(pages.As<__nv_bfloat16>(), bytes / 2, seed);
    if (IsQuantized(kv_layout.dtype)) {
      FillScales<<<static_cast<unsigned>(num_blocks * kKvHeads), 2 * kPageTokens>>>(pages.data(),
                                                                                    kv_layout);
    }
    std::vector<int32_t> rows(static_cast<size_t>(num_blocks));
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int32_t>(i);
    std::shuffle(rows.begin(), rows.end(), std::mt19937_64(seed));
    block_extents = Upload(rows);
    std::vector<PageRef> refs;
    for (int64_t i = 0; i < num_blocks * kKvHeads; ++i) {
      refs.emplace_back(pages.data() + i * kv_layout.page_bytes(), PageTier::kDevice);
    }
    table = Upload(refs);
    maps = Value(MakeKvTensorMaps(kv_layout, {.base = pages.data(), .bytes = bytes}, {}));
  }

  // Makes bounds and key codes of the blocks.
  void MakeDigests(int64_t num_blocks, uint64_t seed) {
    const auto make = [&](int64_t block_bytes, uint64_t own_seed, DeviceBuffer& digests) {
      digests = Value(DeviceBuffer::Allocate(num_blocks * block_bytes));
      FillRandom<<<1024, 256>>>(digests.As<__nv_bfloat16>(), num_blocks * block_bytes / 2,
                                own_seed);
      std::vector<std::byte*> of_rows;
      for (int64_t i = 0; i < num_blocks; ++i) of_rows.push_back(digests.data() + i * block_bytes);
      return Upload(of_rows);
    };
    bounds_table = make(kv_layout.block_bounds_bytes(), seed + 7, bounds);
    codes_table = make(kv_layout.block_key_codes_bytes(), seed + 9, codes);
  }

  void MakeQueries(int64_t num_queries, uint64_t seed) {
    const int64_t values = num_queries * kKvHeads * kGroup * kHeadDim;
    q = Value(DeviceBuffer::Allocate(values * 2));
    FillRandom<<<64, 256>>>(q.As<__nv_bfloat16>(), values, seed + 77);
    out = Value(DeviceBuffer::Allocate(values * 2));
  }

  // Makes the query tiles of the last step, and of all steps of a refresh cycle that ends with it.
  void MakeQueryTiles(int64_t tokens, int64_t num_queries, int64_t block_queries) {
    std::vector<QueryTile> query_tiles;
    for (int64_t first = 0; first < num_queries; first += block_queries) {
      query_tiles.push_back({.slot = 0,
                             .first_row = first,
                             .num_rows = block_queries,
                             .first_position = tokens - num_queries + first});
    }
    blocks = Upload(query_tiles);
    host_tiles = query_tiles;
    std::vector<QueryTile> of_steps;
    for (int64_t step = 1 - kCycle; step <= 0; ++step) {
      for (QueryTile tile : query_tiles) {
        tile.first_position += step;
        of_steps.push_back(tile);
      }
    }
    step_blocks = Upload(of_steps);
    numbers = Upload(std::vector<PolicyNumbers>(query_tiles.size(), selection_numbers));
    faults = Upload(std::vector<uint8_t>{0});
  }

  // Gives all rows the same list.
  void MakeSelection(int64_t num_rows, const SelectionHeader& header,
                     const std::vector<SelectionEntry>& list) {
    headers = Upload(std::vector<SelectionHeader>(static_cast<size_t>(num_rows), header));
    std::vector<SelectionEntry> entry_list;
    for (int64_t row = 0; row < num_rows; ++row) {
      entry_list.insert(entry_list.end(), list.begin(), list.end());
      entry_list.resize(static_cast<size_t>((row + 1) * kListCapacity));
    }
    entries = Upload(entry_list);
  }

  void MakeWorkspaces(int64_t num_query_tiles) {
    workspace = Value(
        DeviceBuffer::Allocate(AttendDecodeWorkspaceBytes(kv_layout, num_query_tiles, kGroup)));
    const int64_t arrival_bytes =
        num_query_tiles * kKvHeads * static_cast<int64_t>(sizeof(uint32_t));
    arrivals = Value(DeviceBuffer::Allocate(arrival_bytes));
    Check(CudaStatus(cudaMemset(arrivals.data(), 0, static_cast<size_t>(arrival_bytes)),
                     "clearing arrivals"));
    work = Value(DeviceBuffer::Allocate(
        std::max({QuestWorkspaceBytes(params.kv, num_query_tiles),
                  TokenSelectWorkspaceBytes(Scope::kKvGroup, params.kv, kGroup, num_query_tiles),
                  TokenSelectWorkspaceBytes(Scope::kLayer, params.kv, kGroup, num_query_tiles),
                  InfiniteHipWorkspaceBytes(hip, params.kv, num_query_tiles)})));
    pruning = Value(DeviceBuffer::Allocate(
        TopPWorkspaceBytes(kv_layout, kGroup, num_query_tiles, kListCapacity, MaxListTokens())));
  }

  // Makes what a decoding sequence remembers of a selection, without and with infinitehip's stages.
  void MakeMemories() {
    remembered = Upload(std::vector<RememberedRow>(kKvHeads));
    lists = Value(DeviceBuffer::Allocate(kKvHeads * kListCapacity *
                                         static_cast<int64_t>(sizeof(SelectionEntry))));
    DeviceSelectionMemory memory = {.rows = remembered.As<RememberedRow>(),
                                    .lists = lists.As<SelectionEntry>(),
                                    .capacity = kListCapacity,
                                    .intervals = {kInterval}};
    memories = Upload(std::vector{memory});
    constexpr int64_t kStages = InfiniteHipSelector::kStages;
    const int64_t items = hip.MaxLaterChunks();
    stage_items = Value(DeviceBuffer::Allocate(kKvHeads * (kStages - 1) * items *
                                               static_cast<int64_t>(sizeof(int32_t))));
    memory.stage_items = stage_items.As<int32_t>();
    memory.max_items = items;
    memory.num_stages = kStages;
    const auto& own = hip.preset->refresh_intervals;
    for (size_t s = 0; s < own.size(); ++s) memory.intervals[s] = own[s] * kInterval / own[0];
    staged_memories = Upload(std::vector{memory});
  }
};

}  // namespace kvasir::kernels
