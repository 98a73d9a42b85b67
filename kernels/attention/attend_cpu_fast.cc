// Walks the selections, hands pages to the tile functions, and merges segments in order. One item
// of work is a (query tile, KV head), or one segment of it where rows are few and contexts long:
//
//   plan (calling thread) -> items (all threads) -> merge of split rows (all threads)
//
// A row has the same bits either way: a segment's state comes from its pages alone, and the same
// function merges segments in reading order. Scratch holds per-thread memory, then the plan, then
// the states of split segments.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <optional>
#include <span>

#include "kernels/attention/attend_cpu.h"
#include "kernels/attention/attend_plan.h"
#include "kernels/attention/attention_state.h"
#include "kernels/attention/early_end.h"
#include "kernels/attention/reading_order.h"
#include "kernels/attention/tile/attend_tile.h"
#include "kernels/base/cpu_isa.h"
#include "kernels/base/dtype.h"
#include "kernels/base/status_macros.h"
#include "kernels/paged/compact_positions.h"
#include "kernels/paged/quantized_kv.h"

namespace kvasir::kernels {
namespace {

static_assert(kTileTokens == kPageTokens);

constexpr IsaForms<AddPageFn> kAddFloat32 = {.neon = KVASIR_ON_ARM(AddPageNeonFloat32),
                                             .avx2 = KVASIR_ON_X86(AddPageAvx2Float32),
                                             .avx512 = KVASIR_ON_X86(AddPageAvx512Float32)};
constexpr IsaForms<AddPageFn> kAddBFloat16 = {.neon = KVASIR_ON_ARM(AddPageNeonBFloat16),
                                              .avx2 = KVASIR_ON_X86(AddPageAvx2BFloat16),
                                              .avx512 = KVASIR_ON_X86(AddPageAvx512BFloat16)};

// Memory of one thread, for one item at a time.
struct ThreadMemory {
  ThreadMemory(ScratchPieces& pieces, const ItemSize& largest, const AttendContext& c)
      : ThreadMemory(pieces, largest, c.group, c.head_dim, c.p.grouped.on() ? largest.rows : 0,
                     DequantizedPageBytes(c.p.kv.layout)) {}
  ThreadMemory(ScratchPieces& pieces, const ItemSize& largest, int64_t group, int64_t head_dim,
               int64_t far_rows, int64_t element_bytes)
      : steps(pieces.Take<PageStep>(largest.pages)),
        elements(pieces.Take<std::byte>(element_bytes)),
        q(pieces.Take<float>(largest.rows * head_dim)),
        far_q(pieces.Take<float>(far_rows * head_dim)),
        query(pieces.Take<std::byte>(4 * head_dim)),
        rotated_keys(pieces.Take<std::byte>(4 * kPageTokens * head_dim)),
        max(pieces.Take<float>(largest.rows)),
        sums(pieces.Take<float>(largest.rows * kTileLanes)),
        out(pieces.Take<float>(largest.rows * head_dim)),
        total{.states = pieces.Take<AttentionState>(largest.rows),
              .out = pieces.Take<float>(largest.rows * head_dim)},
        workspace(pieces.Take<std::byte>(TileWorkspaceBytes(head_dim))),
        closed(pieces.Take<PartialOutput>(group)),
        open(pieces.Take<PartialOutput>(group)),
        ending(pieces.Take<std::byte>(largest.ending_bytes)) {}

