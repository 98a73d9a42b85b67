// Bytes that the host writes, on their way to the device: Backend::FillPieces on a GPU. Hidden: the
// pinned memory between, and who waits for what. Only in builds with CUDA. A function without
// state.
#pragma once

#include <span>

#include "absl/status/status.h"

#include "kernels/base/executor.h"
#include "worker/backend/backend.h"
#include "worker/backend/cuda_memory.h"

namespace kvasir::worker {

// Errors as of Backend::FillPieces; RESOURCE_EXHAUSTED when memory cannot be pinned. Whatever it
// returns, the device is done with the pieces.
absl::Status UploadPieces(std::span<const MemoryPiece> pieces, const WritePiece& write,
                          const CudaStream& stream, kernels::Executor& executor);

}  // namespace kvasir::worker
