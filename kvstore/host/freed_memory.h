// Treatment of memory that a tier takes back. Under AddressSanitizer freed pages and extents can
// never be touched; with kPoisoned they also read as NaN in every build. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SANITIZE_ADDRESS__)
#define KVASIR_ADDRESS_SANITIZER_ 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVASIR_ADDRESS_SANITIZER_ 1
#endif
#endif
#ifdef KVASIR_ADDRESS_SANITIZER_
#include <sanitizer/asan_interface.h>
#endif

namespace kvasir::kvstore {

enum class FreedMemory : uint8_t {
  kAsIs,
  kPoisoned,  // 0xff bytes: NaN in every KV dtype
};

inline void MarkFreed(FreedMemory rule, std::byte* memory, int64_t bytes) {
  if (rule == FreedMemory::kPoisoned) std::memset(memory, 0xff, static_cast<size_t>(bytes));
#ifdef KVASIR_ADDRESS_SANITIZER_
  ASAN_POISON_MEMORY_REGION(memory, static_cast<size_t>(bytes));
#endif
}

inline void MarkTaken([[maybe_unused]] std::byte* memory, [[maybe_unused]] int64_t bytes) {
#ifdef KVASIR_ADDRESS_SANITIZER_
  ASAN_UNPOISON_MEMORY_REGION(memory, static_cast<size_t>(bytes));
#endif
}

}  // namespace kvasir::kvstore
