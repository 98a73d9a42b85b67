// Uploads bytes that the host writes: Backend::FillPieces on a GPU. It hides the pinned memory
// between, and who waits for what. Only in builds with CUDA. A function without state.
#pragma once

#include <span>

#include "absl/status/status.h"

#include "kernels/base/executor.h"
#include "worker/backend/backend.h"
#include "worker/backend/cuda/memory/cuda_memory.h"

namespace kvasir::worker {

// Errors are those of Backend::FillPieces, and RESOURCE_EXHAUSTED when memory cannot be pinned. On
// return, with or without an error, the device is done with the pieces.
absl::Status UploadPieces(std::span<const MemoryPiece> pieces, const WritePiece& write,
                          const CudaStream& stream, kernels::Executor& executor);

}  // namespace kvasir::worker
