// Queries of decode steps that turn a little in each step, for benchmarks whose model is only a
// shape. Consecutive queries of such a model are unrelated, so a cache of pages would not see the
// locality of a real model. Every coordinate of every head changes independently, q' = turn q +
// sqrt(1 - turn^2) noise, with variance 1, so the cosine of consecutive queries is about `turn`.
// The share of selected pages that two steps have in common is counted, for comparison with a
// trained model (docs/quality.md).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <cuda_runtime_api.h>
#include <vector>

#include "absl/status/status.h"

#include "kernels/base/cuda_status.h"
#include "kernels/base/status_macros.h"
#include "kernels/dense/random_rows.h"
#include "worker/backend/backend.h"

namespace kvasir::worker {

// Copies between host memory and a backend's memory, which lies on `device`.
inline absl::Status CopyBytes(void* to, const void* from, size_t bytes, kernels::Device device) {
  if (device == kernels::Device::kCpu) {
    std::memcpy(to, from, bytes);
    return absl::OkStatus();
  }
  return kernels::CudaStatus(cudaMemcpy(to, from, bytes, cudaMemcpyDefault),
                             "copying a benchmark's bytes");
}

// Queries in a backend's memory. Thread-compatible.
class TurningQueries {
 public:
  struct Shape {
    int64_t num_layers = 0;
    int64_t sequences = 0;
    int64_t heads = 0;  // query heads
    int64_t head_dim = 0;
    int64_t queries() const { return sequences * heads * head_dim; }
  };

  // Makes the queries of all `steps` steps now, so that no work between steps lets a device catch
  // up. `backend` outlives the object.
  static absl::StatusOr<TurningQueries> Create(const Shape& shape, double turn, int64_t steps,
                                               Backend& backend) {
    TurningQueries queries;
    const int64_t bytes = shape.queries() * kElementBytes;
    KVASIR_ASSIGN_OR_RETURN(queries.memory_, backend.Allocate(shape.num_layers * bytes));
    for (int64_t layer = 0; layer < shape.num_layers; ++layer) {
      queries.layers_.push_back(kernels::TensorView(
          queries.memory_.data() + layer * bytes, kernels::DType::kBFloat16,
          {shape.sequences, shape.heads, shape.head_dim}, queries.memory_.device()));
    }
    queries.Draw(shape.num_layers * shape.queries(), turn, steps);
    return queries;
  }

  kernels::Device device() const { return memory_.device(); }
  // Returns the queries of each layer: [sequences, query heads, head_dim] bfloat16.
  const std::vector<kernels::TensorView>& layers() const { return layers_; }

  // Makes Turn start again at the first step.
  void Restart() { next_ = 0; }
  // Turns to the next step's queries. REQUIRES: called between steps, at most `steps` times.
  absl::Status Turn() {
    const std::vector<kernels::BFloat16>& next = steps_[next_++];
    return CopyBytes(memory_.data(), next.data(), next.size() * sizeof(next[0]), memory_.device());
  }

 private:
  static constexpr int64_t kElementBytes = sizeof(kernels::BFloat16);
  static constexpr uint64_t kSeed = 11;

  void Draw(int64_t count, double turn, int64_t steps) {
    std::vector<float> values(static_cast<size_t>(count));
    const auto kept = static_cast<float>(turn);
    const auto fresh = static_cast<float>(std::sqrt(3 * (1 - turn * turn)));
    uint64_t drawn = 0;
    const auto noise = [&drawn] {
      return static_cast<float>(2 * kernels::UniformOf(kSeed, drawn++) - 1);
    };
    for (float& value : values) value = std::sqrt(3.0f) * noise();
    for (int64_t step = 0; step < steps; ++step) {
      std::vector<kernels::BFloat16>& rounded = steps_.emplace_back();
      rounded.reserve(values.size());
      for (float& value : values) {
        value = kept * value + fresh * noise();
        rounded.emplace_back(value);
      }
    }
  }

  std::vector<std::vector<kernels::BFloat16>> steps_;
  size_t next_ = 0;
  Memory memory_;
  std::vector<kernels::TensorView> layers_;
};

// Share of the second step's selection that two consecutive steps have in common. Leaves out blocks
// that were read whole: sink and window. Thread-compatible.
class SelectionOverlap {
 public:
  // Called after a step, whose KV lies on `device`. Compares the selections of two calls when their
  // steps are consecutive.
  absl::Status Look(const kernels::PagedKv& kv, kernels::Device device) {
    uint32_t step = 0;
    touched_.resize(static_cast<size_t>(kv.num_extents * kv.layout.pages_per_block()));
    KVASIR_RETURN_IF_ERROR(CopyBytes(&step, kv.accesses.step, sizeof(step), device));
    KVASIR_RETURN_IF_ERROR(CopyBytes(touched_.data(), kv.accesses.last_touched,
                                     touched_.size() * sizeof(touched_[0]), device));
    std::vector<bool> selected(touched_.size());
    const auto pages = static_cast<size_t>(kv.layout.pages_per_block());
    for (size_t begin = 0; begin < touched_.size(); begin += pages) {
      const auto first = touched_.begin() + static_cast<std::ptrdiff_t>(begin);
      const auto read = std::count(first, first + static_cast<std::ptrdiff_t>(pages), step);
      if (read == static_cast<std::ptrdiff_t>(pages)) continue;
      for (size_t i = begin; i < begin + pages; ++i) selected[i] = touched_[i] == step;
    }
    if (step == step_ + 1) Compare(selected);
    selected_ = std::move(selected);
    step_ = step;
    return absl::OkStatus();
  }

  double share() const {
    return static_cast<double>(common_) / static_cast<double>(std::max<int64_t>(1, all_));
  }

 private:
  void Compare(const std::vector<bool>& selected) {
    for (size_t i = 0; i < selected.size(); ++i) {
      all_ += selected[i] ? 1 : 0;
      common_ += selected[i] && selected_[i] ? 1 : 0;
    }
  }

  std::vector<uint32_t> touched_;
  std::vector<bool> selected_;
  uint32_t step_ = 0;
  int64_t all_ = 0, common_ = 0;
};

}  // namespace kvasir::worker
