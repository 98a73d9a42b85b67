// The parts that all CPU selectors share: the checks of Select, iteration over rows, and writing of
// lists (selection_header.h has the row's header). Called by selectors and by the code that sets up
// attention. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/attention/terminator.h"
#include "kernels/base/executor.h"
#include "kernels/base/scratch.h"
#include "kernels/base/status_macros.h"
#include "kernels/paged/page_selection.h"
#include "kernels/sparse/common/selection_header.h"
#include "kernels/sparse/common/selection_memory.h"
#include "kernels/sparse/common/stages.h"

namespace kvasir::kernels {

// Parses "group" or "layer". INVALID_ARGUMENT for anything else.
absl::StatusOr<Scope> ScopeNamed(absl::string_view selector, absl::string_view name);

// Checks shapes, query tiles and numbers of a Select call. `selector` opens the message.
absl::Status CheckSelect(absl::string_view selector, const SelectParams& params,
                         const PageSelection& out);

// INVALID_ARGUMENT unless a row of `out` has room for all that `selector` may choose.
absl::Status CheckCapacity(absl::string_view name, const Selector& selector,
                           const SelectParams& params, const PageSelection& out);

// Distance from query r of a tile at which selectors see all candidates where keys are cached
// un-rotated, so that only their content counts. It is the distance of the newest list token in
// compact positions: the one just before the query's window.
constexpr int64_t SelectionDistance(const PolicyNumbers& numbers, int64_t r) {
  return numbers.window_tokens + r;
}
// Adds these distances to params.rope, if it is set.
void ReserveDistances(const SelectParams& params, Executor& executor);

// One row of a Select call: (query tile, KV head). Borrows from the call.
struct SelectRow {
  SelectRow(const SelectParams& params, const PageSelection& out, int64_t row)
      : p(params),
        index(row),
        tile(p.tiles[static_cast<size_t>(row / p.kv.layout.num_kv_heads)]),
        numbers(p.numbers[static_cast<size_t>(row / p.kv.layout.num_kv_heads)]),
        kv_head(row % p.kv.layout.num_kv_heads),
        group(p.q.dim(1) / p.kv.layout.num_kv_heads),
        memory(p.memories.empty() ? nullptr : p.memories[static_cast<size_t>(row)]),
        header(out.header(row)),
        list(out.list(row)) {}

  // Row of query r of the tile and head g of the group in the batch's q.
  int64_t q_row(int64_t r, int64_t g) const {
    return (tile.first_row + r) * p.q.dim(1) + kv_head * group + g;
  }
  // Candidates are [header.sink_end, candidates_end()).
  int64_t candidates_end() const { return header.window_begin + numbers.reach_tokens; }

  const SelectParams& p;
  const int64_t index;  // of the row in the selection
  const QueryTile& tile;
  const PolicyNumbers& numbers;
  const int64_t kv_head;
  const int64_t group;
  RowMemory* const memory;  // null: nothing is remembered
  SelectionHeader& header;
  SelectionEntry* list;
};

// Whether the row is wanted and at least one of its stages must run.
inline bool IsToRun(const SelectRow& row) {
  const SelectParams& p = row.p;
  if (!p.wanted.empty() && p.wanted[static_cast<size_t>(row.index)] == 0) return false;
  return row.memory == nullptr || !row.memory->serves();
}

// Calls select(SelectRow, thread), on the executor's threads, for every row where IsToRun.
template <typename Select>
void ForEachRow(const SelectParams& params, const PageSelection& out, Executor& executor,
                const Select& select) {
  const auto run = [&](int64_t row, int thread) {
    const SelectRow select_row(params, out, row);
    if (IsToRun(select_row)) select(select_row, thread);
  };
  executor.ParallelFor(out.num_rows, std::ref(run));  // a larger closure would be allocated
}

// The same, with select(SelectRow, memory&). `memory` is the result of lay_out(ScratchPieces&),
// laid out for each thread in the call's scratch.
template <typename LayOut, typename Select>
absl::Status WithThreadMemory(const SelectParams& params, const PageSelection& out,
                              Executor& executor, const LayOut& lay_out, const Select& select) {
  ScratchPieces counted(nullptr);
  lay_out(counted);
  KVASIR_ASSIGN_OR_RETURN(std::byte* const memory,
                          params.scratch->Reserve(counted.bytes() * executor.num_threads()));
  ForEachRow(params, out, executor, [&](const SelectRow& row, int thread) {
    ScratchPieces pieces(memory + counted.bytes() * thread);
    auto laid_out = lay_out(pieces);
    select(row, laid_out);
  });
  return absl::OkStatus();
}

// Appends chosen tokens to a row's list. An entry's score is the best score of its tokens.
class ListWriter {
 public:
  ListWriter(SelectionHeader& header, SelectionEntry* list) : header_(header), list_(list) {}
  // REQUIRES: calls are ascending, and the list has room (CheckCapacity).
  void Add(int64_t begin, int64_t end, float score);

 private:
  SelectionHeader& header_;
  SelectionEntry* list_;
};

// Copies the first row's header and list to the other rows of a query tile: one selection for all
// KV heads.
void ShareWithinBlock(const PageSelection& block_extents);

// Returns how `terminator` may end a query tile's rows early, and outside which sink and window.
// Empty where rule R2 holds or there is no terminator.
Termination MakeTermination(const Terminator* terminator, const QueryTile& tile,
                            const PolicyNumbers& numbers);

}  // namespace kvasir::kernels
