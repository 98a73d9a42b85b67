// Where a worker computes: the memory that ops read and write, and one method for each op that the
// model calls. The transformer and the attention layer are written once over it. It hides whether
// an op takes an executor or a stream, its scratch, and everything between a layer's queries and
// the attention's output: tables of the step, selections, where those lie. Each worker has one,
// chosen at start. It makes linear layers, rotary embeddings and placed weights when a model is
// loaded, and they are passed back to it only.
//
// A step is wholly on one side: tensors that ops take lie in memory of Allocate or Place, and no op
// asks. Thread-compatible: used by the engine's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/append/append_heads.h"
#include "kernels/base/executor.h"
#include "kernels/base/tensor.h"
#include "kernels/dense/random_fill.h"
#include "kernels/gemm/gemm.h"
#include "kernels/paged/grouped_positions.h"
#include "kernels/paged/paged_kv.h"
#include "kernels/sparse/reuse/reusing_select.h"
#include "kvstore/tiers/page_residency.h"
#include "proto/kvasir/v1/sparsity.pb.h"
#include "worker/batch/attention_meter.h"
#include "worker/batch/step_batch.h"
#include "worker/checkpoint/memory.h"
#include "worker/checkpoint/rope_frequencies.h"
#include "worker/checkpoint/shard_plan.h"
#include "worker/checkpoint/weights.h"
#include "worker/parallel/collective.h"

namespace kvasir::worker {

struct TransformerOptions;  // worker/model/transformer.h

// y = x * w^T + bias, with the epilogue of the call. Outlived by the backend that made it.
class Linear {
 public:
  virtual ~Linear() = default;
  // Errors are those of kernels::PackedLinear::Run.
  virtual absl::Status Run(const kernels::LinearParams& params) = 0;
  // Whether kAdd of so many rows should normalize the sums (LinearParams::next_norm), and not the
  // layer that reads them next. Both give the same bits.
  virtual bool normalizes_sums(int64_t rows) const = 0;
  virtual int64_t out_features() const = 0;
};

// How keys are cached. Queries are rotated likewise.
struct KeyForm {
  bool rotated = true;  // by their own positions; false: attention rotates them
  // For un-rotated keys; off: they are rotated to the compact positions that selections give.
  kernels::GroupedPositions grouped = {};
};

// A backend's form of a model's rotary embedding.
class Rope {
 public:
  virtual ~Rope() = default;
};

// Writes the bytes of the piece with that index to host memory; `thread` is that of
// Executor::ParallelFor.
using WritePiece = std::function<absl::Status(int64_t piece, int thread, std::byte* out)>;

// Arguments that all ops of one step share. Borrowed from BeginStep to the step's Collect.
struct StepInputs {
  const StepBatch& batch;
  const kernels::PagedKv& kv;
  Rope& rope;
  const ShardPlan& shard;
  AttentionMeter& meter;
  Collective& collective;
  int64_t vocab_size = 0;
};

// The queries of one layer.
struct LayerQueries {
  int64_t layer = 0;
  float scale = 0;        // of logits
  kernels::TensorView q;  // [tokens, heads, head_dim]
};

// Results of the layers.
struct StepOutputs {
  // [tokens, hidden], after the last layer's attention. Every token of a row is checked, also where
  // nothing is sampled, because its KV would corrupt what follows. The MLP after it is computed for
  // the rows whose logits are used; Sample and Score refuse logits that are not finite.
  kernels::TensorView residual;
  kernels::TensorView logits;  // [sampled rows, vocab] float32
};

// A matrix whose columns are divided among ranks. Rank r holds columns [r * width, (r + 1) * width)
// in its `own`. The last rank may hold fewer: then its rows are packed at the beginning of `own`.
struct RankColumns {
  kernels::TensorView own;       // [rows, width]
  kernels::TensorView gathered;  // [num_ranks * rows, width]: scratch
  kernels::TensorView y;         // [rows, columns]
  int64_t first_rank = 0;        // the rank whose columns are the first of y
};

struct StepResult {
  std::vector<kernels::SampledToken> tokens;  // of the sampled rows
  std::vector<kernels::SampledToken> scores;  // of the scored tokens: each one's given token
  // [sampled rows, vocab] float32, in host memory until the next step. Empty unless the batch keeps
  // them.
  kernels::TensorView logits;
  std::vector<uint8_t> row_is_finite;  // per row of the batch; 0: it has a NaN or infinity
};

class Backend {
 public:
  virtual ~Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  // "cpu, 8 threads"
  virtual std::string name() const = 0;
  // For work in host memory, wherever the model runs.
  kernels::Executor& executor() const { return executor_; }

