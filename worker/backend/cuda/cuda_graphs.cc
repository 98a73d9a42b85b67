#include "worker/backend/cuda/cuda_graphs.h"

#include <spdlog/spdlog.h>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/cuda_status.h"
#include "kernels/base/status_macros.h"

namespace kvasir::worker {

using kernels::CudaStatus;

namespace {

// Above this all are forgotten: keys come and go with the requests.
constexpr size_t kMostKeys = 256;

struct DestroyGraph {
  void operator()(cudaGraph_t graph) const { cudaGraphDestroy(graph); }
};

}  // namespace

std::string GraphKey::ToString() const {
  std::string text;
  for (size_t i = 0; i < values_.size(); ++i) {
    absl::StrAppend(&text, i == 0 ? "" : " ", names_[i], "=", values_[i]);
  }
  return text;
}

absl::StatusOr<bool> CudaGraphs::Begin(const GraphKey& key, const CudaStream& stream,
                                       WaitForDevice wait) {
  if (seen_.size() == kMostKeys) {
    KVASIR_RETURN_IF_ERROR(wait());
    Clear(stream);
  }
  key_ = key;
  if (graphs_.contains(key)) {
    state_ = State::kReplaying;
    return true;
  }
  if (seen_.insert(key).second) return false;
  KVASIR_RETURN_IF_ERROR(
      CudaStatus(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal),
                 "beginning to record a step"));
  state_ = State::kRecording;
  return false;
}

absl::Status CudaGraphs::End(const CudaStream& stream) {
  const State state = std::exchange(state_, State::kIdle);
  if (state == State::kIdle) return absl::OkStatus();
  if (state == State::kRecording) {
    KVASIR_ASSIGN_OR_RETURN(graphs_[key_], EndRecording(stream));
    ++stats_.recorded;
    spdlog::debug("recorded a step as a graph: {}", key_.ToString());
  } else {
    ++stats_.replayed;
  }
  return Launch(graphs_.at(key_), stream);
}

absl::Status CudaGraphs::Launch(const Graph& graph, const CudaStream& stream) {
  stats_.nodes = graph.nodes;
  KVASIR_RETURN_IF_ERROR(Record(begin_, stream));
  KVASIR_RETURN_IF_ERROR(
      CudaStatus(cudaGraphLaunch(graph.executable.get(), stream.get()), "launching a step"));
  return Record(end_, stream);
}

absl::Status CudaGraphs::Record(Event& event, const CudaStream& stream) {
  if (event == nullptr) {
    cudaEvent_t made = nullptr;
    KVASIR_RETURN_IF_ERROR(CudaStatus(cudaEventCreate(&made), "making an event"));
    event.reset(made);
  }
  return CudaStatus(cudaEventRecord(event.get(), stream.get()), "recording an event");
}

absl::StatusOr<double> CudaGraphs::LaunchMilliseconds() const {
  float milliseconds = 0;
  KVASIR_RETURN_IF_ERROR(CudaStatus(cudaEventElapsedTime(&milliseconds, begin_.get(), end_.get()),
                                    "asking how long a step took"));
  return static_cast<double>(milliseconds);
}

absl::StatusOr<CudaGraphs::Graph> CudaGraphs::EndRecording(const CudaStream& stream) {
  cudaGraph_t recorded = nullptr;
  KVASIR_RETURN_IF_ERROR(
      CudaStatus(cudaStreamEndCapture(stream.get(), &recorded), "recording a step"));
  const std::unique_ptr<CUgraph_st, DestroyGraph> owner(recorded);
  size_t nodes = 0;
  KVASIR_RETURN_IF_ERROR(
      CudaStatus(cudaGraphGetNodes(recorded, nullptr, &nodes), "counting a step's nodes"));
  cudaGraphExec_t executable = nullptr;
  KVASIR_RETURN_IF_ERROR(
      CudaStatus(cudaGraphInstantiate(&executable, recorded, 0), "making a step's graph"));
  Graph graph;
  graph.executable.reset(executable);
  graph.nodes = static_cast<int64_t>(nodes);
  return graph;
}

void CudaGraphs::StopRecording(const CudaStream& stream) {
  if (std::exchange(state_, State::kIdle) != State::kRecording) return;
  cudaGraph_t recorded = nullptr;
  cudaStreamEndCapture(stream.get(), &recorded);
  if (recorded != nullptr) cudaGraphDestroy(recorded);
}

void CudaGraphs::Clear(const CudaStream& stream) {
  StopRecording(stream);
  seen_.clear();
  graphs_.clear();
}

}  // namespace kvasir::worker
