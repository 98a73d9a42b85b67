// Key codes (key_codes.h) of blocks whose keys came from elsewhere than append, on the GPU: the same
// bytes. Called when blocks are restored. Thread-safe. Only in builds with CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <span>

#include "absl/status/status.h"

#include "kernels/paged/key_codes.h"

namespace kvasir::kernels {

// Of all 64 tokens of all pages of the rows. `pages` and `key_codes` as PagedKv has them; all
// pointers, the span included, are device memory, pages of any tier that is not absent. Nothing is
// allocated or waited for; errors are the device's.
absl::Status EncodePages(const KvLayout& layout, const PageRef* pages, std::byte* const* key_codes,
                         std::span<const int32_t> rows, cudaStream_t stream);

}  // namespace kvasir::kernels
