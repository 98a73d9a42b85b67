// A backend that does what another one does: for those that change some of it, in tests and
// benchmarks. Thread-compatible.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>

#include "worker/backend/backend.h"

namespace kvasir::worker {

class ForwardingBackend : public Backend {
 public:
  // `inner` outlives it.
  explicit ForwardingBackend(Backend& inner) : Backend(inner.executor()), inner_(inner) {}

  std::string name() const override { return inner_.name(); }
  absl::Status CheckModel(const TransformerOptions& model, kernels::DType dtype) const override {
    return inner_.CheckModel(model, dtype);
  }
  absl::Status CheckPolicies(std::span<const v1::SparsityPolicy> policies,
                             const TransformerOptions& model, bool on_demand) const override {
    return inner_.CheckPolicies(policies, model, on_demand);
  }
  absl::Status Serve(const v1::AttentionPolicy& policy, ServedSelector& served) const override {
    return inner_.Serve(policy, served);
  }
  absl::StatusOr<Memory> Allocate(int64_t bytes) override { return inner_.Allocate(bytes); }
  absl::StatusOr<std::unique_ptr<kvstore::PageResidency>> MakeResidency(
      const kvstore::ResidencyOptions& options) override {
    return inner_.MakeResidency(options);
  }
  absl::Status FillPieces(std::span<const MemoryPiece> pieces, const WritePiece& write) override {
    return inner_.FillPieces(pieces, write);
  }
  absl::Status FillRandom(const kernels::RandomFillParams& params) override {
    return inner_.FillRandom(params);
  }
  absl::StatusOr<Tensor> Place(Tensor weight) override { return inner_.Place(std::move(weight)); }
  absl::StatusOr<std::unique_ptr<Linear>> MakeLinear(
      std::span<const kernels::PackedLinear::Part> parts,
      const kernels::PackedLinear::Options& options) override {
    return inner_.MakeLinear(parts, options);
  }
  absl::StatusOr<std::unique_ptr<Rope>> MakeRope(const RopeFrequencies& frequencies,
                                                 const KeyForm& form) override {
    return inner_.MakeRope(frequencies, form);
  }
  absl::Status JoinRanks(Collective& ranks) override { return inner_.JoinRanks(ranks); }
  void LeaveRanks() override { inner_.LeaveRanks(); }
  absl::Status ReserveForPrompts(const kernels::KvLayout& layout, int64_t dense_tokens) override {
    return inner_.ReserveForPrompts(layout, dense_tokens);
  }
  absl::StatusOr<std::unique_ptr<kernels::RememberedSelections>> Remember(
      const kernels::MemoryNeeds& needs) override {
    return inner_.Remember(needs);
  }
  absl::Status EmbedTokens(const kernels::TensorView& table,
                           const kernels::TensorView& y) override {
    return inner_.EmbedTokens(table, y);
  }
  absl::Status TakeSampled(const kernels::TensorView& x, const kernels::TensorView& y) override {
    return inner_.TakeSampled(x, y);
  }
  absl::Status TakeScored(const kernels::TensorView& x, int64_t first,
                          const kernels::TensorView& y) override {
    return inner_.TakeScored(x, first, y);
  }
  absl::Status AppendHeads(const kernels::LayerHeads& heads) override {
    return inner_.AppendHeads(heads);
  }
  absl::Status Select(const LayerQueries& queries) override { return inner_.Select(queries); }
  absl::Status Attend(const LayerQueries& queries, const kernels::TensorView& out) override {
    return inner_.Attend(queries, out);
  }
  absl::Status AddOverRanks(const kernels::TensorView& x, const kernels::TensorView& y) override {
    return inner_.AddOverRanks(x, y);
  }
  absl::Status GatherColumns(const RankColumns& columns) override {
    return inner_.GatherColumns(columns);
  }
  absl::Status Sample(const kernels::TensorView& logits) override { return inner_.Sample(logits); }
  absl::Status Score(const kernels::TensorView& logits, int64_t first) override {
    return inner_.Score(logits, first);
  }
  bool StartsSlowly() const override { return inner_.StartsSlowly(); }
  bool RunsAhead() const override { return inner_.RunsAhead(); }
  bool MeasuresMass() const override { return inner_.MeasuresMass(); }
  bool IsOver() const override { return inner_.IsOver(); }
  absl::StatusOr<bool> BeginStep(const StepInputs& step) override { return inner_.BeginStep(step); }
  absl::Status EndStep(const StepOutputs& outputs) override { return inner_.EndStep(outputs); }
  absl::Status Collect(StepResult& result) override { return inner_.Collect(result); }

 protected:
  Backend& inner() const { return inner_; }

 private:
  Backend& inner_;
};

}  // namespace kvasir::worker
