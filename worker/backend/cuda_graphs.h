// Steps as CUDA graphs: the ops of a step are recorded once, and later steps of the same shape are
// launched as one, without a call of an op. Steps differ in what lies in device memory only: tables
// and the step's number are read there. Held by the CUDA backend. Thread-compatible.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "worker/backend/cuda_memory.h"

namespace kvasir::worker {

struct CudaGraphStats {
  int64_t recorded = 0;
  int64_t replayed = 0;
  int64_t nodes = 0;  // of the last graph launched
};

class CudaGraphs {
 public:
  // Everything that launches depend on and that lies on the host: counts, limits, addresses.
  using Shape = std::vector<int64_t>;

  // Before a step's ops: true when they are recorded, and are not to be put on the stream. A shape
  // is recorded when it comes for the second time: the first one loads kernels, and most shapes do
  // not come again.
  // Waits where all shapes are forgotten, for one may be under way.
  absl::StatusOr<bool> Begin(const Shape& shape, const CudaStream& stream, WaitForDevice wait);
  // Behind them: launches what is recorded. Nothing to do where Begin was not called.
  absl::Status End(const CudaStream& stream);
  // Forgets all graphs, and a recording that a failed step has left.
  void Clear(const CudaStream& stream);

  const CudaGraphStats& stats() const { return stats_; }
  // How long the GPU was at the graph that was launched last. REQUIRES: the stream has come behind
  // it.
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
  Shape shape_;  // of the step, unless idle
  CudaGraphStats stats_;
  Event begin_, end_;  // of the last launch
};

}  // namespace kvasir::worker
