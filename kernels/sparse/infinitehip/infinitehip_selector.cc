#include "kernels/sparse/infinitehip/infinitehip_selector.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/sparse/common/ranking.h"
#include "kernels/sparse/common/select_common.h"
#include "kernels/sparse/infinitehip/chunk_scores.h"

namespace kvasir::kernels {
namespace {

using Stage = InfiniteHipSelector::Stage;
using Preset = InfiniteHipSelector::Preset;
using Probe = InfiniteHipSelector::Probe;

constexpr Preset kPresets[] = {
    {"3k", {{{256, 32768, 4}, {32, 8192, 4}, {8, 0, 1}}}, {16, 8, 4}},
    {"3k-fast", {{{256, 32768, 4}, {32, 8192, 4}, {8, 0, 1}}}, {32, 16, 8}},
    {"3k-flash", {{{256, 32768, 4}, {32, 8192, 4}, {8, 0, 1}}}, {96, 24, 8}},
    {"5k", {{{64, 32768, 4}, {32, 16384, 4}, {16, 0, 1}}}, {16, 8, 4}},
};
constexpr struct {
  absl::string_view name;
  Probe probe;
} kProbes[] = {{"digest", Probe::kDigest}, {"centre", Probe::kCentre}, {"first", Probe::kFirst}};

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Most chunks that a stage of a row may have.
int64_t MaxChunks(const Preset& preset, const QueryTile& tile, const PolicyNumbers& numbers) {
  int64_t chunks = tile.first_position / preset.stages[0].chunk_tokens + 1;
  for (size_t s = 0; s + 1 < preset.stages.size(); ++s) {
    const Stage& stage = preset.stages[s];
    chunks = std::max(chunks, stage.KeptChunks(numbers.budget_tokens) * stage.chunk_tokens /
                                  preset.stages[s + 1].chunk_tokens);
  }
  return chunks;
}

// Adds the positions of all placings to params.rope.
void ReservePlacings(const SelectParams& p, const Preset& preset, Executor& executor) {
  if (p.rope == nullptr) return;
  int64_t last = 0;
  for (size_t i = 0; i < p.tiles.size(); ++i) {
    if (MakeHeader(p.tiles[i], p.numbers[i]).kind == SelectionHeader::Kind::kAll) continue;
    last = std::max(last, p.numbers[i].window_tokens + MaxChunks(preset, p.tiles[i], p.numbers[i]));
  }
  p.rope->Reserve(last + 1, executor);
}

ChunkScores::Sizes SizesOf(const SelectParams& p, const Preset& preset) {
  ChunkScores::Sizes sizes;
  for (size_t i = 0; i < p.tiles.size(); ++i) {
    sizes.query_rows = std::max(sizes.query_rows, p.tiles[i].num_rows);
    sizes.context = std::max(sizes.context, p.tiles[i].first_position);
    sizes.chunks = std::max(sizes.chunks, MaxChunks(preset, p.tiles[i], p.numbers[i]));
  }
  return sizes;
}

// The chunks of a selection in progress.
struct ChunkMemory {
  ChunkMemory(ScratchPieces& pieces, int64_t chunks)
      : begins(pieces.Take<int64_t>(chunks)),
        next_begins(pieces.Take<int64_t>(chunks)),
        scores(pieces.Take<float>(chunks)),
        ranked(pieces.Take<Ranked>(chunks)) {}

  int64_t* begins;
  int64_t* next_begins;
  float* scores;
  Ranked* ranked;
};

// The stages in one row with candidates, or at layer scope in one query tile, given its first row.
class Pruning {
 public:
  Pruning(const SelectRow& row, const Preset& preset, ChunkMemory& memory)
      : row_(row), preset_(preset), memory_(memory) {}

  // score(chunks, stage, scores) returns a Status.
  template <typename Score>
  absl::Status Run(const Score& score) {
    const size_t first = row_.memory == nullptr ? 0 : row_.memory->first_stage;
    first == 0 ? TakeAllChunks() : Recall(first - 1);
    for (size_t s = first; s < preset_.stages.size(); ++s) {
      if (s > 0) Split(preset_.stages[s - 1].chunk_tokens, preset_.stages[s].chunk_tokens);
      KVASIR_RETURN_IF_ERROR(Keep(s, score));
      if (row_.memory != nullptr && s + 1 < preset_.stages.size()) Remember(s);
    }
    const int64_t block = preset_.stages.back().chunk_tokens;
    ListWriter writer(row_.header, row_.list);
    for (int64_t j = 0; j < num_chunks_; ++j) {
      const int64_t begin = memory_.begins[j];
      writer.Add(begin, begin + block, memory_.scores[j]);
    }
    return absl::OkStatus();
  }

