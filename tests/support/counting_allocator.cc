#include "tests/support/counting_allocator.h"

#include <cstdlib>
#include <new>

namespace kvasir::testing {
namespace {

thread_local size_t allocated_bytes = 0;

}  // namespace

size_t AllocatedBytes() { return allocated_bytes; }

}  // namespace kvasir::testing

void* operator new(size_t bytes) {
  kvasir::testing::allocated_bytes += bytes;
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
// AddressSanitizer has one of its own, whose memory must not meet the free below.
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  kvasir::testing::allocated_bytes += bytes;
  return std::malloc(bytes == 0 ? 1 : bytes);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
