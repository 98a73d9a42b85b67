// Speed of attention on the GPU: decode and a prefill chunk of 512 queries, dense, over lists, and
// over lists that a method selects in the same call; dense, also a prompt's chunk of 8,192 queries.
// One sequence of the 8B shape (32 query and 8 KV heads of 128). Random KV and digests, up to four
// sets in turn; medians of replays of a CUDA graph. "dense batch of N" is decode of N sequences of
// that many tokens each. "append" writes a chunk's keys and values and rotates its queries
// (append_heads.h); its bytes are those read and written. A method "by interval" is launched in
// every step and selects in some of them, as in the engine; its time is the mean over a refresh
// cycle. peer_attention.py puts the dense rows beside those of others.
//
//   attention_cuda_bench [--rows=TEXT] [--budget=TOKENS] [--window=TOKENS] [--preset=NAME]
//                        [--kv-cache-dtype=DTYPE] [TOKENS ...]
//                                                      default: 4096 32768 131072 1048576
//
//   --rows    only rows of the table whose name contains TEXT
//   --budget  number of selected tokens (2048)
//   --window  number of the last tokens, which every list has (1024)
//   --preset  of infinitehip (3k)
//   --kv-cache-dtype  bfloat16 (default), fp8_e4m3 or int8
#include <algorithm>
#include <cstdio>
#include <cuda_bf16.h>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/append/append_heads_cuda.h"
#include "kernels/attention/attend_cuda.h"
#include "kernels/sparse/infinitehip/infinitehip_cuda.h"
#include "kernels/sparse/quest/quest_cuda.h"
#include "kernels/sparse/tokenselect/tokenselect_cuda.h"
#include "kernels/sparse/top_p/top_p_cuda.h"
#include "tests/bench/attention_cuda_set.cuh"
#include "tests/bench/cuda_timing.h"
#include "tests/bench/kv_dtype.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kMaxSets = 4;
constexpr GroupedPositions kGrouped = {.group_size = 8, .window = 1024};
constexpr int64_t kSetBytes = int64_t{20} << 30;  // of all sets
constexpr int64_t kPromptQueries = 8192;
constexpr int64_t kMostPromptTokens = 131072;
constexpr int64_t kMostBatchTokens = int64_t{2} << 20;

void Attend(Set& set, cudaStream_t stream) {
  if (set.params.q.dim(0) == std::ssize(set.params.tiles)) {  // tiles of one query
    Check(AttendDecode(
        set.params, set.maps, set.workspace.data(),
        {set.arrivals.As<uint32_t>(), static_cast<size_t>(set.params.selection.num_rows)}, stream));
  } else {
    Check(AttendPrefill(set.params, set.maps, stream));
  }
}
std::optional<PreparedMemory> prepared_memory;
void AttendOverPrepared(Set& set, cudaStream_t stream) {
  const auto pages = PlanPreparedPages(set.host_tiles, kv_layout, prepared_memory->bytes);
  Check(AttendPrepared(set.params, pages.value(), *prepared_memory, stream));
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
  const int64_t set_bytes = tokens * kKvHeads * kv_layout.token_bytes();
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
  const double bytes = static_cast<double>(attended_tokens * kKvHeads * kv_layout.token_bytes());
  std::printf("| %s | %lld | %lld | %lld | %.1f | %.2f | %.0f |\n", name,
              static_cast<long long>(num_queries), static_cast<long long>(tokens),
              static_cast<long long>(attended_tokens), microseconds, bytes / microseconds / 1e6,
              products / microseconds / 1e6);
  std::fflush(stdout);
}

