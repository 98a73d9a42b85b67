#include "kernels/sparse/common/selection_memory.h"

#include <utility>

#include "kernels/base/scratch.h"
#include "kernels/base/status_macros.h"

namespace kvasir::kernels {
namespace {

RowMemory LayOut(const SelectionMemory::Shape& shape, ScratchPieces& pieces) {
  RowMemory row = {.num_stages = shape.num_stages, .query_floats = shape.query_floats};
  row.list = pieces.Take<SelectionEntry>(shape.max_entries);
  for (size_t s = 0; s + 1 < shape.num_stages; ++s) {
    row.stages[s].items = pieces.Take<int64_t>(shape.max_stage_items);
  }
  row.query = pieces.Take<float>(shape.query_floats);
  row.anchors = pieces.Take<float>(static_cast<int64_t>(shape.num_stages) * shape.query_floats);
  return row;
}

int64_t RowBytes(const SelectionMemory::Shape& shape) {
  ScratchPieces counted(nullptr);
  LayOut(shape, counted);
  return counted.bytes();
}

}  // namespace

absl::StatusOr<std::unique_ptr<SelectionMemory>> SelectionMemory::Create(const Shape& shape) {
  KVASIR_ASSIGN_OR_RETURN(
      HostBuffer memory,
      HostBuffer::Allocate(shape.num_layers * shape.num_kv_heads * RowBytes(shape)));
  return std::unique_ptr<SelectionMemory>(new SelectionMemory(shape, std::move(memory)));
}

SelectionMemory::SelectionMemory(const Shape& shape, HostBuffer memory)
    : num_kv_heads_(shape.num_kv_heads), memory_(std::move(memory)) {
  ScratchPieces pieces(memory_.data());
  for (int64_t i = 0; i < shape.num_layers * shape.num_kv_heads; ++i) {
    rows_.push_back(LayOut(shape, pieces));
  }
}

}  // namespace kvasir::kernels
