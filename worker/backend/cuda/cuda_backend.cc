#include "worker/backend/cuda/cuda_backend.h"

#include <algorithm>
#include <bit>
#include <cuda_runtime_api.h>
#include <utility>

#include "kernels/append/append_heads_cuda.h"
#include "kernels/append/digests_cuda.h"
#include "kernels/base/cuda_status.h"
#include "kernels/base/status_macros.h"
#include "kernels/dense/dense_cuda.h"
#include "kernels/sampling/sampling_cuda.h"
#include "kernels/sparse/reuse/selection_memory_cuda.h"
#include "worker/backend/cuda/cuda_limits.h"
#include "worker/backend/cuda/cuda_upload.h"
#include "worker/backend/cuda/make_cuda_backend.h"

namespace kvasir::worker {

using kernels::CudaLinear;
using kernels::CudaStatus;
using kernels::Device;
using kernels::DeviceBuffer;
using kernels::DType;
using kernels::PackedLinear;
using kernels::TensorView;

namespace {

// Returns the same view at another address.
TensorView MovedTo(std::byte* memory, const TensorView& view) {
  if (view.rank() == 1) return TensorView(memory, view.dtype(), {view.dim(0)}, Device::kCuda);
  return TensorView(memory, view.dtype(), {view.dim(0), view.dim(1)}, Device::kCuda);
}

}  // namespace

class CudaBackend::GpuLinear final : public Linear {
 public:
  GpuLinear(CudaLinear linear, CudaBackend& backend)
      : linear_(std::move(linear)), backend_(backend) {}

  absl::Status Run(const kernels::LinearParams& params) override {
    return linear_.Run(params, backend_.linear_workspace_.data(), backend_.stream_.get());
  }
  bool normalizes_sums(int64_t rows) const override { return linear_.normalizes_sums(rows); }
  int64_t out_features() const override { return linear_.out_features(); }