  PageStep* steps;      // of the item
  std::byte* elements;  // of a page of quantized KV
  float* q;             // float or bfloat16
  float* far_q;         // with grouped positions: the queries as far keys see them
  std::byte* query;     // one query, to be rotated
  std::byte* rotated_keys;
  // The open segment.
  float* max;
  float* sums;
  float* out;
  // The segments before it.
  RowStates total;
  std::byte* workspace;
  // For the row's terminator, which reads `closed` and `open` and writes `ending`.
  PartialOutput* closed;  // [group], of `total`
  PartialOutput* open;    // [group], of the open segment
  std::byte* ending;
};

void ClearStates(const RowStates& to, int64_t rows, int64_t head_dim) {
  std::fill_n(to.states, rows, AttentionState{});
  std::fill_n(to.out, rows * head_dim, 0.0f);
}

void MergeStates(const RowStates& total, const RowStates& segment, int64_t rows, int64_t head_dim) {
  for (int64_t r = 0; r < rows; ++r) {
    const MergeWeights weights = MergeInto(total.states[r], segment.states[r]);
    float* left = total.out + r * head_dim;
    const float* right = segment.out + r * head_dim;
    for (int64_t i = 0; i < head_dim; ++i) {
      left[i] = weights.left * left[i] + weights.right * right[i];
    }
  }
}

template <typename Activation>
void StoreOut(const float* from, float sum, int64_t head_dim, Activation* to) {
  for (int64_t i = 0; i < head_dim; ++i) {
    to[i] = static_cast<Activation>(sum == 0 ? 0.0f : from[i] / sum);
  }
}

void StoreRow(const AttendContext& c, int64_t row, const RowStates& total) {
  for (int64_t r = 0; r < c.rows(row); ++r) {
    const int64_t q_row = c.first_q_row(row) + r / c.group * c.heads + r % c.group;
    const float* from = total.out + r * c.head_dim;
    const float sum = total.states[r].sum;
    if (c.p.out.dtype() == DType::kFloat32) {
      StoreOut(from, sum, c.head_dim, c.p.out.As<float>() + q_row * c.head_dim);
    } else {
      StoreOut(from, sum, c.head_dim, c.p.out.As<BFloat16>() + q_row * c.head_dim);
    }
    if (!c.p.lse.empty()) c.p.lse.As<float>()[q_row] = LogSumExp(total.states[r]);
  }
}

// Computes one item in a thread's memory.
class ItemRun {
 public:
  ItemRun(const AttendContext& c, const AttendItem& item, const ThreadMemory& memory)
      : c_(c), item_(item), memory_(memory), num_rows_(c.rows(item.row)) {
    SelectedPages walk = c.Walk(item.row);
    int64_t end_page = c.last_position(item.row) / kPageTokens + 1;
    if (item.segment != kWholeRow) {
      walk.SkipTo(FirstPageOf(item.segment));
      end_page = FirstPageOf(item.segment + 1);
    }
    num_steps_ = ListSteps(walk, end_page, memory.steps);
    if (!c.MayEndEarly(item.row)) return;
    early_end_.emplace(c.p, item.row, std::span(memory.steps, static_cast<size_t>(num_steps_)),
                       memory.ending);
    if (early_end_->never()) early_end_.reset();
  }

  void Run() {
    LoadQueries();
    if (item_.segment != kWholeRow) {
      RunSegment();
      StoreSegment(item_.partial);
      return;
    }
    ClearStates(memory_.total, num_rows_, c_.head_dim);
    while (next_ < num_steps_) {
      RunSegment();
      MergeSegment();
    }
    StoreRow(c_, item_.row, memory_.total);
  }

 private:
  // position_of maps a query's own position to the one it is read at.
  template <typename Activation, typename To, typename PositionOf>
  void CopyQueries(const PositionOf& position_of, To* to) {
    for (int64_t r = 0; r < num_rows_; ++r) {
      const int64_t q_row = c_.first_q_row(item_.row) + r / c_.group * c_.heads + r % c_.group;
      const Activation* from = c_.p.q.As<const Activation>() + q_row * c_.head_dim;
      if (c_.p.rope != nullptr) {
        auto* query = reinterpret_cast<Activation*>(memory_.query);
        std::copy_n(from, c_.head_dim, query);
        const int64_t position = c_.tile(item_.row).first_position + r / c_.group;
        c_.p.rope->Rotate(query, c_.p.q.dtype(), 1, position_of(position));
        from = query;
      }
      std::transform(from, from + c_.head_dim, to + r * c_.head_dim,
                     [](Activation x) { return static_cast<To>(x); });
    }
  }
  template <typename PositionOf>
  void LoadQueries(const PositionOf& position_of, float* to) {
    if (c_.bf16_queries) {
      CopyQueries<BFloat16>(position_of, reinterpret_cast<BFloat16*>(to));
    } else if (c_.p.q.dtype() == DType::kFloat32) {
      CopyQueries<float>(position_of, to);
    } else {
      CopyQueries<BFloat16>(position_of, to);
    }
  }
  void LoadQueries() {
    const GroupedPositions& grouped = c_.p.grouped;
    if (!grouped.on()) {
      LoadQueries([&](int64_t position) { return QueryPosition(header(), position); }, memory_.q);
      return;
    }
    LoadQueries([](int64_t position) { return position; }, memory_.q);
    LoadQueries([&](int64_t position) { return grouped.FarQuery(position); }, memory_.far_q);
  }

