#include "worker/backend/cuda/cuda_upload.h"

#include <algorithm>
#include <array>
#include <cuda_runtime_api.h>
#include <vector>

#include "kernels/base/cuda_status.h"
#include "kernels/base/device_buffer.h"
#include "kernels/base/status_macros.h"
#include "worker/checkpoint/try_parallel_for.h"

namespace kvasir::worker {
namespace {

// A thread writes into one buffer while the device copies from the other.
constexpr size_t kBuffersPerThread = 2;

struct StagingBuffer {
  std::byte* memory = nullptr;
  CudaEvent copied;  // recorded after the last copy from it
};

// The buffers of one thread, which uses them in turn.
struct Staging {
  std::array<StagingBuffer, kBuffersPerThread> buffers;
  size_t next = 0;
};

int64_t LargestPiece(std::span<const MemoryPiece> pieces) {
  int64_t largest = 0;
  for (const MemoryPiece& piece : pieces) largest = std::max(largest, piece.size_bytes);
  return largest;
}

absl::StatusOr<std::vector<Staging>> MakeStaging(std::byte* memory, int64_t buffer_bytes,
                                                 int num_threads) {
  std::vector<Staging> threads(static_cast<size_t>(num_threads));
  for (Staging& staging : threads) {
    for (StagingBuffer& buffer : staging.buffers) {
      KVASIR_ASSIGN_OR_RETURN(buffer.copied, CudaEvent::Create());
      buffer.memory = memory;
      memory += buffer_bytes;
    }
  }
  return threads;
}

}  // namespace

absl::Status UploadPieces(std::span<const MemoryPiece> pieces, const WritePiece& write,
                          const CudaStream& stream, kernels::Executor& executor) {
  int device = 0;
  KVASIR_RETURN_IF_ERROR(kernels::CudaStatus(cudaGetDevice(&device), "asking for the device"));
  const int64_t buffer_bytes = LargestPiece(pieces);
  const int num_threads = executor.num_threads();
  KVASIR_ASSIGN_OR_RETURN(
      const kernels::PinnedBuffer memory,
      kernels::PinnedBuffer::Allocate(int64_t{kBuffersPerThread} * num_threads * buffer_bytes));
  KVASIR_ASSIGN_OR_RETURN(std::vector<Staging> threads,
                          MakeStaging(memory.data(), buffer_bytes, num_threads));
  const absl::Status status =
      TryParallelFor(executor, std::ssize(pieces), [&](int64_t i, int thread) -> absl::Status {
        cudaSetDevice(device);  // sets it for this thread
        const MemoryPiece& piece = pieces[static_cast<size_t>(i)];
        Staging& staging = threads[static_cast<size_t>(thread)];
        StagingBuffer& buffer = staging.buffers[staging.next];
        staging.next = (staging.next + 1) % kBuffersPerThread;
        KVASIR_RETURN_IF_ERROR(buffer.copied.Wait());
        KVASIR_RETURN_IF_ERROR(write(i, thread, buffer.memory));
        KVASIR_RETURN_IF_ERROR(stream.CopyToDevice(piece.begin, buffer.memory, piece.size_bytes));
        return buffer.copied.Record(stream);
      });
  const absl::Status copied = stream.Wait();  // in any case, before the buffers are freed
  return status.ok() ? copied : status;
}

}  // namespace kvasir::worker