 private:
  void TakeAllChunks() {
    num_chunks_ = preset_.grid().Count(row_.header, row_.numbers);
    for (int64_t j = 0; j < num_chunks_; ++j) {
      memory_.begins[j] = row_.header.sink_end + j * preset_.stages[0].chunk_tokens;
    }
  }

  // Remember and Recall store and load the chunks that a stage left.
  void Remember(size_t stage) {
    RowMemory::StageItems& left = row_.memory->stages[stage];
    left.count = num_chunks_;
    std::copy_n(memory_.begins, num_chunks_, left.items);
  }
  void Recall(size_t stage) {
    const RowMemory::StageItems& left = row_.memory->stages[stage];
    num_chunks_ = left.count;
    std::copy_n(left.items, num_chunks_, memory_.begins);
  }

  void Split(int64_t chunk, int64_t part) {
    int64_t count = 0;
    for (int64_t j = 0; j < num_chunks_; ++j) {
      for (int64_t at = 0; at < chunk; at += part) {
        memory_.next_begins[count++] = memory_.begins[j] + at;
      }
    }
    std::swap(memory_.begins, memory_.next_begins);
    num_chunks_ = count;
  }

  template <typename Score>
  absl::Status Keep(size_t s, const Score& score) {
    const Stage& stage = preset_.stages[s];
    const int64_t count = stage.KeptChunks(row_.numbers.budget_tokens);
    if (num_chunks_ <= count) {
      std::fill_n(memory_.scores, num_chunks_, 0.0f);
      return absl::OkStatus();
    }
    const ChunkList chunks = {
        .count = num_chunks_, .tokens = stage.chunk_tokens, .begins = memory_.begins};
    KVASIR_RETURN_IF_ERROR(score(chunks, s, memory_.scores));
    for (int64_t j = 0; j < num_chunks_; ++j) {
      memory_.ranked[j] = Ranked(memory_.scores[j], j);
    }
    KeepBest({memory_.ranked, static_cast<size_t>(num_chunks_)}, count);
    for (int64_t j = 0; j < count; ++j) {  // ascending, so nothing still to be read is overwritten
      memory_.begins[j] = memory_.begins[memory_.ranked[j].item()];
      memory_.scores[j] = memory_.ranked[j].score();
    }
    num_chunks_ = count;
    return absl::OkStatus();
  }

  const SelectRow& row_;
  const Preset& preset_;
  ChunkMemory& memory_;
  int64_t num_chunks_ = 0;
};

// Makes the header. Returns whether there is something to choose from.
bool Begin(const SelectRow& row, const Preset& preset) {
  row.header = MakeHeader(row.tile, row.numbers);
  return preset.grid().Count(row.header, row.numbers) > 0;
}

// One row's part of a stage's scores, for both scopes.
struct RowScores {
  const Preset& preset;
  Probe probe;

  void operator()(const SelectRow& row, const ChunkScores::Memory& memory, const ChunkList& chunks,
                  size_t stage, float* scores) const {
    ChunkScores(row, probe, row.numbers.window_tokens - preset.overlap(), memory)
        .Score(chunks, preset.stages[stage].query_stride, stage == 0, scores);
  }
};

// Working memory of one thread of a Select call at group scope.
struct ThreadMemory {
  ThreadMemory(ScratchPieces& pieces, const SelectParams& p, const ChunkScores::Sizes& sizes)
      : scores(pieces, p, sizes), chunks(pieces, sizes.chunks) {}
  ChunkScores::Memory scores;
  ChunkMemory chunks;
};

// Selects at layer scope, one query tile at a time. Its KV heads score in parallel, and the best of
// their scores is a chunk's.
class LayerSelection {
 public:
  LayerSelection(const SelectParams& p, const PageSelection& out, const RowScores& row_scores,
                 Executor& executor)
      : p_(p),
        out_(out),
        row_scores_(row_scores),
        executor_(executor),
        heads_(p.kv.layout.num_kv_heads),
        sizes_(SizesOf(p, row_scores.preset)) {}

