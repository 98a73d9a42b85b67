#include "worker/backend/cuda/step_table.h"

#include <algorithm>
#include <iterator>
#include <set>

#include "kernels/base/scratch.h"
#include "kernels/sparse/common/selection_header.h"

namespace kvasir::worker {
namespace {

template <typename T>
std::span<T> Take(kernels::ScratchPieces& pieces, int64_t count) {
  T* const begin = pieces.Take<T>(count);
  return {begin, begin == nullptr ? 0 : static_cast<size_t>(count)};
}

// Returns, for each query tile of the batch, the selector that serves it.
std::vector<const ServedSelector*> ServedOf(const StepBatch& batch) {
  std::vector<const ServedSelector*> served(batch.tiles.size());
  for (const SelectorGroup& group : batch.groups) {
    std::fill(served.begin() + group.begin, served.begin() + group.end, group.served);
  }
  return served;
}

bool IsSingle(const kernels::QueryTile& tile) { return tile.num_rows == 1; }

}  // namespace

int64_t StepShape::NumbersFor(int64_t layer) const {
  return std::upper_bound(number_sets.begin(), number_sets.end(), layer) - number_sets.begin() - 1;
}

StepShape ShapeOf(const StepBatch& batch, int64_t num_kv_heads) {
  StepShape shape = {.order = {}, .ranges = {}, .number_sets = {}, .num_kv_heads = num_kv_heads};
  for (const bool single : {true, false}) {
    for (int64_t b = 0; b < std::ssize(batch.tiles); ++b) {
      if (IsSingle(batch.tiles[static_cast<size_t>(b)]) == single) shape.order.push_back(b);
    }
    if (single) shape.num_single = shape.num_tiles();
  }
  const std::vector<const ServedSelector*> served = ServedOf(batch);
  const kernels::RememberedSelections* last_memory = nullptr;
  for (int64_t i = 0; i < shape.num_tiles(); ++i) {
    const auto b = static_cast<size_t>(shape.order[static_cast<size_t>(i)]);
    const ServedSelector* const own = served[b];
    const auto* const memory = batch.infos[b].memory;
    const bool waits = memory != nullptr && memory == last_memory;
    last_memory = memory;
    if (shape.ranges.empty() || shape.ranges.back().served != own || waits) {
      shape.ranges.push_back({.served = own, .begin = i, .end = i});
    }
    ++shape.ranges.back().end;
  }
  std::set<int64_t> begins = {0};
  for (const TileInfo& info : batch.infos) {
    begins.insert(info.dense_layers);
    for (const LayerBudget& layers : info.layer_budgets) begins.insert({layers.begin, layers.end});
  }
  const auto windows = batch.windows.tokens;
  for (size_t layer = 1; layer < windows.size(); ++layer) {
    if (windows[layer] != windows[layer - 1]) begins.insert(static_cast<int64_t>(layer));
  }
  shape.number_sets.assign(begins.begin(), begins.end());
  return shape;
}

StepTable LayOut(const StepBatch& batch, const StepShape& shape, std::byte* memory) {
  kernels::ScratchPieces pieces(memory);
  const int64_t blocks = shape.num_tiles();
  StepTable table;
  table.tokens = Take<int32_t>(pieces, batch.num_tokens());
  table.fed_by = Take<int32_t>(pieces, batch.num_tokens());
  table.positions = Take<int64_t>(pieces, batch.num_tokens());
  table.sampled_tokens = Take<int32_t>(pieces, std::ssize(batch.sampled_tokens));
  table.scored_tokens = Take<int32_t>(pieces, std::ssize(batch.scored_tokens));
  table.appends = Take<kernels::QueryTile>(pieces, std::ssize(batch.appends));
  table.tiles = Take<kernels::QueryTile>(pieces, blocks);
  table.numbers = Take<kernels::PolicyNumbers>(pieces, std::ssize(shape.number_sets) * blocks);
  table.headers = Take<kernels::SelectionHeader>(pieces, blocks * shape.num_kv_heads);
  table.memories = Take<kernels::DeviceSelectionMemory>(pieces, blocks);
  table.truncations = Take<Truncation>(pieces, std::ssize(batch.truncations));
  table.bytes = pieces.bytes();
  return table;
}

DeviceStepOutputs LayOutResults(const StepBatch& batch, const StepShape& shape, int64_t num_layers,
                                int64_t num_slots, std::byte* memory) {
  kernels::ScratchPieces pieces(memory);
  DeviceStepOutputs results;
  results.counts =
      Take<kernels::SelectedCounts>(pieces, num_layers * shape.num_tiles() * shape.num_kv_heads);
  results.finite = Take<uint8_t>(pieces, batch.num_tokens());
  results.faults = Take<uint8_t>(pieces, num_slots);
  results.bytes = pieces.bytes();
  return results;
}

std::vector<uint8_t> FiniteRows(const StepBatch& batch, const DeviceStepOutputs& outputs) {
  std::vector<uint8_t> rows;
  for (size_t r = 0; r + 1 < batch.row_begins.size(); ++r) {
    const auto tokens =
        outputs.finite.subspan(static_cast<size_t>(batch.row_begins[r]),
                               static_cast<size_t>(batch.row_begins[r + 1] - batch.row_begins[r]));
    const bool all_finite =
        std::all_of(tokens.begin(), tokens.end(), [](uint8_t token) { return token != 0; });
    rows.push_back(all_finite ? 1 : 0);
  }
  for (size_t b = 0; b < batch.tiles.size(); ++b) {
    const bool fault = outputs.faults[static_cast<size_t>(batch.tiles[b].slot)] != 0;
    if (fault) rows[static_cast<size_t>(batch.infos[b].row)] = 0;
  }
  return rows;
}

void Fill(const StepBatch& batch, const StepShape& shape, const StepTable& table) {
  std::copy(batch.tokens.begin(), batch.tokens.end(), table.tokens.begin());
  std::copy(batch.fed_by.begin(), batch.fed_by.end(), table.fed_by.begin());
  std::copy(batch.positions.begin(), batch.positions.end(), table.positions.begin());
  std::copy(batch.sampled_tokens.begin(), batch.sampled_tokens.end(), table.sampled_tokens.begin());
  std::copy(batch.scored_tokens.begin(), batch.scored_tokens.end(), table.scored_tokens.begin());
  std::copy(batch.appends.begin(), batch.appends.end(), table.appends.begin());
  std::copy(batch.truncations.begin(), batch.truncations.end(), table.truncations.begin());
  for (size_t i = 0; i < shape.order.size(); ++i) {
    const size_t b = static_cast<size_t>(shape.order[i]);
    const kernels::QueryTile& tile = batch.tiles[b];
    table.tiles[i] = tile;
    const size_t heads = static_cast<size_t>(shape.num_kv_heads);
    std::fill_n(table.headers.begin() + static_cast<std::ptrdiff_t>(i * heads), heads,
                kernels::MakeAllHeader(tile));
    for (size_t set = 0; set < shape.number_sets.size(); ++set) {
      kernels::PolicyNumbers& numbers = table.numbers[set * shape.order.size() + i];
      numbers = NumbersInLayer(batch, static_cast<int64_t>(b), shape.number_sets[set]);
    }
  }
}

}  // namespace kvasir::worker