  // Returns null when the page is absent.
  const std::byte* Read(const PageStep& step) const {
    const QueryTile& tile = c_.tile(item_.row);
    const int64_t bytes = std::popcount(step.mask) * c_.p.kv.layout.token_bytes();
    const PageRef ref =
        c_.p.kv.Read(tile.slot, step.page, c_.p.layer, item_.row % c_.kv_heads(), bytes);
    if (ref.tier() != PageTier::kAbsent) return ref.page();
    std::atomic_ref<uint8_t>(c_.p.faults[static_cast<size_t>(tile.slot)])
        .store(1, std::memory_order_relaxed);
    return nullptr;
  }
  // Returns the next page, across segments too, so that it is prefetched while the current one is
  // computed. Null at the item's end, and where the row may end: skipped pages are not prefetched.
  const std::byte* PageToCome() const {
    if (next_ == num_steps_) return nullptr;
    if (early_end_.has_value() && early_end_->MaySkip(next_)) return nullptr;
    const QueryTile& tile = c_.tile(item_.row);
    return c_.p.kv.Peek(tile.slot, memory_.steps[next_].page, c_.p.layer, item_.row % c_.kv_heads())
        .page();
  }

  // Adds the pages of the next segment.
  void RunSegment() {
    std::fill_n(memory_.max, num_rows_, -std::numeric_limits<float>::infinity());
    std::fill_n(memory_.sums, num_rows_ * kTileLanes, 0.0f);
    std::fill_n(memory_.out, num_rows_ * c_.head_dim, 0.0f);
    const int64_t segment = memory_.steps[next_].segment;
    while (next_ < num_steps_ && memory_.steps[next_].segment == segment) {
      const PageStep& step = memory_.steps[next_++];
      if (const std::byte* page = Read(step)) AddPage(step, page, PageToCome());
      if (early_end_.has_value()) next_ = early_end_->After(Progress(), next_);
    }
  }

  RowProgress Progress() const {
    const size_t rows = static_cast<size_t>(num_rows_);
    for (int64_t r = 0; r < num_rows_; ++r) {
      memory_.closed[r] = {.state = memory_.total.states[r],
                           .out = memory_.total.out + r * c_.head_dim};
      memory_.open[r] = {.state = SegmentState(r), .out = memory_.out + r * c_.head_dim};
    }
    return {.closed = {memory_.closed, rows}, .open = {memory_.open, rows}};
  }

  const SelectionHeader& header() const { return c_.p.selection.header(item_.row); }

  void AddPage(const PageStep& step, const std::byte* page, const std::byte* next) {
    const QueryTile& tile = c_.tile(item_.row);
    const KvLayout& layout = c_.p.kv.layout;
    const PageElements elements = ReadPage(layout, page, step.mask, next, memory_.elements);
    // Decoding has prefetched the next page of quantized KV.
    TilePage key_tile = {.keys = elements.keys,
                         .values = elements.values,
                         .next_page = IsQuantized(layout.dtype) ? nullptr : next,
                         .mask = step.mask,
                         .first_query = tile.first_position - step.page * kPageTokens};
    if (c_.p.grouped.on()) return AddGroupedPage(step, key_tile);
    if (c_.p.rope != nullptr) {
      RotateKeys(*c_.p.rope, layout, header(),
                 {.keys = elements.keys, .page = step.page, .mask = step.mask, .entry = step.entry},
                 memory_.rotated_keys);
      key_tile.keys = memory_.rotated_keys;
      key_tile.next_page = nullptr;  // tile functions assume that its keys and values follow these
    }
    AddWindow(step, key_tile);
  }

