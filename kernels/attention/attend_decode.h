// The decode kernels behind AttendDecode: parameters as the device reads them, and the launch. Only
// attend_cuda.cc includes it, after it has checked the shapes.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include "kernels/paged/kv_tensor_maps.h"
#include "kernels/paged/page_selection.h"

namespace kvasir::kernels {

struct DecodeLaunch {
  const __nv_bfloat16* q = nullptr;  // [tokens, kv heads x group, head_dim]
  __nv_bfloat16* out = nullptr;      // like q
  float* lse = nullptr;              // [tokens, kv heads x group], may be null
  PagedKv kv;                        // tables in device memory
  int64_t layer = 0;
  float scale = 0;
  const QueryBlock* blocks = nullptr;  // one query each
  const SelectionHeader* headers = nullptr;
  const SelectionEntry* entries = nullptr;
  int64_t capacity = 0;
  int64_t num_rows = 0;  // blocks x KV heads
  int64_t group = 0;     // query heads of a KV head, at most 8
  uint8_t* faults = nullptr;
  float* partials = nullptr;  // [rows, units x warpgroups, group, 2 + head_dim]: max, sum, values
  int64_t num_processors = 0;
};

cudaError_t LaunchAttendDecode(const DecodeLaunch& params, const KvTensorMaps& maps,
                               cudaStream_t stream);

}  // namespace kvasir::kernels
