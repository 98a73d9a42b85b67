// Steps as CUDA graphs: the ops of a step are recorded once, and later steps of the same shape are
// one launch, without a call of an op. Steps of a shape differ only in device memory: kernels read
// tables and the step's number there. Held by the CUDA backend. Thread-compatible.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "worker/backend/cuda/cuda_memory.h"

namespace kvasir::worker {

struct CudaGraphStats {
  int64_t recorded = 0;
  int64_t replayed = 0;
  int64_t nodes = 0;  // of the last graph launched
};

class CudaGraphs {
 public:
  // Every host value that launches depend on: counts, limits, addresses.
  using Shape = std::vector<int64_t>;

  // Called before a step's ops. Returns true when the ops are already recorded and must not be put
  // on the stream. A shape is recorded when it comes for the second time: the first time loads
  // kernels, and most shapes do not come again. Waits where all shapes are forgotten, because a
  // graph may be in flight.
  absl::StatusOr<bool> Begin(const Shape& shape, const CudaStream& stream, WaitForDevice wait);
  // Called after the ops: launches what is recorded. Does nothing if Begin was not called.
  absl::Status End(const CudaStream& stream);
  // Forgets all graphs, and a recording left by a failed step.
  void Clear(const CudaStream& stream);

  const CudaGraphStats& stats() const { return stats_; }
  // Time that the GPU spent on the graph launched last. REQUIRES: the stream has passed that graph.
  absl::StatusOr<double> LaunchMilliseconds() const;

 private:
  struct Destroy {
    void operator()(cudaGraphExec_t graph) const { cudaGraphExecDestroy(graph); }
    void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
  };
  using Event = std::unique_ptr<CUevent_st, Destroy>;
  struct Graph {
    std::unique_ptr<CUgraphExec_st, Destroy> executable;
    int64_t nodes = 0;
  };
  enum class State { kIdle, kRecording, kReplaying };

  absl::StatusOr<Graph> EndRecording(const CudaStream& stream);
  absl::Status Launch(const Graph& graph, const CudaStream& stream);
  static absl::Status Record(Event& event, const CudaStream& stream);

  std::set<Shape> seen_;
  std::map<Shape, Graph> graphs_;
  State state_ = State::kIdle;
  Shape shape_;  // shape of the step, unless idle
  CudaGraphStats stats_;
  Event begin_, end_;  // around the last launch
};

}  // namespace kvasir::worker