  absl::Status Run() {
    KVASIR_RETURN_IF_ERROR(LayOut());
    for (int64_t block = 0; block < std::ssize(p_.tiles); ++block) {
      const int64_t first_row = block * heads_;
      const PageSelection rows = out_.Rows(first_row, heads_);
      const SelectRow first(p_, out_, first_row);
      if (!IsToRun(first)) continue;
      if (Begin(first, row_scores_.preset)) {
        ScratchPieces pieces(shared_);
        ChunkMemory chunks(pieces, sizes_.chunks);
        KVASIR_RETURN_IF_ERROR(Pruning(first, row_scores_.preset, chunks)
                                   .Run([&](const ChunkList& list, size_t stage, float* scores) {
                                     return Score(first_row, list, stage, scores);
                                   }));
      }
      ShareWithinBlock(rows);
    }
    return absl::OkStatus();
  }

 private:
  absl::Status LayOut() {
    ScratchPieces threads(nullptr), shared(nullptr);
    ChunkScores::Memory(threads, p_, sizes_);
    ChunkMemory(shared, sizes_.chunks);
    const int64_t shared_bytes = shared.bytes();
    shared.Take<float>(heads_ * sizes_.chunks);
    thread_bytes_ = threads.bytes();
    KVASIR_ASSIGN_OR_RETURN(
        shared_, p_.scratch->Reserve(shared.bytes() + thread_bytes_ * executor_.num_threads()));
    head_scores_ = reinterpret_cast<float*>(shared_ + shared_bytes);
    threads_ = shared_ + shared.bytes();
    return absl::OkStatus();
  }

  absl::Status Score(int64_t first_row, const ChunkList& chunks, size_t stage, float* scores) {
    const auto score_head = [&](int64_t head, int thread) {
      ScratchPieces pieces(threads_ + thread_bytes_ * thread);
      const ChunkScores::Memory memory(pieces, p_, sizes_);
      row_scores_(SelectRow(p_, out_, first_row + head), memory, chunks, stage,
                  head_scores_ + head * chunks.count);
    };
    executor_.ParallelFor(heads_, std::ref(score_head));
    std::copy_n(head_scores_, chunks.count, scores);
    for (int64_t head = 1; head < heads_; ++head) {
      const float* of_head = head_scores_ + head * chunks.count;
      for (int64_t j = 0; j < chunks.count; ++j) scores[j] = std::max(scores[j], of_head[j]);
    }
    if (p_.ranks == nullptr) return absl::OkStatus();
    return p_.ranks->Max({scores, static_cast<size_t>(chunks.count)});
  }

