// A line of 8 bytes that a rank writes into the memory of another: a word and the number of its
// call or turn. It is written and read as a whole, so a reader that sees the number has the word,
// without a fence or a flag. Device code of ops among peers.
#pragma once

#include <cstdint>

#include <cuda/atomic>

namespace kvasir::kernels {

using SharedLine = cuda::atomic_ref<uint64_t, cuda::thread_scope_system>;

__device__ inline void SendLine(uint64_t& line, uint32_t word, uint32_t call) {
  SharedLine(line).store((static_cast<uint64_t>(call) << 32) | word, cuda::memory_order_relaxed);
}
__device__ inline uint64_t LookAtLine(uint64_t& line) {
  return SharedLine(line).load(cuda::memory_order_relaxed);
}
__device__ inline uint32_t CallOf(uint64_t line) { return static_cast<uint32_t>(line >> 32); }
__device__ inline uint32_t WordOf(uint64_t line) { return static_cast<uint32_t>(line); }

}  // namespace kvasir::kernels