  // Adds what each query sees of a page. Where the layer's window begins in the page, that differs
  // from query to query.
  void AddWindow(const PageStep& step, const TilePage& key_tile) {
    const QueryTile& tile = c_.tile(item_.row);
    const auto before = [&](int64_t query) {
      return BeforeWindow(c_.p.window_tokens, step.page, tile.first_position + query);
    };
    if ((step.mask & before(tile.num_rows - 1)) == 0) {
      return Add(key_tile, memory_.q, 0, tile.num_rows);
    }
    for (int64_t query = 0; query < tile.num_rows; ++query) {
      TilePage seen = key_tile;
      seen.mask &= ~before(query);
      seen.first_query += query;
      seen.next_page = nullptr;
      if (seen.mask != 0) Add(seen, memory_.q, query, 1);
    }
  }

  // Adds far keys first, then near ones: each query sees the keys of its own side.
  void AddGroupedPage(const PageStep& step, TilePage key_tile) {
    const GroupedPositions& grouped = c_.p.grouped;
    const QueryTile& tile = c_.tile(item_.row);
    const auto far_of = [&](int64_t query) {
      return step.mask & grouped.FarMask(step.page, tile.first_position + query);
    };
    const auto cached = [&, keys = key_tile.keys](uint64_t mask) {
      return PageKeys{.keys = keys, .page = step.page, .mask = mask};
    };
    const uint64_t far_of_some = far_of(tile.num_rows - 1), far_of_all = far_of(0);
    key_tile.keys = memory_.rotated_keys;
    key_tile.next_page = nullptr;
    if (far_of_some != 0) {
      RotateFarKeys(*c_.p.rope, c_.p.kv.layout, grouped, cached(far_of_some), memory_.rotated_keys);
      TilePage far = key_tile;
      far.mask = far_of_some;
      far.first_query -= grouped.window;  // sees keys up to the start of the neighbourhood
      const int64_t first = std::max<int64_t>(0, -far.first_query);  // first query with a far key
      far.first_query += first;
      Add(far, memory_.far_q, first, tile.num_rows - first);
    }
    if (far_of_all == step.mask) return;
    RotateNearKeys(*c_.p.rope, c_.p.kv.layout, cached(step.mask & ~far_of_all),
                   memory_.rotated_keys);
    if (far_of_some == far_of_all) {
      key_tile.mask &= ~far_of_all;
      Add(key_tile, memory_.q, 0, tile.num_rows);
      return;
    }
    // The start of the neighbourhood differs from query to query.
    for (int64_t query = 0; query < tile.num_rows; ++query) {
      TilePage near = key_tile;
      near.mask &= ~far_of(query);
      near.first_query += query;
      if (near.mask != 0) Add(near, memory_.q, query, 1);
    }
  }

  // Adds what queries [begin, begin + count) of the item's queries `q` see of a page.
  void Add(const TilePage& page, float* q, int64_t begin, int64_t count) {
    const int64_t row = begin * c_.group;
    const int64_t query_bytes = c_.head_dim * (c_.bf16_queries ? 2 : 4);
    c_.add_page({.head_dim = c_.head_dim, .scale = c_.p.scale, .workspace = memory_.workspace},
                page,
                {.q = reinterpret_cast<std::byte*>(q) + row * query_bytes,
                 .num_queries = count,
                 .group = c_.group,
                 .max = memory_.max + row,
                 .sums = memory_.sums + row * kTileLanes,
                 .out = memory_.out + row * c_.head_dim});
  }

