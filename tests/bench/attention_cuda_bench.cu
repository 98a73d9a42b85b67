// Speed of attention on the GPU: decode and a prefill chunk of 512 queries, dense, over lists, and
// over lists that a method selects in the same call. One sequence of the 8B shape (32 query and 8
// KV heads of 128). Random KV and digests, up to four sets in turn; medians of replays of a CUDA
// graph. "batch of N" is decode of N sequences of that many tokens each. "append" writes a chunk's
// keys and values and rotates its queries (append_heads.h); its bytes are those read and written. A
// method "by interval" is launched in every step and selects in some of them, as in the engine; its
// time is the mean over a refresh cycle.
//
//   attention_cuda_bench [--rows=TEXT] [--budget=TOKENS] [TOKENS ...]
//                                                      default: 4096 32768 131072 1048576
//
//   --rows    only rows of the table whose name contains TEXT
//   --budget  number of selected tokens (2048)
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cuda_bf16.h>
#include <optional>
#include <random>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/append/append_heads_cuda.h"
#include "kernels/attention/attend_cuda.h"
#include "kernels/paged/compact_positions_cuda.h"
#include "kernels/rope/rope_positions_cuda.h"
#include "kernels/sparse/common/selection_header.h"
#include "kernels/sparse/infinitehip/infinitehip_cuda.h"
#include "kernels/sparse/quest/quest_cuda.h"
#include "kernels/sparse/tokenselect/tokenselect_cuda.h"
#include "kernels/sparse/top_p/top_p_cuda.h"
#include "tests/bench/cuda_timing.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kKvHeads = 8;
constexpr int64_t kGroup = 4;
constexpr int64_t kHeadDim = 128;
constexpr int64_t kMaxSets = 4;
constexpr GroupedPositions kGrouped = {.group_size = 8, .window = 1024};
// Sink, window and budget of all selections here. Constant once main has read its arguments.
SelectionNumbers selection_numbers = {
    .sink_tokens = 128, .window_tokens = 1024, .budget_tokens = 2048, .top_p = 0.95f};
constexpr int64_t kListCapacity = 2048;  // entries of one token
constexpr int64_t kCycle = 16;           // steps of a refresh cycle
constexpr int64_t kInterval = 8;         // steps between two runs of a method's first stage
constexpr int64_t kSetBytes = int64_t{20} << 30;  // of all sets

// Returns the most tokens in a row's list: sink, window and a budget in whole pages.
int64_t MaxListTokens() {
  return selection_numbers.sink_tokens + selection_numbers.window_tokens +
         CeilPages(selection_numbers.budget_tokens) * kPageTokens;
}

