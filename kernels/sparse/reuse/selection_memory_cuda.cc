#include "kernels/sparse/reuse/selection_memory_cuda.h"

#include <cstddef>

#include "kernels/base/cuda_status.h"
#include "kernels/base/scratch.h"
#include "kernels/base/status_macros.h"

namespace kvasir::kernels {
namespace {

// Returns the bytes of it all.
int64_t LayOut(std::byte* memory, int64_t rows, DeviceSelectionMemory& view) {
  ScratchPieces pieces(memory);
  view.rows = pieces.Take<RememberedList>(rows);
  view.lists = pieces.Take<SelectionEntry>(rows * view.capacity);
  return pieces.bytes();
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaSelectionMemory>> CudaSelectionMemory::Create(
    const MemoryNeeds& needs, cudaStream_t stream) {
  const SelectionMemory::Shape shape = ShapeOf(needs);
  KVASIR_CHECK(shape.num_stages == 1 && !needs.rule.ReadsQueries());
  const int64_t rows = shape.num_layers * shape.num_kv_heads;
  auto made = std::make_unique<CudaSelectionMemory>();
  made->view_ = {.capacity = shape.max_entries,
                 .interval = StageInterval(needs.selector, needs.numbers.reuse, 0)};
  const int64_t bytes = LayOut(nullptr, rows, made->view_);
  KVASIR_ASSIGN_OR_RETURN(made->buffer_, DeviceBuffer::Allocate(bytes));
  LayOut(made->buffer_.data(), rows, made->view_);
  // RememberedList::kNothing everywhere.
  KVASIR_RETURN_IF_ERROR(
      CudaStatus(cudaMemsetAsync(made->view_.rows, 0xff,
                                 static_cast<size_t>(rows) * sizeof(RememberedList), stream),
                 "clearing a sequence's memory"));
  return made;
}

}  // namespace kvasir::kernels