  const SelectParams& p_;
  const PageSelection& out_;
  const RowScores& row_scores_;
  Executor& executor_;
  const int64_t heads_;
  const ChunkScores::Sizes sizes_;
  int64_t thread_bytes_ = 0;
  std::byte* shared_ = nullptr;   // of the query tile: ChunkMemory
  float* head_scores_ = nullptr;  // [KV heads, chunks]
  std::byte* threads_ = nullptr;  // of each thread: ChunkScores::Memory
};

template <typename Entry, size_t kCount>
absl::StatusOr<const Entry*> Find(const Entry (&entries)[kCount], const MethodOption& option) {
  std::string known;
  for (const Entry& entry : entries) {
    if (entry.name == option.value) return &entry;
    absl::StrAppend(&known, known.empty() ? "" : ", ", entry.name);
  }
  return absl::InvalidArgumentError(absl::StrCat("infinitehip: ", option.name, " '", option.value,
                                                 "' is unknown; there are ", known));
}

}  // namespace

absl::StatusOr<const Preset*> InfiniteHipSelector::FindPreset(absl::string_view name) {
  return Find(kPresets, {.name = "preset", .value = std::string(name)});
}

absl::StatusOr<InfiniteHipSelector::Options> InfiniteHipSelector::Parse(
    const MethodOptions& options) {
  Options parsed = {.preset = &kPresets[0]};
  for (const MethodOption& option : options) {
    if (option.name == "preset") {
      KVASIR_ASSIGN_OR_RETURN(parsed.preset, FindPreset(option.value));
    } else if (option.name == "probe") {
      KVASIR_ASSIGN_OR_RETURN(const auto* found, Find(kProbes, option));
      parsed.probe = found->probe;
    } else if (option.name == "scope") {
      KVASIR_ASSIGN_OR_RETURN(parsed.scope, ScopeNamed("infinitehip", option.value));
    } else {
      return absl::InvalidArgumentError(absl::StrCat("infinitehip has no option '", option.name,
                                                     "'; its options are preset, probe, scope"));
    }
  }
  return parsed;
}

absl::StatusOr<std::unique_ptr<Selector>> InfiniteHipSelector::Create(
    const MethodOptions& options) {
  KVASIR_ASSIGN_OR_RETURN(const Options parsed, Parse(options));
  return std::unique_ptr<Selector>(
      new InfiniteHipSelector(*parsed.preset, parsed.probe, parsed.scope));
}

// Kernels on the GPU judge chunks by digests alone.
GpuSupport InfiniteHipSelector::SupportsGpu() const {
  GpuSupport support = {.runs = true, .reuses = true};
  if (probe_ == Probe::kDigest) return support;
  const auto* const named = std::find_if(std::begin(kProbes), std::end(kProbes),
                                         [&](const auto& known) { return known.probe == probe_; });
  support.options = absl::UnimplementedError(
      absl::StrCat("the probe of infinitehip is ", named->name, "; it must be digest"));
  return support;
}

int64_t InfiniteHipSelector::MinWindowTokens() const {
  return preset_.stages[0].chunk_tokens + preset_.overlap();
}

int64_t InfiniteHipSelector::MaxEntries(const PolicyNumbers& numbers, int64_t tokens) const {
  const Stage& last = preset_.stages.back();
  // A chunk may cross into a second page.
  return std::min(2 * last.KeptChunks(numbers.budget_tokens), CeilPages(tokens));
}

int64_t InfiniteHipSelector::MaxStageItems(const PolicyNumbers& numbers, int64_t tokens) const {
  int64_t items = 0;
  for (size_t s = 0; s + 1 < preset_.stages.size(); ++s) {
    const Stage& stage = preset_.stages[s];
    items = std::max(items, std::min(stage.KeptChunks(numbers.budget_tokens),
                                     CeilDiv(tokens, stage.chunk_tokens)));
  }
  return items;
}

absl::Status InfiniteHipSelector::Check(const SelectParams& p, const PageSelection& out) const {
  KVASIR_RETURN_IF_ERROR(CheckSelect("infinitehip", p, out));
  KVASIR_RETURN_IF_ERROR(CheckCapacity("infinitehip", *this, p, out));
  if (probe_ == Probe::kDigest && (p.kv.bounds == nullptr || p.kv.key_codes == nullptr)) {
    return absl::FailedPreconditionError(
        "infinitehip: probe 'digest' needs page bounds and key codes, which this KV does not have; "
        "declare the policy before the KV store is made");
  }
  for (size_t i = 0; i < p.tiles.size(); ++i) {
    const bool lists = MakeHeader(p.tiles[i], p.numbers[i]).kind == SelectionHeader::Kind::kList;
    if (!lists || p.numbers[i].window_tokens >= MinWindowTokens()) continue;
    return absl::InvalidArgumentError(absl::StrCat("infinitehip: a window of ",
                                                   p.numbers[i].window_tokens, " tokens; preset '",
                                                   preset_.name, "' needs ", MinWindowTokens()));
  }
  return absl::OkStatus();
}

absl::Status InfiniteHipSelector::Select(const SelectParams& p, PageSelection& out,
                                         Executor& executor) const {
  KVASIR_RETURN_IF_ERROR(Check(p, out));
  ReservePlacings(p, preset_, executor);
  const RowScores row_scores = {.preset = preset_, .probe = probe_};
  if (scope_ == Scope::kLayer) return LayerSelection(p, out, row_scores, executor).Run();
  const ChunkScores::Sizes sizes = SizesOf(p, preset_);
  return WithThreadMemory(
      p, out, executor, [&](ScratchPieces& pieces) { return ThreadMemory(pieces, p, sizes); },
      [&](const SelectRow& row, ThreadMemory& memory) {
        if (!Begin(row, preset_)) return;
        const absl::Status status =
            Pruning(row, preset_, memory.chunks)
                .Run([&](const ChunkList& chunks, size_t stage, float* scores) {
                  row_scores(row, memory.scores, chunks, stage, scores);
                  return absl::OkStatus();
                });
        KVASIR_CHECK(status.ok());  // only ranks can fail
      });
}

}  // namespace kvasir::kernels
