// How the GPU's copy engine addresses pages: one tensor map for each arena that holds pages, with
// rows of head_dim values. A page is 64 rows of K and 64 rows of V at any multiple of a row from
// the arena's start. Made once for each KV store; passed to kernels by value. Only in builds with
// CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda.h>
#include <cudaTypedefs.h>

#include "absl/status/statusor.h"

#include "kernels/paged/paged_kv.h"

namespace kvasir::kernels {

// Columns of a copied box: a swizzled row of shared memory, 128 bytes.
inline constexpr int64_t kBoxColumns = 64;

struct KvTensorMaps {
  CUtensorMap device;
  CUtensorMap host;
  const std::byte* device_base = nullptr;
  const std::byte* host_base = nullptr;
};

struct KvArena {
  std::byte* base = nullptr;  // 1,024-byte aligned, readable by the device
  int64_t bytes = 0;
};

// INVALID_ARGUMENT unless the layout is bfloat16 with a head_dim of 64 or 128, and for an arena
// that is empty or misaligned. `host` may be empty: then no page may lie there.
absl::StatusOr<KvTensorMaps> MakeKvTensorMaps(const KvLayout& layout, const KvArena& device,
                                              const KvArena& host);

}  // namespace kvasir::kernels
