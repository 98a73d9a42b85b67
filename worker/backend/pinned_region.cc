#include "worker/backend/pinned_region.h"

#include <algorithm>
#include <atomic>
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <utility>

#include "absl/strings/str_cat.h"
#include "spdlog/spdlog.h"

#include "kernels/base/cuda_status.h"
#include "kernels/base/status_macros.h"
#include "worker/backend/memory_limit.h"

namespace kvasir::worker {
namespace {

constexpr int64_t kPieceBytes = int64_t{1} << 28;  // about
constexpr int64_t kMemoryPageBytes = 4096;
constexpr int64_t kReportedPart = 10;  // of a region of many pieces

}  // namespace

absl::StatusOr<PinnedRegion> PinnedRegion::Take(int64_t part_bytes, int64_t num_parts,
                                                absl::string_view flag,
                                                kernels::Executor& executor) {
  KVASIR_CHECK(part_bytes > 0 && part_bytes % kMemoryPageBytes == 0);
  const int64_t bytes = num_parts * part_bytes;
  KVASIR_RETURN_IF_ERROR(CheckMemoryLimit(bytes, flag));
  void* const memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no address space for ", bytes, " bytes of host memory; lower ", flag));
  }
  PinnedRegion region;
  region.data_ = static_cast<std::byte*>(memory);
  region.size_bytes_ = bytes;
  // The driver copies nothing from one piece to the next.
  region.piece_bytes_ = std::max<int64_t>(1, kPieceBytes / part_bytes) * part_bytes;
  madvise(memory, static_cast<size_t>(bytes), MADV_HUGEPAGE);  // a wish
  KVASIR_RETURN_IF_ERROR(region.Pin(executor));
  return region;
}

absl::Status PinnedRegion::Pin(kernels::Executor& executor) {
  const int64_t pieces = (size_bytes_ + piece_bytes_ - 1) / piece_bytes_;
  pinned_.resize(static_cast<size_t>(pieces));
  std::vector<absl::Status> failed(static_cast<size_t>(executor.num_threads()));
  std::atomic<int64_t> done = 0;
  int device = 0;
  KVASIR_RETURN_IF_ERROR(kernels::CudaStatus(cudaGetDevice(&device), "asking for the device"));
  executor.ParallelFor(pieces, [&](int64_t piece, int thread) {
    absl::Status& status = failed[static_cast<size_t>(thread)];
    if (!status.ok()) return;
    std::byte* const begin = data_ + piece * piece_bytes_;
    const int64_t bytes = std::min(piece_bytes_, size_bytes_ - piece * piece_bytes_);
    for (int64_t at = 0; at < bytes; at += kMemoryPageBytes) begin[at] = std::byte{0};
    cudaSetDevice(device);  // of this thread
    status =
        kernels::CudaStatus(cudaHostRegister(begin, static_cast<size_t>(bytes),
                                             cudaHostRegisterPortable | cudaHostRegisterMapped),
                            absl::StrCat("pinning ", bytes, " bytes of host memory"));
    if (!status.ok()) return;
    pinned_[static_cast<size_t>(piece)] = 1;
    const int64_t now = ++done;
    if (now * kReportedPart / pieces != (now - 1) * kReportedPart / pieces &&
        pieces > kReportedPart) {
      spdlog::info("host tier: {} of {} MiB pinned", now * piece_bytes_ >> 20, size_bytes_ >> 20);
    }
  });
  const auto error =
      std::find_if(failed.begin(), failed.end(), [](const auto& status) { return !status.ok(); });
  return error == failed.end() ? absl::OkStatus() : *error;
}

PinnedRegion::PinnedRegion(PinnedRegion&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)),
      piece_bytes_(std::exchange(other.piece_bytes_, 0)),
      pinned_(std::move(other.pinned_)) {}

PinnedRegion& PinnedRegion::operator=(PinnedRegion&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  std::swap(piece_bytes_, other.piece_bytes_);
  std::swap(pinned_, other.pinned_);
  return *this;
}

PinnedRegion::~PinnedRegion() {
  for (size_t piece = 0; piece < pinned_.size(); ++piece) {
    if (pinned_[piece] == 0) continue;
    cudaHostUnregister(data_ + static_cast<int64_t>(piece) * piece_bytes_);
  }
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(size_bytes_));
}

}  // namespace kvasir::worker
