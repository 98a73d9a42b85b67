#include "worker/backend/cuda/memory/pinned_region.h"

#include <algorithm>
#include <cuda_runtime_api.h>
#include <thread>

#include "absl/strings/str_cat.h"
#include "spdlog/spdlog.h"

#include "kernels/base/cuda_status.h"
#include "kernels/base/status_macros.h"
#include "worker/backend/memory_limit.h"

namespace kvasir::worker {
namespace {

using kernels::MutexLock;

// Approximate size of a piece: the driver holds locks while it pins one, for about half a
// millisecond a MiB, and a step's launches wait for them.
constexpr int64_t kPieceBytes = int64_t{1} << 23;
// The driver's locks are not fair: launches get as much time as the pieces take, and beside steps
// kShareOfSteps times as much, unless somebody waits for a part.
constexpr int64_t kShareOfSteps = 9;
constexpr std::chrono::milliseconds kStepsGoOn{200};  // after the last one
constexpr int64_t kMemoryPageBytes = 4096;
constexpr int64_t kReportedParts = 10;  // log lines for a region of many pieces
// The threads zero pages, which takes a core longer than the driver takes to pin them.
constexpr int64_t kMostThreads = 4;

}  // namespace

absl::StatusOr<std::unique_ptr<PinnedRegion>> PinnedRegion::Over(kvstore::HostMemory& memory,
                                                                 int64_t part_bytes,
                                                                 int64_t num_parts,
                                                                 absl::string_view flag) {
  KVASIR_CHECK(part_bytes > 0 && part_bytes % kMemoryPageBytes == 0 && num_parts > 0);
  KVASIR_RETURN_IF_ERROR(CheckMemoryLimit(num_parts * part_bytes - memory.held_bytes(), flag));
  return std::unique_ptr<PinnedRegion>(new PinnedRegion(memory, part_bytes, num_parts));
}

// Pieces are whole parts: the driver copies nothing from one piece to the next.
PinnedRegion::PinnedRegion(kvstore::HostMemory& memory, int64_t part_bytes, int64_t num_parts)
    : memory_(memory),
      data_(memory.extents()),
      num_parts_(num_parts),
      size_bytes_(num_parts * part_bytes),
      parts_per_piece_(std::max<int64_t>(1, kPieceBytes / part_bytes)),
      piece_bytes_(parts_per_piece_ * part_bytes),
      pieces_(static_cast<size_t>((num_parts - 1) / parts_per_piece_ + 1), Piece::kWaits) {}

absl::Status PinnedRegion::Start() {
  int device = 0;
  KVASIR_RETURN_IF_ERROR(kernels::CudaStatus(cudaGetDevice(&device), "asking for the device"));
  const auto cores = static_cast<int64_t>(std::thread::hardware_concurrency());
  const int64_t count = std::clamp<int64_t>(cores / 2, 1, kMostThreads);
  for (int64_t i = 0; i < count; ++i) threads_.emplace_back([this, device] { PinPieces(device); });
  return Await(0);
}

void PinnedRegion::PinPieces(int device) {
  cudaSetDevice(device);  // sets it for this thread
  for (;;) {
    std::optional<int64_t> piece;
    {
      MutexLock lock(mu_);
      if (!stopping_ && failed_.ok()) piece = ChoosePiece();
      if (!piece.has_value()) return;
      pieces_[static_cast<size_t>(*piece)] = Piece::kBegun;
    }
    EndPiece(*piece, PinPiece(*piece));
  }
}

std::optional<int64_t> PinnedRegion::ChoosePiece() {
  for (; !awaited_.empty(); awaited_.pop_back()) {
    if (state_of(awaited_.back()) == Piece::kWaits) return awaited_.back();
  }
  for (; next_ < std::ssize(pieces_); ++next_) {
    if (state_of(next_) == Piece::kWaits) return next_;
  }
  return std::nullopt;
}

absl::Status PinnedRegion::PinPiece(int64_t piece) {
  std::byte* const begin = begin_of(piece);
  const int64_t bytes = std::min(piece_bytes_, size_bytes_ - piece * piece_bytes_);
  const int64_t first = piece * parts_per_piece_;
  for (int64_t part = first; part < std::min(first + parts_per_piece_, num_parts_); ++part) {
    KVASIR_RETURN_IF_ERROR(memory_.Reserve(part));
  }
  MutexLock lock(driver_mu_);
  const Clock::time_point started = Clock::now();
  const cudaError_t error = cudaHostRegister(begin, static_cast<size_t>(bytes),
                                             cudaHostRegisterPortable | cudaHostRegisterMapped);
  Rest(Clock::now() - started);
  return kernels::CudaStatus(error, absl::StrCat("pinning ", bytes, " bytes of host memory"));
}

void PinnedRegion::Rest(Clock::duration worked) {
  std::this_thread::sleep_for(worked);
  const Clock::time_point until = Clock::now() + (kShareOfSteps - 1) * worked;
  MutexLock lock(mu_);
  if (Clock::now() - last_step_ > kStepsGoOn) return;
  while (num_waiting_ == 0 && !stopping_ && changed_.WaitUntil(mu_, until)) {
  }
}

void PinnedRegion::GiveWay() {
  MutexLock lock(mu_);
  last_step_ = Clock::now();
}

void PinnedRegion::EndPiece(int64_t piece, const absl::Status& status) {
  MutexLock lock(mu_);
  pieces_[static_cast<size_t>(piece)] = status.ok() ? Piece::kPinned : Piece::kFailed;
  if (!status.ok()) {
    spdlog::error("host tier: {}", std::string(status.message()));
    if (failed_.ok()) failed_ = status;
  }
  const int64_t all = std::ssize(pieces_);
  num_pinned_ += status.ok() ? 1 : 0;
  if (num_pinned_ * kReportedParts / all != (num_pinned_ - 1) * kReportedParts / all &&
      all > kReportedParts && status.ok()) {
    spdlog::info("host tier: {} of {} MiB pinned",
                 std::min(num_pinned_ * piece_bytes_, size_bytes_) >> 20, size_bytes_ >> 20);
  }
  changed_.NotifyAll();
}

absl::Status PinnedRegion::Await(int64_t part) {
  const int64_t piece = part / parts_per_piece_;
  MutexLock lock(mu_);
  ++num_waiting_;
  if (state_of(piece) == Piece::kWaits) awaited_.push_back(piece);
  changed_.NotifyAll();
  while (!HasEnded(piece)) changed_.Wait(mu_);
  --num_waiting_;
  return state_of(piece) == Piece::kPinned ? absl::OkStatus() : failed_;
}

bool PinnedRegion::IsThere(int64_t part) {
  MutexLock lock(mu_);
  return HasEnded(part / parts_per_piece_);
}

PinnedRegion::~PinnedRegion() {
  {
    MutexLock lock(mu_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  for (std::thread& thread : threads_) thread.join();
  MutexLock lock(mu_);
  for (size_t piece = 0; piece < pieces_.size(); ++piece) {
    if (pieces_[piece] == Piece::kPinned) cudaHostUnregister(begin_of(static_cast<int64_t>(piece)));
  }
}

}  // namespace kvasir::worker