  AttentionState SegmentState(int64_t r) const {
    AttentionState state = {.max = memory_.max[r]};
    for (int64_t lane = 0; lane < kTileLanes; ++lane) {
      state.sum += memory_.sums[r * kTileLanes + lane];
    }
    return state;
  }
  void StoreSegment(const RowStates& to) const {
    for (int64_t r = 0; r < num_rows_; ++r) to.states[r] = SegmentState(r);
    std::copy_n(memory_.out, num_rows_ * c_.head_dim, to.out);
  }
  void MergeSegment() const {
    for (int64_t r = 0; r < num_rows_; ++r) {
      AttentionState state = SegmentState(r);
      MergeStates({.states = memory_.total.states + r, .out = memory_.total.out + r * c_.head_dim},
                  {.states = &state, .out = memory_.out + r * c_.head_dim}, 1, c_.head_dim);
    }
  }

  const AttendContext& c_;
  const AttendItem& item_;
  const ThreadMemory& memory_;
  const int64_t num_rows_;
  int64_t num_steps_ = 0;
  int64_t next_ = 0;  // step
  std::optional<EarlyEnd> early_end_;
};

void MergeSplitRow(const AttendContext& c, const SplitRow& split, const AttendItem* items,
                   const ThreadMemory& memory) {
  const int64_t rows = c.rows(split.row);
  ClearStates(memory.total, rows, c.head_dim);
  for (int64_t i = 0; i < split.num_items; ++i) {
    MergeStates(memory.total, items[split.first_item + i].partial, rows, c.head_dim);
  }
  StoreRow(c, split.row, memory.total);
}

absl::Status Run(const AttendContext& c, Executor& executor) {
  const AttendPlanner planner(c, executor.num_threads());
  const PlanSize size = planner.Size();
  ScratchPieces counted_thread(nullptr);
  ThreadMemory(counted_thread, size.largest, c);
  ScratchPieces counted_plan(nullptr);
  PlanMemory(counted_plan, size, c.head_dim);
  const int64_t threads_bytes = counted_thread.bytes() * executor.num_threads();
  KVASIR_ASSIGN_OR_RETURN(std::byte* const memory,
                          c.p.scratch->Reserve(threads_bytes + counted_plan.bytes()));

  ScratchPieces plan_pieces(memory + threads_bytes);
  const PlanMemory plan(plan_pieces, size, c.head_dim);
  planner.Fill(plan);
  const auto memory_of = [&](int thread) {
    ScratchPieces pieces(memory + counted_thread.bytes() * thread);
    return ThreadMemory(pieces, size.largest, c);
  };
  // std::ref, because a std::function of a larger closure would allocate.
  const auto run_item = [&](int64_t i, int thread) {
    ItemRun(c, plan.items[i], memory_of(thread)).Run();
  };
  executor.ParallelFor(size.items, std::ref(run_item));
  if (size.split_rows == 0) return absl::OkStatus();
  const auto merge_row = [&](int64_t i, int thread) {
    MergeSplitRow(c, plan.split_rows[i], plan.items, memory_of(thread));
  };
  executor.ParallelFor(size.split_rows, std::ref(merge_row));
  return absl::OkStatus();
}

}  // namespace

absl::Status AttendFast(const AttendParams& p, CpuIsa isa, Executor& executor) {
  if (p.tiles.empty()) return absl::OkStatus();
  std::fill(p.unread.begin(), p.unread.end(), UnreadPages{});
  const bool bf16_kv = p.kv.layout.element_dtype() == DType::kBFloat16;
  const bool pairs = isa == CpuIsa::kAvx512Bf16 && bf16_kv && p.q.dtype() == DType::kBFloat16;
  const int64_t heads = p.q.dim(1);
  const AttendContext context = {.p = p,
                                 .add_page = pairs     ? KVASIR_ON_X86(AddPageAvx512Bf16Pairs)
                                             : bf16_kv ? FormFor(isa, kAddBFloat16)
                                                       : FormFor(isa, kAddFloat32),
                                 .bf16_queries = pairs,
                                 .heads = heads,
                                 .group = heads / p.kv.layout.num_kv_heads,
                                 .head_dim = p.kv.layout.head_dim};
  return Run(context, executor);
}

bool HasFastAttend(CpuIsa isa, int64_t head_dim) {
  return head_dim % kTileHeadDimStep == 0 && FormFor(isa, kAddFloat32) != nullptr;
}

}  // namespace kvasir::kernels
