// Measurements of decode_step_bench, of one policy at one context.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "proto/kvasir/v1/worker.pb.h"

namespace kvasir::worker {

inline double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + std::ssize(values) / 2, values.end());
  return values[values.size() / 2];
}
inline double Mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

struct Measured {
  std::vector<double> wall_ms, gpu_ms;
  std::vector<double> before_us, around_us, behind_us;  // times of the host
  int64_t attended_tokens = 0;  // sum over steps, rows of the batch, layers and KV heads
  int64_t selected = 0;         // number of (step, row, layer, KV head) whose selector ran
  int64_t nodes = 0;
  double overlap = 0;
  int64_t hits = 0, misses = 0, promoted_bytes = 0;  // sums over steps

  void Add(const v1::RowAccounting& row) {
    attended_tokens += static_cast<int64_t>(row.attended_tokens());
    selected +=
        static_cast<int64_t>(row.stages_run_size() > 0 ? row.stages_run(0) : row.attending_rows());
  }
};

}  // namespace kvasir::worker
