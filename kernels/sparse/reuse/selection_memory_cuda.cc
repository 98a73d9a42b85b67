#include "kernels/sparse/reuse/selection_memory_cuda.h"

#include <cstddef>

#include "kernels/base/cuda_status.h"
#include "kernels/base/scratch.h"
#include "kernels/base/status_macros.h"

namespace kvasir::kernels {
namespace {

// Lays out the memory and returns its size in bytes.
int64_t LayOut(std::byte* memory, int64_t rows, DeviceSelectionMemory& view) {
  ScratchPieces pieces(memory);
  view.rows = pieces.Take<RememberedRow>(rows);
  view.lists = pieces.Take<SelectionEntry>(rows * view.capacity);
  view.stage_items = pieces.Take<int32_t>(rows * (view.num_stages - 1) * view.max_items);
  view.anchors = pieces.Take<float>(rows * view.num_stages * view.query_floats);
  return pieces.bytes();
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaSelectionMemory>> CudaSelectionMemory::Create(
    const MemoryNeeds& needs, cudaStream_t stream) {
  const SelectionMemory::Shape shape = ShapeOf(needs);
  const int64_t rows = shape.num_layers * shape.num_kv_heads;
  auto made = std::make_unique<CudaSelectionMemory>();
  made->view_ = {.capacity = shape.max_entries,
                 .max_items = shape.max_stage_items,
                 .query_floats = shape.query_floats,
                 .rule = needs.rule.on_device(),
                 .num_stages = static_cast<int32_t>(shape.num_stages)};
  for (size_t s = 0; s < shape.num_stages; ++s) {
    made->view_.intervals[s] = StageInterval(needs.selector, needs.numbers.reuse, s);
  }
  const int64_t bytes = LayOut(nullptr, rows, made->view_);
  KVASIR_ASSIGN_OR_RETURN(made->buffer_, DeviceBuffer::Allocate(bytes));
  LayOut(made->buffer_.data(), rows, made->view_);
  // Sets RememberedRow::kNothing everywhere.
  KVASIR_RETURN_IF_ERROR(
      CudaStatus(cudaMemsetAsync(made->view_.rows, 0xff,
                                 static_cast<size_t>(rows) * sizeof(RememberedRow), stream),
                 "clearing a sequence's memory"));
  return made;
}

}  // namespace kvasir::kernels
