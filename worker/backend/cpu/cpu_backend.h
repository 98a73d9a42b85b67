// The backend on the CPU: ops over host memory, spread over the worker's threads. It holds the
// scratch of linear layers (one at a time runs) and of attention. Thread-compatible.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "kernels/base/buffer.h"
#include "kernels/base/scratch.h"
#include "kernels/rope/rope.h"
#include "kvstore/tiers/arena_residency.h"
#include "worker/backend/backend.h"
#include "worker/backend/cpu/cpu_attention.h"

namespace kvasir::worker {

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(kernels::Executor& executor) : Backend(executor) {}

  // Names threads and the instruction sets in use by the model whose layers exist.
  std::string name() const override;
  absl::Status CheckModel(const TransformerOptions&, kernels::DType) const override {
    return absl::OkStatus();
  }
  absl::Status CheckPolicies(std::span<const v1::SparsityPolicy>, const TransformerOptions&,
                             bool /*on_demand*/) const override {
    return absl::OkStatus();
  }
  absl::Status Serve(const v1::AttentionPolicy&, ServedSelector&) const override {
    return absl::OkStatus();
  }
  absl::StatusOr<Memory> Allocate(int64_t bytes) override;
  absl::StatusOr<std::unique_ptr<kvstore::PageResidency>> MakeResidency(
      const kvstore::ResidencyOptions& options) override;
  // Writes pieces in place.
  absl::Status FillPieces(std::span<const MemoryPiece> pieces, const WritePiece& write) override;
  absl::Status FillRandom(const kernels::RandomFillParams& params) override {
    return kernels::FillRandom(params, executor());
  }
  absl::StatusOr<Tensor> Place(Tensor weight) override;
  absl::StatusOr<std::unique_ptr<Linear>> MakeLinear(
      std::span<const kernels::PackedLinear::Part> parts,
      const kernels::PackedLinear::Options& options) override;
  absl::StatusOr<std::unique_ptr<Rope>> MakeRope(const RopeFrequencies& frequencies,
                                                 const KeyForm& form) override;
  // Each step brings its Collective.
  absl::Status JoinRanks(Collective&) override { return absl::OkStatus(); }
  void LeaveRanks() override {}

  absl::StatusOr<std::unique_ptr<kernels::RememberedSelections>> Remember(
      const kernels::MemoryNeeds& needs) override {
    return kernels::MakeSelectionMemory(needs);
  }

  bool StartsSlowly() const override { return false; }
  bool RunsAhead() const override { return false; }
  bool MeasuresMass() const override { return true; }
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
  bool IsOver() const override { return true; }
  absl::Status Collect(StepResult& result) override;

 private:
  // Sixteen huge pages: the unused end of a buffer is small beside a model.
  static constexpr int64_t kWeightBufferBytes = int64_t{32} << 20;

  class CpuLinear;
  struct CpuRope;

  // kernels::Sample with this backend's scratch.
  absl::Status ChooseTokens(const kernels::TensorView& logits,
                            std::span<const kernels::SamplingOptions> options,
                            std::span<kernels::SampledToken> tokens);
  std::set<std::string> ProductPaths() const;
  CpuRope& rope() const;
  CpuRotation rotation() const;

  std::string attention_path_ = "unused";     // AttendPathName of the last Rope made
  std::multiset<std::string> product_paths_;  // engine names of the linear layers that exist
  kernels::HostArena weights_{kWeightBufferBytes};
  kernels::Scratch linear_scratch_, sampling_scratch_;
  CpuAttention attention_;
  std::optional<StepInputs> step_;    // set from BeginStep to Collect
  StepResult result_;                 // of the step
  std::vector<int32_t> row_indices_;  // of the step, in the type that the gather op takes
};

}  // namespace kvasir::worker