// Fills in roughly normal values from a counter: sums of four uniform ones.
__global__ void FillRandom(__nv_bfloat16* values, int64_t count, uint64_t seed) {
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

// One sequence with its own pages, in a random order of memory.
struct Set {
  DeviceBuffer pages, table, block_rows, q, out, workspace, arrivals, blocks, headers, entries,
      faults;
  DeviceBuffer bounds, bounds_table, codes, codes_table, numbers, work, pruning;
  DeviceBuffer step_blocks, remembered, lists, stage_items, memories, staged_memories;
  InfiniteHipCuda hip = {.preset = Value(InfiniteHipSelector::FindPreset("3k")),
                         .max_budget_tokens = selection_numbers.budget_tokens};
  KvTensorMaps maps;
  std::optional<CudaRopePositions> rope;
  CudaAttendParams params;
  CudaSelectParams select;

  // Makes query tiles of `block_queries` queries at the end of the context.
  Set(int64_t tokens, int64_t num_queries, int64_t block_queries, const SelectionHeader& header,
      const std::vector<SelectionEntry>& list, uint64_t seed) {
    const KvLayout layout = {
        .num_layers = 1, .num_kv_heads = kKvHeads, .head_dim = kHeadDim, .dtype = DType::kBFloat16};
    const int64_t num_blocks = (tokens + kPageTokens - 1) / kPageTokens;
    const int64_t bytes = num_blocks * layout.block_bytes();
    pages = Value(DeviceBuffer::Allocate(bytes));
    FillRandom<<<1024, 256>>>(pages.As<__nv_bfloat16>(), bytes / 2, seed);
    std::vector<int32_t> rows(static_cast<size_t>(num_blocks));
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int32_t>(i);
    std::shuffle(rows.begin(), rows.end(), std::mt19937_64(seed));
    block_rows = Upload(rows);
    std::vector<PageRef> refs;
    for (int64_t i = 0; i < num_blocks * kKvHeads; ++i) {
      refs.emplace_back(pages.data() + i * layout.page_bytes(), PageTier::kDevice);
    }
    table = Upload(refs);
    maps = Value(MakeKvTensorMaps(layout, {.base = pages.data(), .bytes = bytes}, {}));
    const int64_t values = num_queries * kKvHeads * kGroup * kHeadDim;
    const int64_t rows_of_selection = num_queries / block_queries * kKvHeads;
    q = Value(DeviceBuffer::Allocate(values * 2));
    FillRandom<<<64, 256>>>(q.As<__nv_bfloat16>(), values, seed + 77);
    out = Value(DeviceBuffer::Allocate(values * 2));
    workspace = Value(DeviceBuffer::Allocate(
        AttendDecodeWorkspaceBytes(layout, num_queries / block_queries, kGroup)));
    const int64_t arrival_bytes =
        num_queries / block_queries * layout.num_kv_heads * static_cast<int64_t>(sizeof(uint32_t));
    arrivals = Value(DeviceBuffer::Allocate(arrival_bytes));
    Check(CudaStatus(cudaMemset(arrivals.data(), 0, static_cast<size_t>(arrival_bytes)),
                     "clearing arrivals"));
    std::vector<QueryBlock> query_blocks;
    for (int64_t first = 0; first < num_queries; first += block_queries) {
      query_blocks.push_back({.slot = 0,
                              .first_row = first,
                              .num_rows = block_queries,
                              .first_position = tokens - num_queries + first});
    }
    blocks = Upload(query_blocks);
    std::vector<QueryBlock> of_steps;
    for (int64_t step = 1 - kCycle; step <= 0; ++step) {
      for (QueryBlock block : query_blocks) {
        block.first_position += step;
        of_steps.push_back(block);
      }
    }
    step_blocks = Upload(of_steps);
    headers = Upload(std::vector<SelectionHeader>(static_cast<size_t>(rows_of_selection), header));
    std::vector<SelectionEntry> entry_list;
    for (int64_t row = 0; row < rows_of_selection; ++row) {
      entry_list.insert(entry_list.end(), list.begin(), list.end());
      entry_list.resize(static_cast<size_t>((row + 1) * kListCapacity));
    }
    entries = Upload(entry_list);
    faults = Upload(std::vector<uint8_t>{0});
    const int64_t bounds_bytes = layout.block_bounds_bytes();
    bounds = Value(DeviceBuffer::Allocate(num_blocks * bounds_bytes));
    FillRandom<<<1024, 256>>>(bounds.As<__nv_bfloat16>(), num_blocks * bounds_bytes / 2, seed + 7);
    std::vector<std::byte*> of_rows;
    for (int64_t i = 0; i < num_blocks; ++i) of_rows.push_back(bounds.data() + i * bounds_bytes);
    bounds_table = Upload(of_rows);
    const int64_t code_bytes = layout.block_key_codes_bytes();
    codes = Value(DeviceBuffer::Allocate(num_blocks * code_bytes));
    FillRandom<<<1024, 256>>>(codes.As<__nv_bfloat16>(), num_blocks * code_bytes / 2, seed + 9);
    std::vector<std::byte*> codes_of_rows;
    for (int64_t i = 0; i < num_blocks; ++i) codes_of_rows.push_back(codes.data() + i * code_bytes);
    codes_table = Upload(codes_of_rows);
    numbers = Upload(std::vector<SelectionNumbers>(query_blocks.size(), selection_numbers));
    const auto tensor = [&](const DeviceBuffer& buffer) {
      return TensorView(buffer.data(), DType::kBFloat16, {num_queries, kKvHeads * kGroup, kHeadDim},
                        Device::kCuda);
    };
    params = {{.q = tensor(q),
               .out = tensor(out),
               .kv = {.layout = layout,
                      .block_rows = block_rows.As<int32_t>(),
                      .num_slots = 1,
                      .max_blocks_per_slot = num_blocks,
                      .pages = table.As<PageRef>(),
                      .bounds = bounds_table.As<std::byte*>(),
                      .key_codes = codes_table.As<std::byte*>()},
               .scale = 0.0883883476f,
               .blocks = {blocks.As<QueryBlock>(), query_blocks.size()},
               .selection = {.headers = headers.As<SelectionHeader>(),
                             .entries = entries.As<SelectionEntry>(),
                             .num_rows = rows_of_selection,
                             .capacity = kListCapacity},
               .faults = {faults.As<uint8_t>(), 1}}};
    const int64_t num_query_blocks = std::ssize(query_blocks);
    work = Value(DeviceBuffer::Allocate(
        std::max({QuestWorkspaceBytes(params.kv, num_query_blocks),
                  TokenSelectWorkspaceBytes(params.kv, kGroup, num_query_blocks),
                  InfiniteHipWorkspaceBytes(hip, params.kv, num_query_blocks)})));
    pruning = Value(DeviceBuffer::Allocate(
        TopPWorkspaceBytes(layout, kGroup, num_query_blocks, kListCapacity, MaxListTokens())));
    select = {{.q = params.q,
               .kv = params.kv,
               .scale = params.scale,
               .blocks = params.blocks,
               .numbers = {numbers.As<SelectionNumbers>(), query_blocks.size()},
               .faults = params.faults}};
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
    std::vector<QueryBlock> last;
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
    params.blocks = {blocks.As<QueryBlock>(), last.size()};
    params.faults = {faults.As<uint8_t>(), last.size()};
  }

  // For one decoding sequence: makes `step` of a cycle the next step.
  void StandAt(int64_t step, const DeviceBuffer& memory) {
    const size_t count = params.blocks.size();
    params.blocks = {step_blocks.As<QueryBlock>() + step * std::ssize(params.blocks), count};
    select.blocks = params.blocks;
    select.device_memories = {memory.As<DeviceSelectionMemory>(), count};
  }
};

void Attend(Set& set, cudaStream_t stream) {
  if (set.params.q.dim(0) == std::ssize(set.params.blocks)) {  // tiles of one query
    Check(AttendDecode(
        set.params, set.maps, set.workspace.data(),
        {set.arrivals.As<uint32_t>(), static_cast<size_t>(set.params.selection.num_rows)}, stream));
  } else {
    Check(AttendPrefill(set.params, set.maps, stream));
  }
}
void Quest(Set& set, cudaStream_t stream) {
  Check(SelectQuest(QuestScore::kEstimate, set.select, set.params.selection, set.work.data(),
                    stream));
}
template <Scope kScope>
void TokenSelect(Set& set, cudaStream_t stream) {
  Check(SelectTokens(kScope, set.select, set.params.selection, set.work.data(), stream));
}
void InfiniteHip(Set& set, cudaStream_t stream) {
  Check(SelectInfiniteHip(set.hip, set.select, set.params.selection, set.work.data(), stream));
}
void TopP(Set& set, cudaStream_t stream) {
  Check(PruneTopP(set.select, set.params.selection, MaxListTokens(), set.pruning.data(), stream));
}
template <auto kFirst, auto kSecond>
void Both(Set& set, cudaStream_t stream) {
  kFirst(set, stream);
  kSecond(set, stream);
}
// Runs kCycle steps, each of which remembers the selections of earlier steps.
template <auto kSelect, auto kMemories = &Set::memories>
void ByInterval(Set& set, cudaStream_t stream) {
  for (int64_t step = 0; step < kCycle; ++step) {
    set.StandAt(step, set.*kMemories);
    kSelect(set, stream);
    Attend(set, stream);
  }
}
using Call = void (*)(Set& set, cudaStream_t stream);

enum class Keys { kRotated, kCompact, kGrouped };

// Text that the names of the wanted rows contain.
std::string_view wanted_rows;

void Report(const char* name, Call call, int64_t tokens, int64_t num_queries,
            const SelectionHeader& header, const std::vector<SelectionEntry>& list,
            int64_t attended_tokens, int64_t steps = 1, Keys keys = Keys::kRotated) {
  if (std::string_view(name).find(wanted_rows) == std::string_view::npos) return;
  const int64_t set_bytes = tokens * kKvHeads * kHeadDim * 4;
  const int64_t num_sets = std::clamp<int64_t>(kSetBytes / set_bytes, 1, kMaxSets);
  const int64_t block_queries = std::min(num_queries, kPageTokens);
  std::vector<Set> sets;
  for (int64_t i = 0; i < num_sets; ++i) {
    sets.emplace_back(tokens, num_queries, block_queries, header, list,
                      static_cast<uint64_t>(i + 1));
    if (keys == Keys::kRotated) continue;
    sets.back().Place(tokens, keys == Keys::kGrouped ? kGrouped : GroupedPositions{});
  }
  const double microseconds = MedianMicroseconds([&](cudaStream_t stream) {
                                for (Set& set : sets) call(set, stream);
                              }) /
                              static_cast<double>(num_sets * steps);
  const double heads = kKvHeads * kGroup;
  const double products =
      4.0 * static_cast<double>(num_queries * attended_tokens * kHeadDim) * heads;
  const double bytes = static_cast<double>(attended_tokens * kKvHeads * kHeadDim * 4);
  std::printf("| %s | %lld | %lld | %lld | %.1f | %.2f | %.0f |\n", name,
              static_cast<long long>(num_queries), static_cast<long long>(tokens),
              static_cast<long long>(attended_tokens), microseconds, bytes / microseconds / 1e6,
              products / microseconds / 1e6);
  std::fflush(stdout);
}

// Measures decode of `streams` sequences of `tokens` tokens each.
void BenchBatch(int64_t streams, int64_t tokens) {
  constexpr const char* kName = "batch";
  if (std::string_view(kName).find(wanted_rows) == std::string_view::npos) return;
  std::vector<Set> sets;
  const int64_t all_bytes = streams * tokens * kKvHeads * kHeadDim * 4;
  const int64_t num_sets = std::clamp<int64_t>(kSetBytes / 4 / all_bytes, 1, kMaxSets);
  for (int64_t i = 0; i < num_sets; ++i) {
    sets.emplace_back(streams * tokens, streams, 1, SelectionHeader{},
                      std::vector<SelectionEntry>{}, static_cast<uint64_t>(i + 1));
    sets.back().Split(streams);
  }
  const double microseconds = MedianMicroseconds([&](cudaStream_t stream) {
                                for (Set& set : sets) Attend(set, stream);
                              }) /
                              static_cast<double>(num_sets);
  std::printf("| %s of %lld | 1 | %lld | %lld | %.1f | %.2f | 0 |\n", kName,
              static_cast<long long>(streams), static_cast<long long>(tokens),
              static_cast<long long>(tokens), microseconds,
              static_cast<double>(all_bytes) / microseconds / 1e6);
  std::fflush(stdout);
}

// Measures a prompt's chunk at the begin of its sequence, with rotated heads and bounds.
void BenchAppend(int64_t tokens) {
  constexpr const char* kName = "append";
  if (std::string_view(kName).find(wanted_rows) == std::string_view::npos) return;
  constexpr int64_t kColumns = (kKvHeads * kGroup + 2 * kKvHeads) * kHeadDim;
  std::vector<Set> sets;
  std::vector<DeviceBuffer> qkv;
  for (int64_t i = 0; i < kMaxSets; ++i) {
    sets.emplace_back(tokens, tokens, kPageTokens, SelectionHeader{}, std::vector<SelectionEntry>{},
                      static_cast<uint64_t>(i + 1));
    sets.back().params.kv.key_codes = nullptr;  // as under most policies
    qkv.push_back(Value(DeviceBuffer::Allocate(tokens * kColumns * 2)));
    FillRandom<<<1024, 256>>>(qkv.back().As<__nv_bfloat16>(), tokens * kColumns,
                              static_cast<uint64_t>(i));
  }
  const DeviceBuffer angles =
      Upload(std::vector<float>(static_cast<size_t>(tokens * kHeadDim / 2), 0.6f));
  const TensorView angle(angles.data(), DType::kFloat32, {tokens, kHeadDim / 2}, Device::kCuda);
  const RopeAngles rope = {.cos = angle, .sin = angle};
  const double microseconds =
      MedianMicroseconds([&](cudaStream_t stream) {
        for (size_t i = 0; i < sets.size(); ++i) {
          LayerHeads heads;
          heads.qkv =
              TensorView(qkv[i].data(), DType::kBFloat16, {tokens, kColumns}, Device::kCuda);
          heads.q = sets[i].params.q;
          Check(AppendHeads(
              {.heads = heads, .kv = sets[i].params.kv, .blocks = sets[i].params.blocks}, &rope,
              sets[i].params.faults, stream));
        }
      }) /
      static_cast<double>(sets.size());
  const double bytes = static_cast<double>(2 * tokens * kColumns * 2);
  std::printf("| %s | %lld | %lld | 0 | %.1f | %.2f | 0 |\n", kName, static_cast<long long>(tokens),
              static_cast<long long>(tokens), microseconds, bytes / microseconds / 1e6);
}

// Returns a list of the budget in runs of `run_tokens` tokens, adjacent or `stride` apart, each in
// its own page, the pages far from each other.
std::vector<SelectionEntry> ListOfRuns(int64_t tokens, int64_t run_tokens, int64_t stride = 1) {
  const int64_t first_page = CeilPages(selection_numbers.sink_tokens);
  const int64_t candidates = (tokens - selection_numbers.window_tokens) / kPageTokens - first_page;
  const int64_t count = std::min(candidates, selection_numbers.budget_tokens / run_tokens);
  std::vector<SelectionEntry> list;
  for (int64_t i = 0; i < count; ++i) {
    uint64_t mask = 0;
    const int64_t begin = i * 8 % (kPageTokens - (run_tokens - 1) * stride);
    for (int64_t t = 0; t < run_tokens; ++t) mask |= uint64_t{1} << (begin + t * stride);
    list.push_back({.page = first_page + i * candidates / count, .chosen = mask, .live = mask});
  }
  return list;
}

void Bench(int64_t tokens) {
  // The budget in whole pages, sink and window.
  const SelectionHeader header = {
      .kind = SelectionHeader::Kind::kList,
      .count = static_cast<int32_t>(CeilPages(selection_numbers.budget_tokens)),
      .sink_end = selection_numbers.sink_tokens,
      .window_begin = tokens - selection_numbers.window_tokens,
      .query_position = tokens - 1};
  const std::vector<SelectionEntry> list = ListOfRuns(tokens, kPageTokens);
  const int64_t attended = selection_numbers.sink_tokens + selection_numbers.budget_tokens +
                           selection_numbers.window_tokens;
  for (const int64_t num_queries : {1, 512}) {
    Report("dense", Attend, tokens, num_queries, {}, {}, tokens);
    Report("dense, compact positions", Attend, tokens, num_queries, {}, {}, tokens, 1,
           Keys::kCompact);
    Report("dense, grouped positions", Attend, tokens, num_queries, {}, {}, tokens, 1,
           Keys::kGrouped);
    if (tokens < 8192) continue;
    const auto report = [&](const char* name, Call call, int64_t steps = 1) {
      Report(name, call, tokens, num_queries, header, list, attended, steps);
    };
    report("list", Attend);
    Report("list, compact positions", Attend, tokens, num_queries, header, list, attended, 1,
           Keys::kCompact);
    Report("list, grouped positions", Attend, tokens, num_queries, header, list, attended, 1,
           Keys::kGrouped);
    if (num_queries == 1) {
      const auto report_runs = [&](const char* name, const std::vector<SelectionEntry>& runs) {
        SelectionHeader of_runs = header;
        of_runs.count = static_cast<int32_t>(runs.size());
        Report(name, Attend, tokens, num_queries, of_runs, runs, attended);
      };
      report_runs("list of runs of 8 tokens", ListOfRuns(tokens, 8));
      report_runs("list of scattered tokens", ListOfRuns(tokens, 4, 11));
    }
    report("quest alone", Quest);
    report("quest and list", Both<Quest, Attend>);
    report("tokenselect alone", TokenSelect<Scope::kKvGroup>);
    report("tokenselect of layers alone", TokenSelect<Scope::kLayer>);
    report("tokenselect and list", Both<TokenSelect<Scope::kKvGroup>, Attend>);
    report("infinitehip alone", InfiniteHip);
    report("infinitehip and list", Both<InfiniteHip, Attend>);
    report("top_p alone", TopP);  // does not change rows of several queries
    if (num_queries > 1) continue;
    report("quest and top_p", Both<Quest, TopP>);
    report("infinitehip and top_p", Both<InfiniteHip, TopP>);
    report("quest, top_p and list", Both<Both<Quest, TopP>, Attend>);
    report("infinitehip, top_p and list", Both<Both<InfiniteHip, TopP>, Attend>);
    report("quest and list by interval", ByInterval<Quest>, kCycle);
    report("quest, top_p and list by interval", ByInterval<Both<Quest, TopP>>, kCycle);
    report("tokenselect and list by interval", ByInterval<TokenSelect<Scope::kKvGroup>>, kCycle);
    report("infinitehip and list by interval", ByInterval<InfiniteHip, &Set::staged_memories>,
           kCycle);
    report("infinitehip, top_p and list by interval",
           ByInterval<Both<InfiniteHip, TopP>, &Set::staged_memories>, kCycle);
  }
}

}  // namespace
}  // namespace kvasir::kernels

int main(int argc, char** argv) {
  std::vector<int64_t> lengths;
  for (const char* argument : std::span(argv, static_cast<size_t>(argc)).subspan(1)) {
    constexpr std::string_view kRows = "--rows=";
    constexpr std::string_view kBudget = "--budget=";
    if (std::string_view(argument).starts_with(kRows)) {
      kvasir::kernels::wanted_rows = argument + kRows.size();
    } else if (std::string_view(argument).starts_with(kBudget)) {
      kvasir::kernels::selection_numbers.budget_tokens = std::atoll(argument + kBudget.size());
    } else {
      lengths.push_back(std::atoll(argument));
    }
  }
  if (lengths.empty()) lengths = {4096, 32768, 131072, 1048576};
  std::printf(
      "| attention | queries | tokens | attended | us | TB/s | TFLOP/s |\n"
      "|---|---|---|---|---|---|---|\n");
  for (const int64_t tokens : lengths) kvasir::kernels::Bench(tokens);
  for (const int64_t tokens : {256, 1024, 8192}) {
    for (const int64_t streams : {1, 8, 64}) kvasir::kernels::BenchBatch(streams, tokens);
  }
  for (const int64_t tokens : {512, 8192}) kvasir::kernels::BenchAppend(tokens);
}