 private:
  CudaLinear linear_;
  CudaBackend& backend_;
};

CudaBackend::CudaBackend(kernels::Executor& executor, CudaStream stream, kernels::CublasLt lt,
                         DeviceBuffer linear_workspace, std::string name)
    : Backend(executor),
      name_(std::move(name)),
      stream_(std::move(stream)),
      lt_(std::move(lt)),
      linear_workspace_(std::move(linear_workspace)) {}

absl::StatusOr<std::unique_ptr<CudaBackend>> CudaBackend::Create(kernels::Executor& executor) {
  int device = 0;
  cudaDeviceProp gpu;
  KVASIR_RETURN_IF_ERROR(CudaStatus(cudaGetDevice(&device), "looking for a GPU"));
  KVASIR_RETURN_IF_ERROR(CudaStatus(cudaGetDeviceProperties(&gpu, device), "describing the GPU"));
  KVASIR_ASSIGN_OR_RETURN(const bool has_kernels, kernels::HasKernelsForDevice());
  KVASIR_RETURN_IF_ERROR(
      CheckCudaDevice({gpu.name, gpu.major, gpu.minor, gpu.sharedMemPerBlockOptin, has_kernels}));
  KVASIR_ASSIGN_OR_RETURN(CudaStream stream, CudaStream::Create());
  KVASIR_ASSIGN_OR_RETURN(kernels::CublasLt lt, kernels::CublasLt::Create());
  KVASIR_ASSIGN_OR_RETURN(DeviceBuffer workspace,
                          DeviceBuffer::Allocate(CudaLinear::kWorkspaceBytes));
  std::unique_ptr<CudaBackend> backend(
      new CudaBackend(executor, std::move(stream), std::move(lt), std::move(workspace), gpu.name));
  for (InFlightStep& own : backend->own_) {
    KVASIR_ASSIGN_OR_RETURN(own.fetched, CudaEvent::Create());
  }
  return backend;
}

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(kernels::Executor& executor) {
  return CudaBackend::Create(executor);
}

absl::Status CudaBackend::CheckModel(const TransformerOptions& model, DType kv_dtype) const {
  return CheckCudaModel(model, kv_dtype);
}

absl::StatusOr<std::optional<int64_t>> CudaBackend::DeviceMemoryLeft(double utilization) const {
  size_t free = 0, total = 0;
  KVASIR_RETURN_IF_ERROR(
      CudaStatus(cudaMemGetInfo(&free, &total), "asking for the memory of the device"));
  const auto usable = static_cast<int64_t>(utilization * static_cast<double>(total));
  return std::max<int64_t>(0, usable - static_cast<int64_t>(total - free));
}

absl::Status CudaBackend::CheckPolicies(std::span<const v1::SparsityPolicy> policies,
                                        const TransformerOptions& model, bool on_demand) const {
  return CheckCudaPolicies(policies, model, on_demand);
}

absl::Status CudaBackend::Serve(const v1::AttentionPolicy& policy, ServedSelector& served) const {
  KVASIR_ASSIGN_OR_RETURN(served.on_gpu, MakeCudaStages(policy));
  return absl::OkStatus();
}

absl::Status CudaBackend::ReserveForPrompts(const kernels::KvLayout& layout, int64_t dense_tokens) {
  prepared_.reset();
  const bool cached_as_read = key_form_.rotated && !kernels::IsQuantized(layout.dtype);
  if (dense_tokens == 0 || cached_as_read || key_form_.grouped.on()) return absl::OkStatus();
  KVASIR_ASSIGN_OR_RETURN(prepared_, kernels::PreparedMemory::Create(layout, dense_tokens));
  return absl::OkStatus();
}

absl::StatusOr<Memory> CudaBackend::Allocate(int64_t bytes) {
  KVASIR_ASSIGN_OR_RETURN(DeviceBuffer buffer, DeviceBuffer::Allocate(bytes));
  return Memory(std::move(buffer), Device::kCuda);
}

absl::StatusOr<std::unique_ptr<kvstore::PageResidency>> CudaBackend::MakeResidency(
    const kvstore::ResidencyOptions& options) {
  attention_ = {};  // it holds maps of other arenas
  graphs_.Clear(stream_);
  for (InFlightStep& own : own_) own.inputs.reset();  // steps that an earlier engine has left
  KVASIR_ASSIGN_OR_RETURN(auto residency, CudaResidency::Make(options, stream_));
  arenas_ = residency->arenas();
  attention_.BringWith(residency->pages_on_disk());
  return residency;
}

absl::Status CudaBackend::FillPieces(std::span<const MemoryPiece> pieces, const WritePiece& write) {
  return UploadPieces(pieces, write, stream_, executor());
}

absl::Status CudaBackend::FillRandom(const kernels::RandomFillParams& params) {
  return kernels::FillRandom(params, stream_.get());
}

absl::StatusOr<Tensor> CudaBackend::Place(Tensor weight) {
  if (weight.view.empty() || weight.view.device() == Device::kCuda) return weight;
  KVASIR_ASSIGN_OR_RETURN(Memory memory, Allocate(weight.view.size_bytes()));
  KVASIR_RETURN_IF_ERROR(
      stream_.CopyToDevice(memory.data(), weight.view.data(), weight.view.size_bytes()));
  KVASIR_RETURN_IF_ERROR(stream_.Wait());
  const TensorView view = MovedTo(memory.data(), weight.view);
  return Tensor{.memory = std::move(memory), .view = view};
}

absl::StatusOr<std::unique_ptr<Linear>> CudaBackend::MakeLinear(
    std::span<const PackedLinear::Part> parts, const PackedLinear::Options& options) {
  KVASIR_ASSIGN_OR_RETURN(CudaLinear linear, CudaLinear::Create(lt_, parts, options));
  return std::make_unique<GpuLinear>(std::move(linear), *this);
}

absl::StatusOr<std::unique_ptr<Rope>> CudaBackend::MakeRope(const RopeFrequencies& frequencies,
                                                            const KeyForm& form) {
  key_form_ = form;
  return CudaRope::Create(frequencies, form, stream_);
}

absl::StatusOr<std::unique_ptr<kernels::RememberedSelections>> CudaBackend::Remember(
    const kernels::MemoryNeeds& needs) {
  return kernels::CudaSelectionMemory::Create(needs, stream_.get());
}

absl::Status CudaBackend::JoinRanks(Collective& ranks) {
  LeaveRanks();
  if (ranks.size() == 1) return absl::OkStatus();
  KVASIR_ASSIGN_OR_RETURN(ranks_, CudaRanks::Join(ranks));
  return absl::OkStatus();
}

void CudaBackend::LeaveRanks() {
  graphs_.StopRecording(stream_);  // a step that failed; nothing can wait for a stream that records
  if (ranks_ != nullptr) ranks_->Abandon();
  stream_.Wait().IgnoreError();  // a graph may be in flight
  graphs_.Clear(stream_);
  ranks_.reset();  // it waits for graphs that contain its calls
}

absl::Status CudaBackend::Wait(const InFlightStep& own) {
  if (ranks_ == nullptr) return own.fetched.Wait();
  const absl::Status status = ranks_->Wait(own.fetched, own.step_of_ranks);
  if (!status.ok()) LeaveRanks();
  return status;
}

absl::Status CudaBackend::WaitForStepBefore() {
  return before_ == nullptr ? absl::OkStatus() : Wait(*before_);
}

absl::StatusOr<bool> CudaBackend::BeginStep(const StepInputs& inputs) {
  if (inputs.shard.num_ranks > 1 && ranks_ == nullptr) {
    return absl::FailedPreconditionError(
        "the ranks of the group have not been joined, or were left");
  }
  before_ = now_->inputs.has_value() ? now_ : nullptr;
  now_ = before_ == &own_[0] ? &own_[1] : &own_[0];
  now_->inputs.emplace(inputs);
  now_->step_of_ranks = ranks_ == nullptr ? 0 : ranks_->BeginStep();
  step().kv = inputs.kv;
  KVASIR_RETURN_IF_ERROR(UploadTable(inputs));
  KVASIR_RETURN_IF_ERROR(PrepareResults(inputs));
  KVASIR_RETURN_IF_ERROR(PrepareSampling(inputs));
  KVASIR_RETURN_IF_ERROR(kernels::RebuildBounds(step().kv, step().table.truncations,
                                                step().results.faults, stream_.get()));
  auto& rope = static_cast<CudaRope&>(inputs.rope);
  step().positions = rope.positions();
  step().grouped = rope.grouped();
  step().rotation = {};
  step().ranks = ranks_.get();
  step().prepared = prepared_.has_value() ? &*prepared_ : nullptr;
  const auto wait = [this] { return WaitForStepBefore(); };
  KVASIR_RETURN_IF_ERROR(attention_.BeginStep(inputs, step(), arenas_, stream_, wait));
  if (step().positions == nullptr) KVASIR_RETURN_IF_ERROR(ReserveAngles(rope));
  wants_ops_ = true;
  // Steps with chunks of prompts differ from each other, so they are not recorded. Nor are steps
  // that score tokens: a chunk within a prompt's tail.
  if (step().shape.num_single == inputs.batch.num_tokens() && inputs.batch.scored_tokens.empty()) {
    KVASIR_ASSIGN_OR_RETURN(const bool recorded, graphs_.Begin(KeyOfStep(), stream_, wait));
    wants_ops_ = !recorded;
  }
  if (wants_ops_ && step().positions == nullptr) {
    KVASIR_RETURN_IF_ERROR(rope.ComputeAngles(step().table.positions, rope_angles_, stream_));
  }
  return wants_ops_;
}

absl::Status CudaBackend::PrepareResults(const StepInputs& inputs) {
  const auto lay_out = [&](std::byte* memory) {
    return LayOutResults(inputs.batch, step().shape, inputs.kv.layout.num_layers,
                         inputs.kv.num_slots, memory);
  };
  const int64_t bytes = lay_out(nullptr).bytes;
  KVASIR_RETURN_IF_ERROR(Reserve<std::byte>(bytes, now_->results).status());
  if (inputs.batch.keeps_logits) {
    const int64_t logits = std::ssize(inputs.batch.sampling) * inputs.vocab_size;
    KVASIR_RETURN_IF_ERROR(Reserve<float>(logits, now_->logits).status());
  }
  KVASIR_ASSIGN_OR_RETURN(std::byte* const device, Reserve<std::byte>(bytes, results_));
  step().results = lay_out(device);
  return stream_.Clear(step().results.faults.data(), inputs.kv.num_slots);
}

// The rows' requests grow with the tokens that penalties count. Room is taken for later steps too,
// so that the address in a graph's key stays the same.
absl::Status CudaBackend::PrepareSampling(const StepInputs& inputs) {
  const auto& options = inputs.batch.sampling;
  const int64_t vocab = inputs.vocab_size;
  const auto bytes = static_cast<uint64_t>(kernels::SamplingBlockBytes(options, vocab));
  KVASIR_ASSIGN_OR_RETURN(
      std::byte* const block,
      Reserve<std::byte>(static_cast<int64_t>(std::bit_ceil(bytes)), now_->sampling));
  kernels::FillSamplingBlock(options, vocab, block);
  if (const auto& scoring = inputs.batch.scoring; !scoring.empty()) {
    const int64_t needed = kernels::SamplingBlockBytes(scoring, vocab);
    KVASIR_ASSIGN_OR_RETURN(std::byte* const scores, Reserve<std::byte>(needed, now_->scoring));
    kernels::FillSamplingBlock(scoring, vocab, scores);
  }
  if (!kernels::ChangesLogits(options)) return absl::OkStatus();
  return Reserve<float>(std::ssize(options) * vocab, changed_logits_).status();
}

GraphKey CudaBackend::KeyOfStep() const {
  const StepBatch& batch = now_->inputs->batch;
  const StepShape& step = now_->step.shape;
  const kernels::PagedKv& kv = now_->step.kv;
  GraphKey key;
  key.Add("sampled_tokens", std::ssize(batch.sampled_tokens));
  key.Add("appends", std::ssize(batch.appends));
  key.Add("ranges", std::ssize(step.ranges));
  key.Add("number_sets", std::ssize(step.number_sets));
  key.Add("table", table_.data());
  key.Add("kv.block_extents", kv.block_extents);
  key.Add("kv.pages", kv.pages);
  key.Add("kv.bounds", kv.bounds);
  key.Add("kv.key_codes", kv.key_codes);
  key.Add("kv.accesses.step", kv.accesses.step);
  key.Add("kv.accesses.last_touched", kv.accesses.last_touched);
  key.Add("kv.accesses.missed_bytes", kv.accesses.missed_bytes);
  key.Add("kv.on_disk", kv.on_disk);
  key.Add("results", results_.data());
  key.Add("sampling", now_->sampling.data());
  key.Add("changed_logits", changed_logits_.data());
  key.Add("angles", angles_.data());
  for (const SelectorRange& range : step.ranges) {
    key.Add("range.served", range.served);
    key.Add("range.end", range.end);
  }
  for (const int64_t layer : step.number_sets) key.Add("number_set", layer);
  attention_.AddTo(key);
  return key;
}

absl::Status CudaBackend::UploadTable(const StepInputs& inputs) {
  step().shape = ShapeOf(inputs.batch, inputs.kv.layout.num_kv_heads);
  const int64_t bytes = LayOut(inputs.batch, step().shape, nullptr).bytes;
  KVASIR_ASSIGN_OR_RETURN(std::byte* const host, Reserve<std::byte>(bytes, now_->table));
  KVASIR_ASSIGN_OR_RETURN(std::byte* const device, Reserve<std::byte>(bytes, table_));
  const StepTable host_table = LayOut(inputs.batch, step().shape, host);
  Fill(inputs.batch, step().shape, host_table);
  for (size_t i = 0; i < step().shape.order.size(); ++i) {
    const auto* const memory = static_cast<const kernels::CudaSelectionMemory*>(  // of Remember
        inputs.batch.infos[static_cast<size_t>(step().shape.order[i])].memory);
    host_table.memories[i] = memory == nullptr ? kernels::DeviceSelectionMemory{} : memory->view();
  }
  step().table = LayOut(inputs.batch, step().shape, device);
  KVASIR_RETURN_IF_ERROR(stream_.CopyToDevice(device, host, bytes));
  return inputs.batch.is_fed() ? FeedTokens() : absl::OkStatus();
}

absl::Status CudaBackend::FeedTokens() {
  KVASIR_CHECK(before_ != nullptr);
  return kernels::FeedTokens({.block = before_->sampling.data(),
                              .rows = std::ssize(before_->inputs->batch.sampling),
                              .fed_by = step().table.fed_by,
                              .tokens = step().table.tokens},
                             stream_.get());
}

absl::Status CudaBackend::ReserveAngles(const CudaRope& rope) {
  const int64_t tokens = batch().num_tokens();
  KVASIR_ASSIGN_OR_RETURN(float* const angles,
                          Reserve<float>(2 * tokens * rope.half_dim(), angles_));
  float* const sines = angles + tokens * rope.half_dim();
  rope_angles_ = {
      .cos = TensorView(angles, DType::kFloat32, {tokens, rope.half_dim()}, Device::kCuda),
      .sin = TensorView(sines, DType::kFloat32, {tokens, rope.half_dim()}, Device::kCuda)};
  step().rotation = {.cos = angles, .sin = sines};
  return absl::OkStatus();
}

absl::Status CudaBackend::EmbedTokens(const TensorView& table, const TensorView& y) {
  return TakeRows(table, step().table.tokens, y);
}

absl::Status CudaBackend::TakeSampled(const TensorView& x, const TensorView& y) {
  return TakeRows(x, step().table.sampled_tokens, y);
}

absl::Status CudaBackend::TakeScored(const TensorView& x, int64_t first, const TensorView& y) {
  const auto begin = static_cast<size_t>(first), rows = static_cast<size_t>(y.dim(0));
  return TakeRows(x, step().table.scored_tokens.subspan(begin, rows), y);
}

absl::Status CudaBackend::TakeRows(const TensorView& table, std::span<int32_t> ids,
                                   const TensorView& y) {
  return kernels::Embedding(
      {.table = table,
       .ids = TensorView(ids.data(), DType::kInt32, {std::ssize(ids)}, Device::kCuda),
       .y = y},
      stream_.get());
}

absl::Status CudaBackend::AppendHeads(const kernels::LayerHeads& heads) {
  return kernels::AppendHeads({.heads = heads, .kv = step().kv, .tiles = step().table.appends},
                              step().positions == nullptr ? &rope_angles_ : nullptr,
                              step().results.faults, stream_.get());
}

absl::Status CudaBackend::Select(const LayerQueries& queries) {
  return attention_.Select(step(), queries, stream_.get());
}

absl::Status CudaBackend::Attend(const LayerQueries& queries, const TensorView& out) {
  return attention_.Attend(step(), queries, out, stream_.get());
}

absl::Status CudaBackend::AddOverRanks(const TensorView& x, const TensorView& y) {
  return ranks_->AddSum(x, y, stream_);
}

absl::Status CudaBackend::GatherColumns(const RankColumns& columns) {
  return ranks_->GatherColumns(columns, stream_);
}

absl::Status CudaBackend::Sample(const TensorView& logits) {
  return kernels::Sample({.logits = logits,
                          .block = now_->sampling.data(),
                          .block_rows = logits.dim(0),
                          .changed = changed_logits_.As<float>()},
                         stream_.get());
}

absl::Status CudaBackend::Score(const TensorView& logits, int64_t first) {
  return kernels::Sample({.logits = logits,
                          .block = now_->scoring.data(),
                          .block_rows = std::ssize(batch().scoring),
                          .first_row = first},
                         stream_.get());
}

absl::Status CudaBackend::EndStep(const StepOutputs& outputs) {
  if (wants_ops_) {
    KVASIR_RETURN_IF_ERROR(kernels::FindFiniteTokens(
        {.x = outputs.residual, .finite = step().results.finite}, stream_.get()));
  }
  KVASIR_RETURN_IF_ERROR(graphs_.End(stream_));
  KVASIR_RETURN_IF_ERROR(FetchResults(outputs));
  return now_->fetched.Record(stream_);
}

bool CudaBackend::IsOver() const {
  const absl::StatusOr<bool> is_over = (before_ == nullptr ? now_ : before_)->fetched.IsOver();
  return !is_over.ok() || *is_over;
}

absl::Status CudaBackend::Collect(StepResult& result) {
  InFlightStep& own = before_ == nullptr ? *now_ : *before_;
  KVASIR_RETURN_IF_ERROR(Wait(own));
  ReadResults(own, result);
  own.inputs.reset();
  before_ = nullptr;
  return absl::OkStatus();
}

absl::Status CudaBackend::FetchResults(const StepOutputs& outputs) {
  KVASIR_RETURN_IF_ERROR(
      stream_.CopyToHost(now_->results.data(), results_.data(), step().results.bytes));
  if (!batch().keeps_logits) return absl::OkStatus();
  return stream_.CopyToHost(now_->logits.data(), outputs.logits.data(),
                            outputs.logits.size_bytes());
}

void CudaBackend::ReadResults(const InFlightStep& own, StepResult& result) const {
  const CudaStep& step = own.step;
  const StepBatch& batch = own.inputs->batch;
  const DeviceStepOutputs host = LayOutResults(batch, step.shape, step.kv.layout.num_layers,
                                               step.kv.num_slots, own.results.data());
  result.row_is_finite = FiniteRows(batch, host);
  result.tokens.assign(batch.sampling.size(), {});
  kernels::ReadSamplingBlock(batch.sampling, own.inputs->vocab_size, own.sampling.data(),
                             result.tokens);
  result.scores.assign(batch.scoring.size(), {});
  kernels::ReadSamplingBlock(batch.scoring, own.inputs->vocab_size, own.scoring.data(),
                             result.scores);
  if (batch.keeps_logits) {
    result.logits = TensorView(own.logits.data(), DType::kFloat32,
                               {std::ssize(batch.sampling), own.inputs->vocab_size});
  }
  // Ranks that share a KV head select alike, so its pages are counted once.
  if (own.inputs->shard.replica() == 0) {
    CudaAttention::Report(step, host.counts, own.inputs->meter);
  }
}

}  // namespace kvasir::worker
