// The backend on one GPU: ops on one stream, in the order in which the model calls them. The host
// waits only in Collect, for the results it needs, and may have put the next step on the stream
// before. All steps share the device memory, because the stream runs one at a time; memory that the
// host fills and reads belongs to one step. Collective operations of ranks are on the stream too
// (cuda_ranks.h). KV is bfloat16, in device memory or read in place from the host's
// (cuda_residency.h). cuda_limits.h lists what the backend cannot do yet. Only in builds with CUDA.
// Thread-compatible.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "kernels/base/device_buffer.h"
#include "kernels/dense/dense_cuda.h"
#include "kernels/gemm/gemm_cuda.h"
#include "worker/backend/backend.h"
#include "worker/backend/cuda/cuda_attention.h"
#include "worker/backend/cuda/cuda_graphs.h"
#include "worker/backend/cuda/cuda_ranks.h"
#include "worker/backend/cuda/cuda_residency.h"
#include "worker/backend/cuda/cuda_rope.h"
#include "worker/backend/cuda/memory/cuda_memory.h"

namespace kvasir::worker {

class CudaBackend final : public Backend {
 public:
  // On the current device. UNAVAILABLE without a usable one.
  static absl::StatusOr<std::unique_ptr<CudaBackend>> Create(kernels::Executor& executor);

  std::string name() const override { return name_; }
  absl::Status CheckModel(const TransformerOptions& model, kernels::DType kv_dtype) const override;
  absl::Status CheckPolicies(std::span<const v1::SparsityPolicy> policies,
                             const TransformerOptions& model, bool on_demand) const override;
  absl::Status Serve(const v1::AttentionPolicy& policy, ServedSelector& served) const override;
  absl::StatusOr<std::optional<int64_t>> DeviceMemoryLeft(double utilization) const override;
  absl::Status ReserveForPrompts(const kernels::KvLayout& layout, int64_t dense_tokens) override;
  absl::StatusOr<Memory> Allocate(int64_t bytes) override;
  absl::StatusOr<std::unique_ptr<kvstore::PageResidency>> MakeResidency(
      const kvstore::ResidencyOptions& options) override;
  // Each thread writes to pinned memory of its own, and pieces are copied from there.
  absl::Status FillPieces(std::span<const MemoryPiece> pieces, const WritePiece& write) override;
  absl::Status FillRandom(const kernels::RandomFillParams& params) override;
  absl::StatusOr<Tensor> Place(Tensor weight) override;
  absl::StatusOr<std::unique_ptr<Linear>> MakeLinear(
      std::span<const kernels::PackedLinear::Part> parts,
      const kernels::PackedLinear::Options& options) override;
  absl::StatusOr<std::unique_ptr<Rope>> MakeRope(const RopeFrequencies& frequencies,
                                                 const KeyForm& form) override;
  absl::Status JoinRanks(Collective& ranks) override;
  void LeaveRanks() override;

  absl::StatusOr<std::unique_ptr<kernels::RememberedSelections>> Remember(
      const kernels::MemoryNeeds& needs) override;

  bool StartsSlowly() const override { return true; }
  bool RunsAhead() const override { return true; }
  bool MeasuresMass() const override { return false; }
  absl::StatusOr<bool> BeginStep(const StepInputs& step) override;
  absl::Status EmbedTokens(const kernels::TensorView& table, const kernels::TensorView& y) override;
  absl::Status TakeSampled(const kernels::TensorView& x, const kernels::TensorView& y) override;
  absl::Status TakeScored(const kernels::TensorView& x, int64_t first,
                          const kernels::TensorView& y) override;
  absl::Status AppendHeads(const kernels::LayerHeads& heads) override;
  absl::Status Select(const LayerQueries& queries) override;
  absl::Status Attend(const LayerQueries& queries, const kernels::TensorView& out) override;
  absl::Status AddOverRanks(const kernels::TensorView& x, const kernels::TensorView& y) override;
  absl::Status GatherColumns(const RankColumns& columns) override;
  absl::Status Sample(const kernels::TensorView& logits) override;
  absl::Status Score(const kernels::TensorView& logits, int64_t first) override;
  absl::Status EndStep(const StepOutputs& outputs) override;
  bool IsOver() const override;
  absl::Status Collect(StepResult& result) override;

  const CudaGraphs& graphs() const { return graphs_; }

 private:
  class GpuLinear;

  // Host state of one step, from BeginStep to Collect.
  struct InFlightStep {
    std::optional<StepInputs> inputs;  // none: the step is collected
    CudaStep step;
    kernels::PinnedBuffer table, results, logits;
    // The device's request and its result: of the sampled rows, and of the scored tokens.
    kernels::PinnedBuffer sampling, scoring;
    CudaEvent fetched;          // recorded after the copy of the results
    int64_t step_of_ranks = 0;  // as CudaRanks counts steps; 0: this rank is alone
  };

  CudaBackend(kernels::Executor& executor, CudaStream stream, kernels::CublasLt lt,
              kernels::DeviceBuffer linear_workspace, std::string name);

  // y = the rows of `table` named by ids in device memory.
  absl::Status TakeRows(const kernels::TensorView& table, std::span<int32_t> ids,
                        const kernels::TensorView& y);
  // Fills the step's table on the host and copies it to the device.
  absl::Status UploadTable(const StepInputs& inputs);
  // Takes memory for the step's results and clears its faults.
  absl::Status PrepareResults(const StepInputs& inputs);
  absl::Status PrepareSampling(const StepInputs& inputs);
  // Copies tokens that the step before samples.
  absl::Status FeedTokens();
  absl::Status ReserveAngles(const CudaRope& rope);
  // For the begun step, which has one token a row.
  GraphKey KeyOfStep() const;
  absl::Status FetchResults(const StepOutputs& outputs);
  // Waits until the step's results are there, or until a rank is missing: then the group is left.
  // Nothing else may wait for the device while ranks are at work there; taking memory would.
  absl::Status Wait(const InFlightStep& own);
  absl::Status WaitForStepBefore();
  void ReadResults(const InFlightStep& own, StepResult& result) const;
  // Makes room for `count` elements. A step in flight may use the memory that is given up.
  template <typename T, typename Buffer>
  absl::StatusOr<T*> Reserve(int64_t count, Buffer& buffer) {
    return worker::Reserve<T>(count, buffer, [this] { return WaitForStepBefore(); });
  }

  const StepBatch& batch() const { return now_->inputs->batch; }
  CudaStep& step() { return now_->step; }

  // Constant after construction.
  const std::string name_;
  CudaStream stream_;
  kernels::CublasLt lt_;
  kernels::DeviceBuffer linear_workspace_;

  KeyForm key_form_;  // of the rope that was made last
  KvArenas arenas_;   // of the residency that was made last
  // Grow to the largest step seen.
  CudaAttention attention_;
  std::optional<kernels::PreparedMemory> prepared_;  // none: no pages are prepared
  std::unique_ptr<CudaRanks> ranks_;                 // null: this rank is alone
  CudaGraphs graphs_;                                // includes calls of ranks_
  kernels::DeviceBuffer table_, results_, angles_, changed_logits_;

  std::array<InFlightStep, 2> own_;
  InFlightStep* now_ = &own_[0];    // the step that began last
  InFlightStep* before_ = nullptr;  // the step before it, unless that is collected
  // Valid from BeginStep to EndStep.
  bool wants_ops_ = false;
  kernels::RopeAngles rope_angles_;
};

}  // namespace kvasir::worker
