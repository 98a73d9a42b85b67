#include "kernels/sparse/reuse/reusing_select.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <span>
#include <vector>

#include "kernels/base/status_macros.h"
#include "kernels/sparse/common/select_common.h"
#include "kernels/sparse/key_logits/key_logits.h"

namespace kvasir::kernels {
namespace {

// Undoes, up to a factor, the rotation of x [head_dim].
void Unrotate(const QueryRotation& rotation, int64_t token, int64_t head_dim, float* x) {
  if (rotation.cos == nullptr) return;
  const int64_t half = head_dim / 2;
  const float* cos = rotation.cos + token * half;
  const float* sin = rotation.sin + token * half;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cos[i] + b * sin[i];
    x[i + half] = b * cos[i] - a * sin[i];
  }
}

// The parts of a cosine. For several concatenated heads they are the sums of the heads' parts.
struct Products {
  double ab = 0, aa = 0, bb = 0;

  Products& operator+=(const Products& more) {
    ab += more.ab;
    aa += more.aa;
    bb += more.bb;
    return *this;
  }
  float Cosine() const { return static_cast<float>(ab / std::sqrt(aa * bb)); }  // NaN: a or b is 0
};

Products Multiply(const float* a, const float* b, int64_t n) {
  Products sum;
  for (int64_t i = 0; i < n; ++i) {
    const double x = static_cast<double>(a[i]), y = static_cast<double>(b[i]);
    sum += {.ab = x * y, .aa = x * x, .bb = y * y};
  }
  return sum;
}

using Cosines = std::array<float, kMaxStages>;  // of this query and the one a stage ran with

// Reuse in one row with memory.
class RowReuse {
 public:
  RowReuse(const Selector& selector, const ReuseRule& rule, const SelectRow& row)
      : selector_(selector), rule_(rule), row_(row), memory_(*row.memory) {}

  void Gate() {
    LoadQueries();
    Cosines cosines;
    for (size_t s = 0; s < memory_.num_stages; ++s) cosines[s] = Compare(s).Cosine();
    Decide(cosines);
  }

  void LoadQueries() {
    if (!rule_.ReadsQueries()) return;
    const int64_t d = row_.p.kv.layout.head_dim;
    for (int64_t g = 0; g < row_.group; ++g) {
      float* query = memory_.query + g * d;
      LoadQuery(row_, 0, g, query);
      Unrotate(row_.p.rotation, row_.tile.first_row, d, query);
    }
  }

  // Meaningless where the row remembers nothing, or under rules that read no queries.
  Products Compare(size_t stage) const {
    return Multiply(memory_.query, memory_.anchor(stage), memory_.query_floats);
  }

  void Decide(const Cosines& cosines) {
    if (MakeHeader(row_.tile, row_.numbers).kind == SelectionHeader::Kind::kAll) {
      memory_.Forget();
      return;
    }
    const int64_t position = row_.tile.first_position;
    memory_.first_stage = FirstStage(position, cosines);
    memory_.position = position;
    for (size_t s = memory_.first_stage; s < memory_.num_stages; ++s) {
      memory_.ran_at[s] = position;
      std::copy_n(memory_.query, memory_.query_floats, memory_.anchor(s));
    }
  }

  void Finish() {
    if (memory_.position != row_.tile.first_position) return;  // rule R2
    memory_.serves() ? Recall() : Remember();
    if (memory_.first_stage == 0) memory_.window_begin = row_.header.window_begin;
    if (rule_.window() == ReuseRule::Window::kGrows) {
      row_.header.window_begin = memory_.window_begin;
    }
    row_.header.reused_stages = static_cast<int32_t>(memory_.first_stage);
  }

 private:
  size_t FirstStage(int64_t position, const Cosines& cosines) const {
    if (StartsAnew(position, memory_.position)) return 0;
    for (size_t s = 0; s < memory_.num_stages; ++s) {
      const StageAge age = {.steps = position - memory_.ran_at[s],
                            .interval = StageInterval(selector_, row_.numbers.reuse, s),
                            .cosine = cosines[s]};
      if (rule_.Refreshes(age, row_.numbers.reuse)) return s;
    }
    return memory_.num_stages;
  }

  void Remember() {
    memory_.count = row_.header.count;
    std::copy_n(row_.list, memory_.count, memory_.list);
  }
  void Recall() {
    row_.header = MakeHeader(row_.tile, row_.numbers);
    row_.header.count = memory_.count;
    row_.header.made_at = memory_.ran_at[memory_.num_stages - 1];
    std::copy_n(memory_.list, memory_.count, row_.list);
  }

  const Selector& selector_;
  const ReuseRule& rule_;
  const SelectRow& row_;
  RowMemory& memory_;
};

// A part of a SelectReusing call in which each memory occurs at most once, so that no row waits for
// what another row leaves.
struct Call {
  const Selector& selector;
  const ReuseRule& rule;
  const SelectParams& params;
  PageSelection& out;
  Executor& executor;

