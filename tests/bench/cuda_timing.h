// Times GPU ops for benchmarks. Errors end the program.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/base/cuda_status.h"
#include "kernels/base/device_buffer.h"

namespace kvasir::kernels {

inline constexpr int kReplays = 31;
inline constexpr int kWarmUps = 5;

inline void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}
inline void Check(cudaError_t error) { Check(CudaStatus(error, "benchmark")); }
template <typename T>
T Value(absl::StatusOr<T> value) {
  Check(value.status());
  return std::move(value).value();
}

template <typename T>
DeviceBuffer Upload(const std::vector<T>& values) {
  DeviceBuffer buffer =
      Value(DeviceBuffer::Allocate(static_cast<int64_t>(values.size() * sizeof(T))));
  Check(
      cudaMemcpy(buffer.data(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return buffer;
}

// Returns the median over replays of a graph of the launches of `record`.
inline double MedianMicroseconds(const std::function<void(cudaStream_t)>& record) {
  cudaStream_t stream;
  Check(cudaStreamCreate(&stream));
  cudaGraph_t graph;
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  record(stream);
  Check(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t executable;
  Check(cudaGraphInstantiate(&executable, graph, 0));
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin));
  Check(cudaEventCreate(&end));
  std::vector<double> times;
  for (int replay = 0; replay < kReplays + kWarmUps; ++replay) {
    Check(cudaEventRecord(begin, stream));
    Check(cudaGraphLaunch(executable, stream));
    Check(cudaEventRecord(end, stream));
    Check(cudaStreamSynchronize(stream));
    float milliseconds = 0;
    Check(cudaEventElapsedTime(&milliseconds, begin, end));
    if (replay >= kWarmUps) times.push_back(1000.0 * static_cast<double>(milliseconds));
  }
  Check(cudaGraphExecDestroy(executable));
  Check(cudaGraphDestroy(graph));
  Check(cudaStreamDestroy(stream));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace kvasir::kernels
