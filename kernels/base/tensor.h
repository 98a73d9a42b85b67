// A borrowed, contiguous, row-major view of memory with a dtype and a shape. It owns nothing: the
// caller keeps the memory alive for the duration of the call. Ops check shapes with shape_check.h.
// Thread-compatible.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "kernels/base/dtype.h"

namespace kvasir::kernels {

enum class Device : uint8_t { kCpu = 0, kCuda = 1 };

class TensorView {
 public:
  static constexpr int kMaxRank = 4;

  TensorView() = default;
  TensorView(void* data, DType dtype, std::initializer_list<int64_t> shape,
             Device device = Device::kCpu);

  void* data() const { return data_; }
  // REQUIRES: sizeof(T) is the dtype's size.
  template <typename T>
  T* As() const {
    return static_cast<T*>(data_);
  }
  DType dtype() const { return dtype_; }
  Device device() const { return device_; }
  int rank() const { return rank_; }
  int64_t dim(int i) const { return shape_[static_cast<size_t>(i)]; }
  int64_t num_elements() const;
  int64_t size_bytes() const { return num_elements() * static_cast<int64_t>(DTypeSize(dtype_)); }
  bool empty() const { return data_ == nullptr; }
  // "bfloat16[3, 64]"
  std::string DebugString() const;

 private:
  void* data_ = nullptr;
  DType dtype_ = DType::kFloat32;
  Device device_ = Device::kCpu;
  int rank_ = 0;
  std::array<int64_t, kMaxRank> shape_ = {};
};

}  // namespace kvasir::kernels
