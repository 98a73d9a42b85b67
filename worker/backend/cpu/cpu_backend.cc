#include "worker/backend/cpu/cpu_backend.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "kernels/append/digests.h"
#include "kernels/base/status_macros.h"
#include "kernels/dense/add.h"
#include "kernels/dense/embedding.h"
#include "kernels/dense/rms_norm.h"
#include "kernels/dense/silu_mul.h"
#include "worker/backend/memory_limit.h"
#include "worker/checkpoint/try_parallel_for.h"

namespace kvasir::worker {

using kernels::DType;
using kernels::LinearParams;
using kernels::PackedLinear;
using kernels::TensorView;

namespace {

// All exponent bits set means NaN or infinity. Branch-free, so that it runs at memory speed.
bool AllFinite(const TensorView& tensor, int64_t begin_row, int64_t end_row) {
  const int64_t width = tensor.dim(1);
  uint32_t bad = 0;
  for (int64_t i = begin_row * width; i < end_row * width; ++i) {
    if (tensor.dtype() == DType::kFloat32) {
      const uint32_t bits = tensor.As<uint32_t>()[i];
      bad |= static_cast<uint32_t>((bits & 0x7f800000u) == 0x7f800000u);
    } else {
      const uint32_t bits = tensor.As<uint16_t>()[i];
      bad |= static_cast<uint32_t>((bits & 0x7f80u) == 0x7f80u);
    }
  }
  return bad == 0;
}

absl::Status GatherRows(const TensorView& from, std::vector<int32_t>& rows, const TensorView& to) {
  return kernels::Embedding(
      {.table = from, .ids = TensorView(rows.data(), DType::kInt32, {std::ssize(rows)}), .y = to});
}

// Returns the tensor as a gather takes it. A gather moves bits: two bfloat16 go as one float.
// REQUIRES: the size is a multiple of four bytes.
absl::Span<float> AsFloats(const TensorView& tensor) {
  return {tensor.As<float>(), static_cast<size_t>(tensor.size_bytes()) / sizeof(float)};
}

}  // namespace

class CpuBackend::CpuLinear final : public Linear {
 public:
  CpuLinear(PackedLinear packed, CpuBackend& backend)
      : packed_(std::move(packed)),
        backend_(backend),
        path_(backend.product_paths_.insert(packed_.engine_name())) {}
  ~CpuLinear() override { backend_.product_paths_.erase(path_); }

  absl::Status Run(const LinearParams& p) override {
    kernels::Executor& executor = backend_.executor();
    if (!p.norm.empty()) {
      KVASIR_RETURN_IF_ERROR(kernels::RmsNorm(
          {.x = p.x, .weight = p.norm, .y = p.normed, .epsilon = p.epsilon}, executor));
    }
    const TensorView& x = p.norm.empty() ? p.x : p.normed;
    if (p.after == LinearParams::After::kStore) return Multiply(x, p.y);
    KVASIR_RETURN_IF_ERROR(Multiply(x, p.product));
    if (p.after == LinearParams::After::kSiluMul) {
      return kernels::SiluMul({.gate_up = p.product, .y = p.y}, executor);
    }
    KVASIR_RETURN_IF_ERROR(kernels::AddTo(p.product, p.y, executor));
    if (p.next_norm.empty()) return absl::OkStatus();
    return kernels::RmsNorm(
        {.x = p.y, .weight = p.next_norm, .y = p.next_normed, .epsilon = p.epsilon}, executor);
  }
  bool normalizes_sums(int64_t) const override { return true; }
  int64_t out_features() const override { return packed_.out_features(); }

 private:
  absl::Status Multiply(const TensorView& x, const TensorView& y) {
    kernels::Executor& executor = backend_.executor();
    const int64_t bytes = packed_.ScratchBytes(executor.num_threads());
    KVASIR_ASSIGN_OR_RETURN(std::byte* const scratch, backend_.linear_scratch_.Reserve(bytes));
    return packed_.Run(x, y, {scratch, static_cast<size_t>(bytes)}, executor);
  }

  PackedLinear packed_;
  CpuBackend& backend_;
  const std::multiset<std::string>::iterator path_;
};

struct CpuBackend::CpuRope final : Rope {
  CpuRope(const RopeFrequencies& f, const KeyForm& key_form)
      : form(key_form),
        own(f.inv_freq, f.attention_factor),
        positions(f.inv_freq, f.attention_factor) {}