  // --- when a model is loaded, or an engine made ---

  // UNIMPLEMENTED, naming the flag, for what the backend cannot do. CheckModel is called before
  // weights are read, CheckPolicies before memory is taken for an engine, in which pages may lie on
  // disk only if it is `on_demand` (kernels/paged/absent_pages.h).
  virtual absl::Status CheckModel(const TransformerOptions& model,
                                  kernels::DType kv_dtype) const = 0;
  virtual absl::Status CheckPolicies(std::span<const v1::SparsityPolicy> policies,
                                     const TransformerOptions& model, bool on_demand) const = 0;
  // Adds to the stages of a policy what the device itself needs to run them. REQUIRES: the policy
  // passed CheckPolicies, and `served` was made of it.
  virtual absl::Status Serve(const v1::AttentionPolicy& policy, ServedSelector& served) const = 0;

  // Returns the bytes of the device's own memory that are left within its share `utilization`; none
  // where the backend computes in host memory.
  virtual absl::StatusOr<std::optional<int64_t>> DeviceMemoryLeft(double /*utilization*/) const {
    return std::nullopt;
  }

  // Takes memory that steps need beside activations and that grows with the context, so that the KV
  // is given no more than the rest. `dense_tokens`: of the longest prompt that is read densely; 0
  // where none is. RESOURCE_EXHAUSTED when there is no memory.
  virtual absl::Status ReserveForPrompts(const kernels::KvLayout& /*layout*/,
                                         int64_t /*dense_tokens*/) {
    return absl::OkStatus();
  }

  // RESOURCE_EXHAUSTED when there is no memory.
  virtual absl::StatusOr<Memory> Allocate(int64_t bytes) = 0;
  // Makes the memory of a KV store's tiers, with the mechanism that moves pages between them. The
  // backend outlives it. One at a time is in use.
  virtual absl::StatusOr<std::unique_ptr<kvstore::PageResidency>> MakeResidency(
      const kvstore::ResidencyOptions& options) = 0;
  // Fills pieces of memory of Allocate, each of a few MiB: calls `write` for every one, on the
  // executor's threads, and moves a written piece to its place while others are written. Returns
  // when all are in place. Returns the error of the first piece that fails; then the contents of
  // the memory are unspecified.
  virtual absl::Status FillPieces(std::span<const MemoryPiece> pieces, const WritePiece& write) = 0;
  // Fills memory of Allocate with the numbers of kernels/dense/random_fill.h.
  virtual absl::Status FillRandom(const kernels::RandomFillParams& params) = 0;
  // Places a weight that ops read directly. One that is empty, or lies in memory of Allocate, is
  // returned unchanged.
  virtual absl::StatusOr<Tensor> Place(Tensor weight) = 0;
  // Parts and options are those of kernels::PackedLinear::Create; parts are copied. They lie in
  // host memory, or in memory of Allocate; in the latter, weights have the dtype of the options'
  // input.
  virtual absl::StatusOr<std::unique_ptr<Linear>> MakeLinear(
      std::span<const kernels::PackedLinear::Part> parts,
      const kernels::PackedLinear::Options& options) = 0;
  virtual absl::StatusOr<std::unique_ptr<Rope>> MakeRope(const RopeFrequencies& frequencies,
                                                         const KeyForm& form) = 0;

  // Returns memory for the selections of one sequence; step batches refer to it
  // (TileInfo::memory). RESOURCE_EXHAUSTED when there is none left.
  virtual absl::StatusOr<std::unique_ptr<kernels::RememberedSelections>> Remember(
      const kernels::MemoryNeeds& needs) = 0;