// Measures decode of `streams` sequences of `tokens` tokens each, unless they are too many.
void BenchBatch(int64_t streams, int64_t tokens) {
  if (streams * tokens > kMostBatchTokens) return;
  constexpr const char* kName = "dense batch";
  if (std::string_view(kName).find(wanted_rows) == std::string_view::npos) return;
  std::vector<Set> sets;
  const int64_t all_bytes = streams * tokens * kKvHeads * kv_layout.token_bytes();
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
          Check(
              AppendHeads({.heads = heads, .kv = sets[i].params.kv, .tiles = sets[i].params.tiles},
                          &rope, sets[i].params.faults, stream));
        }
      }) /
      static_cast<double>(sets.size());
  constexpr int64_t kQueryColumns = kKvHeads * kGroup * kHeadDim;
  const double bytes = static_cast<double>(
      tokens * ((kColumns + kQueryColumns) * 2 + kKvHeads * kv_layout.token_bytes()));
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

// Returns how many tokens each of the last queries of a context sees, on average.
int64_t SeenTokens(int64_t tokens, int64_t num_queries) { return tokens - (num_queries - 1) / 2; }

// Measures dense chunks of prompts, over prepared pages and over pages where they lie.
void BenchPrompts(int64_t tokens) {
  prepared_memory = Value(PreparedMemory::Create(kv_layout, tokens));
  const auto report_dense = [&](const char* name, Call call, int64_t num_queries, Keys keys) {
    Report(name, call, tokens, num_queries, {}, {}, SeenTokens(tokens, num_queries), 1, keys);
  };
  for (const int64_t num_queries : {int64_t{512}, kPromptQueries}) {
    if (num_queries > tokens || tokens > kMostPromptTokens) continue;
    if (IsQuantized(kv_layout.dtype)) {
      report_dense("dense, prepared", AttendOverPrepared, num_queries, Keys::kRotated);
    }
    report_dense("dense, compact positions, prepared", AttendOverPrepared, num_queries,
                 Keys::kCompact);
  }
  if (kPromptQueries <= tokens && tokens <= kMostPromptTokens) {
    report_dense("dense", Attend, kPromptQueries, Keys::kRotated);
    report_dense("dense, compact positions", Attend, kPromptQueries, Keys::kCompact);
  }
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
  BenchPrompts(tokens);
  for (const int64_t num_queries : {1, 512}) {
    Report("dense", Attend, tokens, num_queries, {}, {}, SeenTokens(tokens, num_queries));
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
    constexpr std::string_view kWindow = "--window=";
    constexpr std::string_view kPreset = "--preset=";
    constexpr std::string_view kDtype = "--kv-cache-dtype=";
    if (std::string_view(argument).starts_with(kRows)) {
      kvasir::kernels::wanted_rows = argument + kRows.size();
    } else if (std::string_view(argument).starts_with(kBudget)) {
      kvasir::kernels::selection_numbers.budget_tokens = std::atoll(argument + kBudget.size());
    } else if (std::string_view(argument).starts_with(kWindow)) {
      kvasir::kernels::selection_numbers.window_tokens = std::atoll(argument + kWindow.size());
    } else if (std::string_view(argument).starts_with(kPreset)) {
      kvasir::kernels::infinitehip_preset = argument + kPreset.size();
    } else if (std::string_view(argument).starts_with(kDtype)) {
      kvasir::kernels::kv_layout.dtype =
          kvasir::kernels::Value(kvasir::kernels::ParseKvDType(argument + kDtype.size()));
    } else {
      lengths.push_back(std::atoll(argument));
    }
  }
  if (lengths.empty()) lengths = {4096, 32768, 131072, 1048576};
  std::printf(
      "| attention | queries | tokens | attended | us | TB/s | TFLOP/s |\n"
      "|---|---|---|---|---|---|---|\n");
  for (const int64_t tokens : lengths) kvasir::kernels::Bench(tokens);
  for (const int64_t tokens : lengths) {
    for (const int64_t streams : {8, 16, 32, 64}) kvasir::kernels::BenchBatch(streams, tokens);
  }
  for (const int64_t tokens : {512, 8192}) kvasir::kernels::BenchAppend(tokens);
}
