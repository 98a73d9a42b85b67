// Attention of a layer on the GPU, from its queries to their outputs: selection, attention over
// pages of both tiers, and the counts for accounting. It holds the step's selection and all working
// memory. Called by the CUDA backend, with the stream that everything is put on. Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"

#include "kernels/attention/attend.h"
#include "kernels/attention/attend_cuda.h"
#include "kernels/attention/prepared_pages.h"
#include "kernels/base/device_buffer.h"
#include "kernels/paged/grouped_positions.h"
#include "kernels/paged/kv_tensor_maps.h"
#include "kernels/paged/page_selection.h"
#include "kernels/rope/rope_positions_cuda.h"
#include "kernels/sparse/common/cuda_selector.h"
#include "worker/backend/backend.h"
#include "worker/backend/cuda/cuda_graphs.h"
#include "worker/backend/cuda/cuda_ranks.h"
#include "worker/backend/cuda/cuda_residency.h"
#include "worker/backend/cuda/cuda_select.h"
#include "worker/backend/cuda/memory/cuda_memory.h"
#include "worker/backend/cuda/step_table.h"

namespace kvasir::worker {

// A step as kernels see it. It points to device memory. Lives as long as the step.
struct CudaStep {
  StepShape shape;
  StepTable table;
  kernels::PagedKv kv;
  DeviceStepOutputs results;
  kernels::CudaRopePositions* positions = nullptr;    // of un-rotated keys; null: keys are rotated
  kernels::GroupedPositions grouped;                  // of un-rotated keys; off: compact ones
  kernels::QueryRotation rotation;                    // of queries, where keys are rotated
  CudaRanks* ranks = nullptr;                         // null: this rank is alone
  const kernels::PreparedMemory* prepared = nullptr;  // null: pages are read where they lie
};

class CudaAttention {
 public:
  // In steps with pages on disk (PagedKv.on_disk), what selections name is brought this way.
  void BringWith(const PagesOnDisk& on_disk) { on_disk_ = on_disk; }
  // Takes the memory that the step needs. `arenas` hold all pages, the same ones in every step.
  absl::Status BeginStep(const StepInputs& inputs, const CudaStep& step, const KvArenas& arenas,
                         const CudaStream& stream, WaitForDevice wait);
  absl::Status Select(const CudaStep& step, const LayerQueries& queries, cudaStream_t stream);
  absl::Status Attend(const CudaStep& step, const LayerQueries& queries,
                      const kernels::TensorView& out, cudaStream_t stream);
  // Appends to the graph key every host value of the begun step, besides its StepShape, that
  // launches of Select and Attend depend on.
  void AddTo(GraphKey& key) const;
  // `counts` are the step's, in host memory.
  static void Report(const CudaStep& step, std::span<const kernels::SelectedCounts> counts,
                     AttentionMeter& meter);

 private:
  // New memory is zeroed.
  absl::Status ReserveArrivals(int64_t rows, const CudaStream& stream, WaitForDevice wait);
  // Reserves angles for the positions at which the step reads un-rotated keys.
  absl::Status ReservePositions(const StepInputs& inputs, const CudaStep& step,
                                const CudaStream& stream, WaitForDevice wait);
  int64_t WindowTokens(int64_t layer) const {
    return windows_.tokens.empty() ? 0 : windows_.tokens[static_cast<size_t>(layer)];
  }
  const kernels::PageSelection& SelectionOf(int64_t layer) const {
    return WindowTokens(layer) == 0 ? selection_ : window_selection_;
  }
  // Returns the ranges that serve a layer. In one with a window of the model a single range, for
  // which `window` is the place, has all tiles.
  std::span<const SelectorRange> RangesOf(const CudaStep& step, int64_t layer,
                                          SelectorRange& window) const;
  // Plans which ranges' prompts read prepared pages.
  void PlanPrepared(const StepInputs& inputs, const CudaStep& step);
  // Returns the call for query tiles [begin, end).
  kernels::CudaAttendParams ParamsOf(const CudaStep& step, const LayerQueries& queries,
                                     const kernels::TensorView& out, int64_t begin,
                                     int64_t end) const;
  // Returns the place for the counts of query tiles [begin, end).
  std::span<kernels::SelectedCounts> Counts(const CudaStep& step, int64_t layer, int64_t begin,
                                            int64_t end) const;
  // Brings what the layer's selections name, where pages lie on disk only.
  absl::Status BringPages(const CudaStep& step, int64_t layer, cudaStream_t stream) const;
  absl::Status AttendDecode(const kernels::CudaAttendParams& params, cudaStream_t stream);
  // Attends for the tiles of several queries.
  absl::Status AttendPrefill(const CudaStep& step, const LayerQueries& queries,
                             const kernels::TensorView& out, cudaStream_t stream);
  // Attends for rows that the terminator may end early: query tiles from `first_block` on.
  absl::Status AttendEnding(const CudaStep& step, const kernels::CudaTerminator& terminator,
                            const kernels::CudaAttendParams& params, int64_t first_block,
                            cudaStream_t stream);

  PagesOnDisk on_disk_;
  std::optional<kernels::KvTensorMaps> maps_;
  SelectLimits limits_;               // of the step
  CudaSelectRanks select_ranks_;      // of the step
  kernels::LayerPart part_;           // of the step's layers, that this rank holds
  kernels::PageSelection selection_;  // headers lie in the step's table
  // For each range of the step; none: its pages are read where they lie.
  std::vector<std::optional<kernels::PreparedPages>> prepared_;
  LayerWindows windows_;  // of the model
  // The selection in layers with a window of the model. The rows of `all` in selection_ must stay.
  kernels::PageSelection window_selection_;
  kernels::DeviceBuffer window_headers_;
  kernels::DeviceBuffer entries_;
  kernels::DeviceBuffer workspace_;
  kernels::DeviceBuffer arrivals_;  // for AttendDecode
  kernels::DeviceBuffer placed_queries_;
  kernels::DeviceRopePositions rope_;  // of the step; off: keys are cached rotated
};

}  // namespace kvasir::worker
