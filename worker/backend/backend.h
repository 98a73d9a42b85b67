// Where a worker computes: the memory that ops read and write, and one method for each op that the
// model calls. The transformer and the attention layer are written once over it; hidden behind it
// is whether an op takes an executor or a stream, its scratch, and everything between a layer's
// queries and what they attended to: tables of the step, selections, where those lie. One for each
// worker, chosen at start. Linear layers, rotary embeddings and placed weights are made by it when
// a model is loaded, and go back to it only.
//
// A step is wholly on one side: tensors that ops take lie in memory of Allocate or Place, and no op
// asks. Thread-compatible: the engine's thread.
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

#include "kernels/base/executor.h"
#include "kernels/base/tensor.h"
#include "kernels/dense/gemm.h"
#include "kernels/dense/random_fill.h"
#include "kernels/paged/append_heads.h"
#include "kernels/paged/grouped_positions.h"
#include "kernels/paged/paged_kv.h"
#include "kernels/sparse/reuse/reusing_select.h"
#include "kvstore/tiers/page_residency.h"
#include "proto/kvasir/v1/sparsity.pb.h"
#include "worker/attention_meter.h"
#include "worker/backend/memory.h"
#include "worker/model/rope_frequencies.h"
#include "worker/model/shard_plan.h"
#include "worker/model/weights.h"
#include "worker/parallel/collective.h"
#include "worker/step_batch.h"

namespace kvasir::worker {

struct TransformerOptions;  // worker/model/transformer.h

// y = x * w^T + bias, and what stands around it. The backend that made it outlives it.
class Linear {
 public:
  virtual ~Linear() = default;
  // Errors as of kernels::PackedLinear::Run.
  virtual absl::Status Run(const kernels::LinearParams& params) = 0;
  virtual int64_t out_features() const = 0;
};

// How keys are cached, and with them queries are.
struct KeyForm {
  bool rotated = true;  // by their own positions; else attention rotates them
  // Of un-rotated keys; off: to the compact positions that selections give.
  kernels::GroupedPositions grouped = {};
};

// What a backend keeps of a model's rotary embedding.
class Rope {
 public:
  virtual ~Rope() = default;
};

// Writes the bytes of a piece, by its index, to host memory; `thread` as of Executor::ParallelFor.
using WritePiece = std::function<absl::Status(int64_t piece, int thread, std::byte* out)>;

// What the ops of one step share. Borrowed from BeginStep to its Collect.
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

// What the layers left behind.
struct StepOutputs {
  // [tokens, hidden]: every token of a row counts, also where nothing is sampled, for its KV would
  // poison what follows.
  kernels::TensorView residual;
  kernels::TensorView logits;  // [sampled rows, vocab] float32
};

// Columns of a matrix that ranks hold parts of. Each has as many as `own` is wide, but for the
// last, which has what is left of `y`: its rows lie close together at the beginning of its `own`.
struct RankColumns {
  kernels::TensorView own;       // [rows, width]
  kernels::TensorView gathered;  // [num_ranks * rows, width]: working memory
  kernels::TensorView y;         // [rows, columns]
  int64_t first_rank = 0;        // whose columns are y's first
};

struct StepResult {
  std::vector<kernels::SampledToken> tokens;  // of the sampled rows
  // [sampled rows, vocab] float32, in host memory until the next step; empty unless the batch keeps
  // them.
  kernels::TensorView logits;
  std::vector<uint8_t> row_is_finite;  // per row of the batch; 0: NaN or infinity reached it
};

class Backend {
 public:
  virtual ~Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  // "cpu, 8 threads"
  virtual std::string name() const = 0;
  // For what is done in host memory wherever the model runs.
  kernels::Executor& executor() const { return executor_; }

  // --- when a model is loaded, or an engine made ---

  // UNIMPLEMENTED, naming the flag, for what the backend cannot do: before weights are read, and
  // before memory is taken for an engine.
  virtual absl::Status CheckModel(const TransformerOptions& model,
                                  kernels::DType kv_dtype) const = 0;
  virtual absl::Status CheckPolicies(std::span<const v1::SparsityPolicy> policies,
                                     int64_t num_ranks) const = 0;

  // Bytes that are left of `utilization`, a share, of the device's own memory; none where it
  // computes in host memory.
  virtual absl::StatusOr<std::optional<int64_t>> DeviceMemoryLeft(double /*utilization*/) const {
    return std::nullopt;
  }