  const KeyForm form;
  kernels::RopeTable own;            // for the step's own positions
  kernels::RopePositions positions;  // at which un-rotated keys are attended to
};

std::string CpuBackend::name() const {
  return absl::StrCat("cpu, ", executor().num_threads(), " threads, attention ", attention_path_,
                      ", products ", absl::StrJoin(ProductPaths(), " and "));
}

std::set<std::string> CpuBackend::ProductPaths() const {
  return {product_paths_.begin(), product_paths_.end()};
}

absl::StatusOr<Memory> CpuBackend::Allocate(int64_t bytes) {
  KVASIR_ASSIGN_OR_RETURN(kernels::HostBuffer buffer, kernels::HostBuffer::Allocate(bytes));
  return Memory(std::move(buffer), kernels::Device::kCpu);
}

absl::Status CpuBackend::FillPieces(std::span<const MemoryPiece> pieces, const WritePiece& write) {
  return TryParallelFor(executor(), std::ssize(pieces), [&](int64_t piece, int thread) {
    return write(piece, thread, pieces[static_cast<size_t>(piece)].begin);
  });
}

// The tiers are first touched as they fill, so too little memory would show only under load, as a
// kill.
absl::StatusOr<std::unique_ptr<kvstore::PageResidency>> CpuBackend::MakeResidency(
    const kvstore::ResidencyOptions& options) {
  const kernels::KvLayout& layout = options.format.shard().layout;
  const int64_t codes = options.key_codes ? layout.block_key_codes_bytes() : 0;
  KVASIR_RETURN_IF_ERROR(CheckMemoryLimit(
      options.num_extents * (options.format.extent_bytes() + codes) +
          std::ssize(options.lean_bounds) * (options.format.pages_offset() + codes) +
          options.page_cache_bytes + options.device_pages * layout.page_bytes() -
          options.memory.held_bytes(),
      "--kv-host-size-gb, --kv-on-demand-size-gb or --kv-device-size-gb"));
  return kvstore::ArenaResidency::Make(options);
}

absl::StatusOr<Tensor> CpuBackend::Place(Tensor weight) { return weight; }

absl::StatusOr<std::unique_ptr<Linear>> CpuBackend::MakeLinear(
    std::span<const PackedLinear::Part> parts, const PackedLinear::Options& options) {
  KVASIR_ASSIGN_OR_RETURN(PackedLinear packed, PackedLinear::Create(parts, options, weights_));
  // Reserved now, so that no step runs out of memory for it.
  KVASIR_RETURN_IF_ERROR(
      linear_scratch_.Reserve(packed.ScratchBytes(executor().num_threads())).status());
  return std::make_unique<CpuLinear>(std::move(packed), *this);
}

absl::StatusOr<std::unique_ptr<Rope>> CpuBackend::MakeRope(const RopeFrequencies& frequencies,
                                                           const KeyForm& form) {
  attention_path_ = std::string(kernels::AttendPathName(2 * std::ssize(frequencies.inv_freq)));
  return std::make_unique<CpuRope>(frequencies, form);
}

CpuBackend::CpuRope& CpuBackend::rope() const { return static_cast<CpuRope&>(step_->rope); }

CpuRotation CpuBackend::rotation() const {
  CpuRope& r = rope();
  if (r.form.rotated) return {.queries = {.cos = r.own.cos(), .sin = r.own.sin()}};
  return {.positions = &r.positions, .grouped = r.form.grouped};
}

absl::StatusOr<bool> CpuBackend::BeginStep(const StepInputs& step) {
  step_.emplace(step);
  result_ = {};
  for (const Truncation& t : step.batch.truncations) {
    KVASIR_RETURN_IF_ERROR(kernels::RebuildBounds(step.kv, t.slot, t.block, t.num_tokens));
  }
  if (rope().form.rotated) rope().own.SetPositions(step.batch.positions, executor());
  return true;
}

absl::Status CpuBackend::EmbedTokens(const TensorView& table, const TensorView& y) {
  row_indices_ = step_->batch.tokens;
  return GatherRows(table, row_indices_, y);
}

absl::Status CpuBackend::TakeSampled(const TensorView& x, const TensorView& y) {
  const std::vector<int64_t>& tokens = step_->batch.sampled_tokens;
  row_indices_.assign(tokens.begin(), tokens.end());
  return GatherRows(x, row_indices_, y);
}

absl::Status CpuBackend::TakeScored(const TensorView& x, int64_t first, const TensorView& y) {
  const auto begin = step_->batch.scored_tokens.begin() + first;
  row_indices_.assign(begin, begin + y.dim(0));
  return GatherRows(x, row_indices_, y);
}

absl::Status CpuBackend::AppendHeads(const kernels::LayerHeads& heads) {
  return kernels::AppendHeads({.heads = heads, .kv = step_->kv, .tiles = step_->batch.appends},
                              rope().form.rotated ? &rope().own : nullptr, executor());
}

absl::Status CpuBackend::Select(const LayerQueries& queries) {
  return attention_.Select(*step_, rotation(), queries, executor());
}

absl::Status CpuBackend::Attend(const LayerQueries& queries, const TensorView& out) {
  return attention_.Attend(*step_, rotation(), queries, out, executor());
}

absl::Status CpuBackend::AddOverRanks(const TensorView& x, const TensorView& y) {
  KVASIR_RETURN_IF_ERROR(step_->collective.AllReduceSum(AsFloats(x)));
  return kernels::AddTo(x, y, executor());
}

absl::Status CpuBackend::GatherColumns(const RankColumns& columns) {
  KVASIR_RETURN_IF_ERROR(
      step_->collective.AllGather(AsFloats(columns.own), AsFloats(columns.gathered)));
  const int64_t rows = columns.y.dim(0), total = columns.y.dim(1), width = columns.own.dim(1);
  const auto element = static_cast<int64_t>(DTypeSize(columns.y.dtype()));
  for (int64_t begin = 0; begin < total; begin += width) {
    const int64_t rank = columns.first_rank + begin / width;
    const int64_t part = std::min(width, total - begin);
    const std::byte* const from =
        columns.gathered.As<const std::byte>() + rank * rows * width * element;
    for (int64_t row = 0; row < rows; ++row) {
      std::memcpy(columns.y.As<std::byte>() + (row * total + begin) * element,
                  from + row * part * element, static_cast<size_t>(part * element));
    }
  }
  return absl::OkStatus();
}

absl::Status CpuBackend::Sample(const TensorView& logits) {
  result_.tokens.assign(step_->batch.sampling.size(), {});
  return ChooseTokens(logits, step_->batch.sampling, result_.tokens);
}

absl::Status CpuBackend::Score(const TensorView& logits, int64_t first) {
  const std::vector<kernels::SamplingOptions>& all = step_->batch.scoring;
  result_.scores.resize(all.size());
  const auto begin = static_cast<size_t>(first), rows = static_cast<size_t>(logits.dim(0));
  return ChooseTokens(logits, std::span(all).subspan(begin, rows),
                      std::span(result_.scores).subspan(begin, rows));
}

absl::Status CpuBackend::ChooseTokens(const TensorView& logits,
                                      std::span<const kernels::SamplingOptions> options,
                                      std::span<kernels::SampledToken> tokens) {
  const int64_t bytes = kernels::SamplingScratchBytes(logits.dim(1), executor().num_threads());
  KVASIR_ASSIGN_OR_RETURN(std::byte* const scratch, sampling_scratch_.Reserve(bytes));
  return kernels::Sample({.logits = logits,
                          .options = options,
                          .tokens = tokens,
                          .scratch = {scratch, static_cast<size_t>(bytes)}},
                         executor());
}

absl::Status CpuBackend::EndStep(const StepOutputs& outputs) {
  if (step_->batch.keeps_logits) result_.logits = outputs.logits;
  const std::vector<int64_t>& begins = step_->batch.row_begins;
  for (size_t r = 0; r + 1 < begins.size(); ++r) {
    result_.row_is_finite.push_back(AllFinite(outputs.residual, begins[r], begins[r + 1]));
  }
  return absl::OkStatus();
}

absl::Status CpuBackend::Collect(StepResult& result) {
  result = std::exchange(result_, {});
  step_.reset();
  return absl::OkStatus();
}

}  // namespace kvasir::worker
