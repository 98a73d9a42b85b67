// Steps as CUDA graphs: the ops of a step are recorded once, and later steps of the same key are
// one launch, without a call of an op. Steps of a key differ only in device memory: kernels read
// tables and the step's number there. Held by the CUDA backend. Thread-compatible.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "worker/backend/cuda/memory/cuda_memory.h"

namespace kvasir::worker {

struct CudaGraphStats {
  int64_t recorded = 0;
  int64_t replayed = 0;
  int64_t nodes = 0;  // of the last graph launched
};

// The host values that a step's launches depend on: counts, limits, addresses. Each is added under
// its name, in the same order in every step. Steps with equal keys have equal launches.
class GraphKey {
 public:
  void Add(absl::string_view name, int64_t value) {
    names_.push_back(name);
    values_.push_back(value);
  }
  void Add(absl::string_view name, const void* address) {
    Add(name, reinterpret_cast<int64_t>(address));
  }
  // Every field of a plain struct that launches take, by its bytes: none can be forgotten.
  template <typename Launch>
  void AddAll(absl::string_view name, const Launch& launch) {
    static_assert(std::has_unique_object_representations_v<Launch>, "padding has no value");
    static_assert(sizeof(Launch) % sizeof(int64_t) == 0);
    for (const int64_t value :
         std::bit_cast<std::array<int64_t, sizeof(Launch) / sizeof(int64_t)>>(launch)) {
      Add(name, value);
    }
  }

  // Returns "name=value ..." of all that was added.
  std::string ToString() const;

  friend bool operator<(const GraphKey& a, const GraphKey& b) { return a.values_ < b.values_; }

 private:
  std::vector<absl::string_view> names_;  // literals
  std::vector<int64_t> values_;
};

class CudaGraphs {
 public:
  // Called before a step's ops. Returns true when the ops are already recorded and must not be put
  // on the stream. A key is recorded when it comes for the second time: the first time loads
  // kernels, and most keys do not come again. Waits where all keys are forgotten, because a graph
  // may be in flight.
  absl::StatusOr<bool> Begin(const GraphKey& key, const CudaStream& stream, WaitForDevice wait);
  // Called after the ops: launches what is recorded. Does nothing if Begin was not called.
  absl::Status End(const CudaStream& stream);
  // Forgets all graphs, and a recording left by a failed step.
  void Clear(const CudaStream& stream);
  // Drops what is being recorded, if anything is.
  void StopRecording(const CudaStream& stream);

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

  std::set<GraphKey> seen_;
  std::map<GraphKey, Graph> graphs_;
  State state_ = State::kIdle;
  GraphKey key_;  // of the step, unless idle
  CudaGraphStats stats_;
  Event begin_, end_;  // around the last launch
};

}  // namespace kvasir::worker