  // RESOURCE_EXHAUSTED when there is no memory.
  virtual absl::StatusOr<Memory> Allocate(int64_t bytes) = 0;
  // Of a KV store: memory of its tiers, and what moves pages between them. The backend outlives it.
  // One at a time is in use.
  virtual absl::StatusOr<std::unique_ptr<kvstore::PageResidency>> MakeResidency(
      const kvstore::ResidencyOptions& options) = 0;
  // Fills pieces of memory of Allocate, of a few MiB each: `write` is called for every one, on the
  // executor's threads, and what it writes is on its way to the piece while others are written.
  // Returns when all are there. The error of the first piece that fails; no memory then has
  // specified contents.
  virtual absl::Status FillPieces(std::span<const MemoryPiece> pieces, const WritePiece& write) = 0;
  // Numbers as of kernels/dense/random_fill.h, in memory of Allocate.
  virtual absl::Status FillRandom(const kernels::RandomFillParams& params) = 0;
  // A weight that ops read as it is; what is empty, or lies in memory of Allocate, stays as it is.
  virtual absl::StatusOr<Tensor> Place(Tensor weight) = 0;
  // Parts and options as of kernels::PackedLinear::Create; copied. The parts lie in host memory, or
  // in memory of Allocate, and weights then have the dtype of the options' input.
  virtual absl::StatusOr<std::unique_ptr<Linear>> MakeLinear(
      std::span<const kernels::PackedLinear::Part> parts,
      const kernels::PackedLinear::Options& options) = 0;
  virtual absl::StatusOr<std::unique_ptr<Rope>> MakeRope(const RopeFrequencies& frequencies,
                                                         const KeyForm& form) = 0;

  // Memory for the selections of one sequence; step batches name it (BlockInfo::memory).
  // RESOURCE_EXHAUSTED when there is none.
  virtual absl::StatusOr<std::unique_ptr<kernels::RememberedSelections>> Remember(
      const kernels::MemoryNeeds& needs) = 0;

  // Who the other ranks are from now on, in place of those before; all of them call it at the same
  // time. Not needed where a rank is alone. UNAVAILABLE or DEADLINE_EXCEEDED when they do not come
  // together.
  virtual absl::Status JoinRanks(Collective& ranks) = 0;

  // --- a step: BeginStep, ops that depend on nothing but its shape, EndStep, Collect ---

  // Whether ops take much longer when they are used for the first time, with so many tokens as
  // never before: a worker then uses them before it serves.
  virtual bool StartsSlowly() const = 0;

  // Whether a step may begin before the one before it is collected, one and no more. Then tokens of
  // its batch may be fed by that one (StepBatch::fed_by), wherever they are sampled.
  virtual bool RunsAhead() const = 0;

  // Whether Attend tells the meter how much attention mass selections kept.
  virtual bool MeasuresMass() const = 0;

  // Makes the bounds of truncated blocks anew. False: the ops are not to be called, for they are
  // known from an earlier step that had the same ones.
  virtual absl::StatusOr<bool> BeginStep(const StepInputs& step) = 0;

  // y [tokens, hidden] = rows of `table` that the step's tokens name.
  virtual absl::Status EmbedTokens(const kernels::TensorView& table,
                                   const kernels::TensorView& y) = 0;
  // y [sampled rows, hidden] = rows of x [tokens, hidden] whose logits are wanted.
  virtual absl::Status TakeSampled(const kernels::TensorView& x, const kernels::TensorView& y) = 0;
  // From a layer's projected heads to rotated queries, and to keys and values in the step's pages
  // (kernels/paged/append_heads.h).
  virtual absl::Status AppendHeads(const kernels::LayerHeads& heads) = 0;
  // Chooses what the queries of each row attend to, by the row's policy: reuse gate, selector,
  // positions, pruner, contract of quality. `queries` has all query heads of the rank's KV heads,
  // also those that other ranks attend with. Holds until Attend of the same layer.
  virtual absl::Status Select(const LayerQueries& queries) = 0;
  // out [tokens, heads, head_dim] = attention of this rank's heads to what was selected; tells the
  // meter. Rows that need an absent page become NaN, and no others.
  virtual absl::Status Attend(const LayerQueries& queries, const kernels::TensorView& out) = 0;

  // --- of a step, what all ranks do in the same order; not called where a rank is alone ---

  // y += sum over ranks of their x, which is rounded first, in the same bits on every rank; x
  // [tokens, hidden] float32 is overwritten.
  virtual absl::Status AddOverRanks(const kernels::TensorView& x, const kernels::TensorView& y) = 0;
  // y = columns of the ranks from first_rank on, side by side, as many as it has room for.
  virtual absl::Status GatherColumns(const RankColumns& columns) = 0;

  // Chooses the tokens of the step's result from logits [sampled rows, vocab] float32, as the batch
  // says: the same ones on every backend for the same logits (kernels/dense/sampling.h).
  virtual absl::Status Sample(const kernels::TensorView& logits) = 0;

  // A device may be at work still: the host has time for what does not need the result.
  virtual absl::Status EndStep(const StepOutputs& outputs) = 0;
  // Whether Collect would find the oldest step over; an error is left to it.
  virtual bool IsOver() const = 0;
  // Waits for the oldest step that is not collected; what came of it.
  virtual absl::Status Collect(StepResult& result) = 0;

 protected:
  // `executor` outlives the backend.
  explicit Backend(kernels::Executor& executor) : executor_(executor) {}

 private:
  kernels::Executor& executor_;
};

}  // namespace kvasir::worker
