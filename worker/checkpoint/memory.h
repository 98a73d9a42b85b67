// Owned memory of a backend, of whatever kind it allocates, freed by the destructor; and a tensor
// with its memory. Held by activations and by the model, which do not know the kind.
// Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "kernels/base/tensor.h"

namespace kvasir::worker {

class Memory {
 public:
  // No memory: data() is null.
  Memory() = default;
  // Takes over a buffer (kernels/base/buffer.h, device_buffer.h).
  template <typename Buffer>
  Memory(Buffer buffer, kernels::Device device)
      : data_(buffer.data()),
        size_bytes_(buffer.size_bytes()),
        device_(device),
        owner_(std::make_unique<Owner<Buffer>>(std::move(buffer))) {}

  std::byte* data() const { return data_; }
  int64_t size_bytes() const { return size_bytes_; }
  kernels::Device device() const { return device_; }

 private:
  struct AnyOwner {
    virtual ~AnyOwner() = default;
  };
  template <typename Buffer>
  struct Owner final : AnyOwner {
    explicit Owner(Buffer owned) : buffer(std::move(owned)) {}
    Buffer buffer;
  };

  std::byte* data_ = nullptr;
  int64_t size_bytes_ = 0;
  kernels::Device device_ = kernels::Device::kCpu;
  std::unique_ptr<AnyOwner> owner_;
};

struct Tensor {
  Memory memory;
  kernels::TensorView view;
};

// A part of a backend's memory that the host writes.
struct MemoryPiece {
  std::byte* begin = nullptr;
  int64_t size_bytes = 0;
};

}  // namespace kvasir::worker