  // Sets the other ranks, replacing earlier ones; all ranks call it at the same time. Not needed
  // where a rank is alone. UNAVAILABLE or DEADLINE_EXCEEDED when they do not come together.
  virtual absl::Status JoinRanks(Collective& ranks) = 0;
  // Ends everything that waits for the other ranks, and waits for the device. Then no step may
  // begin until JoinRanks. Ranks that end their part may wait for each other in it, so each calls
  // it as soon as its group is over, before it waits for the others in another way.
  virtual void LeaveRanks() = 0;

  // --- a step: BeginStep, ops that depend on nothing but its shape, EndStep, Collect ---

  // Whether ops take much longer at first use, and at the first use with a given number of tokens.
  // Then a worker uses them before it serves.
  virtual bool StartsSlowly() const = 0;

  // Whether a step may begin before the one before it is collected (one step and no more). Then the
  // earlier step may feed tokens of the batch (StepBatch::fed_by), wherever they are sampled.
  virtual bool RunsAhead() const = 0;

  // Whether Attend tells the meter how much attention mass the selections kept.
  virtual bool MeasuresMass() const = 0;

  // Computes the bounds of truncated blocks again. Returns false if the ops must not be called,
  // because they were recorded in an earlier step with the same ones.
  virtual absl::StatusOr<bool> BeginStep(const StepInputs& step) = 0;

  // y [tokens, hidden] = rows of `table` named by the step's tokens.
  virtual absl::Status EmbedTokens(const kernels::TensorView& table,
                                   const kernels::TensorView& y) = 0;
  // y [sampled rows, hidden] = rows of x [tokens, hidden] whose logits are used.
  virtual absl::Status TakeSampled(const kernels::TensorView& x, const kernels::TensorView& y) = 0;
  // y [rows, hidden] = the rows of x that belong to scored tokens [first, first + rows) of the
  // step.
  virtual absl::Status TakeScored(const kernels::TensorView& x, int64_t first,
                                  const kernels::TensorView& y) = 0;
  // Turns a layer's projected heads into rotated queries, and into keys and values in the step's
  // pages (kernels/append/append_heads.h).
  virtual absl::Status AppendHeads(const kernels::LayerHeads& heads) = 0;
  // Chooses what the queries of each row attend to, by the row's policy: reuse gate, selector,
  // positions, pruner, contract of quality. `queries` has all query heads of the rank's KV heads,
  // also those that other ranks attend with. Valid until Attend of the same layer.
  virtual absl::Status Select(const LayerQueries& queries) = 0;
  // out [tokens, heads, head_dim] = attention of this rank's heads to the selected tokens. Reports
  // to the meter. Rows that need an absent page become NaN, and no others.
  virtual absl::Status Attend(const LayerQueries& queries, const kernels::TensorView& out) = 0;

  // --- ops that all ranks call in the same order; not called where a rank is alone ---

  // y += sum over ranks of their x, rounded first, in the same bits on every rank. x [rows, hidden]
  // float32 is overwritten; rows are those of the step's tokens, or those that sample.
  virtual absl::Status AddOverRanks(const kernels::TensorView& x, const kernels::TensorView& y) = 0;
  // y = columns of the ranks from first_rank on, side by side, as many as fit.
  virtual absl::Status GatherColumns(const RankColumns& columns) = 0;

  // Chooses the tokens of the step's result from logits [sampled rows, vocab] float32, as the batch
  // says. Every backend chooses the same ones for the same logits (kernels/sampling/sampling.h).
  virtual absl::Status Sample(const kernels::TensorView& logits) = 0;
  // Finds the log probabilities of the tokens that follow scored tokens [first, first + rows), from
  // logits [rows, vocab] float32. Each scored token is scored once.
  virtual absl::Status Score(const kernels::TensorView& logits, int64_t first) = 0;

  // A device may still be at work: the host has time for what does not need the result.
  virtual absl::Status EndStep(const StepOutputs& outputs) = 0;
  // Whether Collect would find the oldest step over. Errors are left to Collect.
  virtual bool IsOver() const = 0;
  // Waits for the oldest step that is not collected, and returns its result.
  virtual absl::Status Collect(StepResult& result) = 0;

 protected:
  // `executor` outlives the backend.
  explicit Backend(kernels::Executor& executor) : executor_(executor) {}

 private:
  kernels::Executor& executor_;
};

}  // namespace kvasir::worker