  // Calls step(RowReuse, row) for the rows with memory, on the executor's threads.
  template <typename Step>
  void ForEachMemory(const Step& step) const {
    const auto run = [&](int64_t i, int) {
      const SelectRow row(params, out, i);
      if (row.memory != nullptr) step(RowReuse(selector, rule, row), i);
    };
    executor.ParallelFor(out.num_rows, std::ref(run));
  }
};

// Makes one verdict for all KV heads of a query tile, by the cosine of all query heads of the
// layer. Their products are added in the order of the heads, however many ranks hold them.
absl::Status GateLayer(const Call& call) {
  const int64_t heads = call.params.kv.layout.num_kv_heads;
  const int64_t blocks = std::ssize(call.params.tiles);
  const auto stages = call.selector.RefreshIntervals().size();
  const size_t head_size = static_cast<size_t>(blocks) * stages * 3;
  const auto at = [&](int64_t block, size_t stage) {
    return (static_cast<size_t>(block) * stages + stage) * 3;
  };
  std::vector<double> own(head_size * static_cast<size_t>(heads));
  call.ForEachMemory([&](RowReuse row, int64_t i) {
    row.LoadQueries();
    for (size_t s = 0; s < stages; ++s) {
      const Products products = row.Compare(s);
      double* to = own.data() + static_cast<size_t>(i % heads) * head_size + at(i / heads, s);
      to[0] = products.ab;
      to[1] = products.aa;
      to[2] = products.bb;
    }
  });
  std::span<const double> all = own;
  if (call.params.ranks != nullptr) {
    KVASIR_ASSIGN_OR_RETURN(all, call.params.ranks->Gather(own));
  }
  call.ForEachMemory([&](RowReuse row, int64_t i) {
    Cosines cosines = {};
    for (size_t s = 0; s < stages; ++s) {
      Products sum;
      for (size_t head = 0; head < all.size(); head += head_size) {
        const double* from = all.data() + head + at(i / heads, s);
        sum += {.ab = from[0], .aa = from[1], .bb = from[2]};
      }
      cosines[s] = sum.Cosine();
    }
    row.Decide(cosines);
  });
  return absl::OkStatus();
}

absl::Status SelectOnce(const Call& call) {
  if (call.selector.scope() == Scope::kLayer && call.rule.ReadsQueries()) {
    KVASIR_RETURN_IF_ERROR(GateLayer(call));
  } else {
    call.ForEachMemory([](RowReuse row, int64_t) { row.Gate(); });
  }
  KVASIR_RETURN_IF_ERROR(call.selector.Select(call.params, call.out, call.executor));
  call.ForEachMemory([](RowReuse row, int64_t) { row.Finish(); });
  return absl::OkStatus();
}

// Returns the end of the query tiles from `begin` on that have different memories, or none.
size_t EndOfDifferent(const SelectParams& params, size_t begin) {
  const auto heads = static_cast<size_t>(params.kv.layout.num_kv_heads);
  size_t end = begin + 1;
  while (end < params.tiles.size()) {
    const RowMemory* memory = params.memories[end * heads];
    if (memory != nullptr && memory == params.memories[(end - 1) * heads]) break;
    ++end;
  }
  return end;
}

}  // namespace

int64_t StageInterval(const Selector& selector, const ReuseNumbers& numbers, size_t stage) {
  const std::span<const int64_t> own = selector.RefreshIntervals();
  if (numbers.interval == 0) return own[stage];
  return std::max<int64_t>(1, own[stage] * numbers.interval / own[0]);
}

int64_t ReachTokens(const Selector& selector, const ReuseRule& rule, const ReuseNumbers& numbers) {
  if (rule.window() == ReuseRule::Window::kGrows) return 0;
  const int64_t steps = rule.ServedSteps(StageInterval(selector, numbers, 0), numbers);
  return std::min(steps, kPageTokens) - 1;
}

SelectionMemory::Shape ShapeOf(const MemoryNeeds& needs) {
  return {.num_layers = needs.layout.num_layers,
          .num_kv_heads = needs.layout.num_kv_heads,
          .num_stages = needs.selector.RefreshIntervals().size(),
          .max_entries = needs.selector.MaxEntries(needs.numbers, needs.tokens),
          .max_stage_items = needs.selector.MaxStageItems(needs.numbers, needs.tokens),
          .query_floats = needs.rule.ReadsQueries() ? needs.group * needs.layout.head_dim : 0};
}

absl::StatusOr<std::unique_ptr<SelectionMemory>> MakeSelectionMemory(const MemoryNeeds& needs) {
  return SelectionMemory::Create(ShapeOf(needs));
}

absl::Status SelectReusing(const Selector& selector, const ReuseRule& rule,
                           const SelectParams& params, PageSelection& out, Executor& executor) {
  KVASIR_RETURN_IF_ERROR(CheckSelect("reuse", params, out));
  const int64_t heads = params.kv.layout.num_kv_heads;
  for (size_t begin = 0; begin < params.tiles.size();) {
    const size_t count = EndOfDifferent(params, begin) - begin;
    const int64_t first_row = static_cast<int64_t>(begin) * heads;
    PageSelection rows = out.Rows(first_row, static_cast<int64_t>(count) * heads);
    SelectParams some = params;
    some.tiles = params.tiles.subspan(begin, count);
    some.numbers = params.numbers.subspan(begin, count);
    some.memories =
        params.memories.subspan(static_cast<size_t>(first_row), static_cast<size_t>(rows.num_rows));
    KVASIR_RETURN_IF_ERROR(SelectOnce(
        {.selector = selector, .rule = rule, .params = some, .out = rows, .executor = executor}));
    begin += count;
  }
  return absl::OkStatus();
}

}  // namespace kvasir::kernels
