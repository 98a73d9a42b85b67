#include "kernels/base/tensor.h"

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace kvasir::kernels {

TensorView::TensorView(void* data, DType dtype, std::initializer_list<int64_t> shape, Device device)
    : data_(data), dtype_(dtype), device_(device), rank_(static_cast<int>(shape.size())) {
  KVASIR_CHECK(shape.size() <= kMaxRank);
  size_t i = 0;
  for (int64_t dim : shape) shape_[i++] = dim;
}

int64_t TensorView::num_elements() const {
  int64_t n = 1;
  for (int i = 0; i < rank_; ++i) n *= dim(i);
  return n;
}

std::string TensorView::DebugString() const {
  std::string text = absl::StrCat(DTypeName(dtype_), "[");
  for (int i = 0; i < rank_; ++i) absl::StrAppend(&text, i > 0 ? ", " : "", dim(i));
  return text + "]";
}

}  // namespace kvasir::kernels
