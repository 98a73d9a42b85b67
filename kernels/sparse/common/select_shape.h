// The shape of a Select or Prune call, by which selectors on the GPU choose their kernels. Needs no
// GPU.
#pragma once

#include <cstdint>
#include <ostream>

#include "kernels/base/dtype.h"

namespace kvasir::kernels {

struct SelectShape {
  int64_t head_dim = 0;
  int64_t group = 0;  // query heads of a KV head
  DType q = DType::kFloat32;
  DType kv = DType::kFloat32;
  int64_t max_pages = 0;  // of a slot
  int64_t rows = 0;       // tiles x KV heads

  bool is_bf16() const { return q == DType::kBFloat16 && kv == DType::kBFloat16; }
};

inline std::ostream& operator<<(std::ostream& out, const SelectShape& shape) {
  return out << shape.rows << " rows, head_dim " << shape.head_dim << ", group " << shape.group
             << ", q " << DTypeName(shape.q) << ", KV " << DTypeName(shape.kv) << ", "
             << shape.max_pages << " pages";
}

}  // namespace kvasir::kernels
