// Reads single elements of a page's keys on the GPU, whatever the dtype of the KV. For kernels that
// read few of them; others have forms of their own.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/paged/kv_codes.cuh"
#include "kernels/paged/paged_kv.h"

namespace kvasir::kernels {

template <typename Kv>
class StoredKeys {
 public:
  using Element = Kv;

  __device__ StoredKeys(const KvLayout& layout, const std::byte* page)
      : keys_(reinterpret_cast<const Kv*>(page)), head_dim_(layout.head_dim) {}
  __device__ Element At(int64_t token, int64_t i) const { return keys_[token * head_dim_ + i]; }

 private:
  const Kv* keys_;
  int64_t head_dim_;
};

class CodedKeys {
 public:
  using Element = BFloat16;

  __device__ CodedKeys(const KvLayout& layout, const std::byte* page)
      : codes_(page),
        scales_(page + layout.scales_offset()),
        head_dim_(layout.head_dim),
        dtype_(layout.dtype) {}
  __device__ Element At(int64_t token, int64_t i) const {
    return DecodedElement(dtype_, codes_[token * head_dim_ + i], scales_[token]);
  }

 private:
  const std::byte* codes_;
  const std::byte* scales_;
  int64_t head_dim_;
  DType dtype_;
};

// Calls call.operator()<Keys>() with the class for keys stored as `dtype`.
template <typename Call>
auto ForKeys(DType dtype, const Call& call) {
  if (IsQuantized(dtype)) return call.template operator()<CodedKeys>();
  return dtype == DType::kFloat32 ? call.template operator()<StoredKeys<float>>()
                                  : call.template operator()<StoredKeys<BFloat16>>();
}

}  // namespace kvasir::kernels
