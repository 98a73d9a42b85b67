// Makes the key codes (key_codes.h) of blocks that append did not write, on the GPU, with the same
// bytes. Called when blocks are restored. Thread-safe. Only in builds with CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <span>

#include "absl/status/status.h"

#include "kernels/append/key_codes.h"

namespace kvasir::kernels {

// Encodes all 64 tokens of all pages of the rows. `pages` and `key_codes` are as in PagedKv. All
// pointers, the span included, are device memory; pages lie in any tier except absent. Allocates
// nothing and waits for nothing. Errors are the device's.
absl::Status EncodePages(const KvLayout& layout, const PageRef* pages, std::byte* const* key_codes,
                         std::span<const int32_t> rows, cudaStream_t stream);

}  // namespace kvasir::kernels
