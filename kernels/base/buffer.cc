#include "kernels/base/buffer.h"

#include <algorithm>
#include <cstdlib>
#include <sys/mman.h>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace kvasir::kernels {
namespace {

// More than any host has. A request above it would abort under AddressSanitizer.
constexpr int64_t kMaxBytes = int64_t{1} << 46;
constexpr uintptr_t kHugePageBytes = uintptr_t{2} << 20;

// KV is read in scattered pages, and with huge pages the processor seldom walks page tables. This
// is advice only: a kernel without huge pages ignores it.
void AskForHugePages(std::byte* data, int64_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  const uintptr_t end = (address + static_cast<uintptr_t>(bytes)) / kHugePageBytes * kHugePageBytes;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace

absl::StatusOr<HostBuffer> HostBuffer::Allocate(int64_t bytes) {
  if (bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat("cannot allocate ", bytes, " bytes"));
  }
  HostBuffer buffer;
  if (bytes == 0) return buffer;
  void* memory = nullptr;
  if (bytes <= kMaxBytes) {
    // calloc rather than aligned_alloc and memset: untouched pages stay unmapped.
    memory = std::calloc(static_cast<size_t>(bytes + kAlignment), 1);
  }
  if (memory == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "no host memory for a buffer of ", bytes, " bytes; use smaller limits or a larger host"));
  }
  buffer.memory_.reset(memory);
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t aligned = (address + (kAlignment - 1)) & ~static_cast<uintptr_t>(kAlignment - 1);
  buffer.data_ = static_cast<std::byte*>(memory) + (aligned - address);
  buffer.size_bytes_ = bytes;
  AskForHugePages(buffer.data_, bytes);
  return buffer;
}

HostBuffer::HostBuffer(HostBuffer&& other) noexcept
    : memory_(std::move(other.memory_)),
      data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)) {}

HostBuffer& HostBuffer::operator=(HostBuffer&& other) noexcept {
  memory_ = std::move(other.memory_);
  data_ = std::exchange(other.data_, nullptr);
  size_bytes_ = std::exchange(other.size_bytes_, 0);
  return *this;
}

void HostBuffer::Free::operator()(void* memory) const { std::free(memory); }

absl::StatusOr<HostArena::Piece> HostArena::Take(int64_t bytes) {
  if (bytes < 0 || bytes > buffer_bytes_ / 2) {
    KVASIR_ASSIGN_OR_RETURN(HostBuffer own, HostBuffer::Allocate(bytes));
    auto buffer = std::make_shared<const HostBuffer>(std::move(own));
    return Piece{.buffer = buffer, .data = buffer->data()};
  }
  if (buffer_ == nullptr || bytes > buffer_->size_bytes() - used_) {
    KVASIR_ASSIGN_OR_RETURN(HostBuffer next, HostBuffer::Allocate(buffer_bytes_));
    buffer_ = std::make_shared<const HostBuffer>(std::move(next));
    used_ = 0;
  }
  const Piece piece = {.buffer = buffer_, .data = buffer_->data() + used_};
  constexpr int64_t kAlignment = HostBuffer::kAlignment;
  used_ +=
      std::min((bytes + kAlignment - 1) / kAlignment * kAlignment, buffer_->size_bytes() - used_);
  return piece;
}

}  // namespace kvasir::kernels
