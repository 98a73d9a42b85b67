#include "worker/model/load_weights.h"

#include <algorithm>
#include <set>
#include <span>
#include <spdlog/spdlog.h>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "worker/backend/backend.h"
#include "worker/checkpoint/convert_elements.h"
#include "worker/checkpoint/strict_json.h"
#include "worker/checkpoint/weights_layout.h"

namespace kvasir::worker {
namespace {

using kernels::DType;
using kernels::DTypeSize;
using kernels::TensorView;

// A chunk is read, checked and sent on while it is in a core's cache.
constexpr int64_t kChunkBytes = int64_t{2} << 20;
constexpr size_t kNamesInLog = 8;

std::string Quote(const std::string& text) { return QuoteForMessage({text.data(), text.size()}); }

absl::Status CheckPart(const SafetensorsFolder& folder, const WeightPart& part) {
  const std::string expected = absl::StrCat("[", absl::StrJoin(part.shape, ", "), "]");
  const TensorInfo* info = folder.Find(part.name);
  if (info == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the checkpoint has no tensor ", Quote(part.name), ", expected one of shape ", expected,
        part.name == "lm_head.weight" ? " (or tie_word_embeddings in config.json)" : ""));
  }
  if (info->shape != part.shape) {
    return absl::InvalidArgumentError(absl::StrCat(Quote(part.name), " is ", info->DebugString(),
                                                   ", expected the shape ", expected,
                                                   " that config.json implies"));
  }
  if (!info->dtype.has_value()) {
    return absl::UnimplementedError(
        absl::StrCat(Quote(part.name), " is ", info->DebugString(), ", expected F32, BF16 or F16"));
  }
  return absl::OkStatus();
}

void LogUnexpectedTensors(const SafetensorsFolder& folder, const std::vector<WeightPart>& parts) {
  std::set<std::string> expected;
  for (const WeightPart& part : parts) expected.insert(part.name);
  std::vector<std::string> names;
  for (const auto& [name, info] : folder.tensors()) {
    // Old checkpoints keep the rotary angles, which we compute.
    if (expected.contains(name) || absl::EndsWith(name, "rotary_emb.inv_freq")) continue;
    names.push_back(Quote(name));
  }
  if (names.empty()) return;
  const size_t count = names.size();
  if (count > kNamesInLog) {
    names.resize(kNamesInLog);
    names.push_back("...");
  }
  spdlog::warn("the checkpoint has {} tensors that the model does not use: {}", count,
               absl::StrJoin(names, ", "));
}

absl::Status AllocateTarget(Tensor& target, DType dtype, Backend& backend) {
  const TensorView shape = target.view;
  KVASIR_ASSIGN_OR_RETURN(target.memory, backend.Allocate(shape.num_elements() *
                                                          static_cast<int64_t>(DTypeSize(dtype))));
  std::byte* const data = target.memory.data();
  const kernels::Device device = target.memory.device();
  target.view = shape.rank() == 1 ? TensorView(data, dtype, {shape.dim(0)}, device)
                                  : TensorView(data, dtype, {shape.dim(0), shape.dim(1)}, device);
  return absl::OkStatus();
}

// Whole rows of a part, and their destination.
struct Chunk {
  const WeightPart* part = nullptr;
  MatrixSlice slice = {};
  MemoryPiece to;
};

void AddChunks(const WeightPart& part, std::vector<Chunk>& chunks) {
  if (part.target == nullptr) return;
  const TensorView& target = part.target->view;
  const int64_t row_bytes = part.slice.cols() * static_cast<int64_t>(DTypeSize(target.dtype()));
  const int64_t chunk_rows = std::max(int64_t{1}, kChunkBytes / row_bytes);
  std::byte* out = target.As<std::byte>() + part.target_row * row_bytes;
  for (int64_t row = part.slice.row_begin; row < part.slice.row_end; row += chunk_rows) {
    MatrixSlice slice = part.slice;
    slice.row_begin = row;
    slice.row_end = std::min(row + chunk_rows, part.slice.row_end);
    const int64_t bytes = slice.rows() * row_bytes;
    chunks.push_back({.part = &part, .slice = slice, .to = {.begin = out, .size_bytes = bytes}});
    out += bytes;
  }
}

// Reads a chunk as `dtype` into `out`, through `staging` where the file's dtype differs.
absl::Status ReadChunk(const SafetensorsFolder& folder, const Chunk& chunk, DType dtype,
                       std::vector<std::byte>& staging, std::byte* out) {
  const std::string& name = chunk.part->name;
  const DType from = *folder.Find(name)->dtype;
  const int64_t elements = chunk.slice.rows() * chunk.slice.cols();
  const size_t bytes = static_cast<size_t>(elements) * DTypeSize(from);
  if (from != dtype) staging.resize(bytes);
  const std::span<std::byte> in(from == dtype ? out : staging.data(), bytes);
  KVASIR_RETURN_IF_ERROR(folder.ReadSlice(name, chunk.slice, in));
  const int64_t bad = ConvertElements(from, in, dtype, out);
  if (bad < 0) return absl::OkStatus();
  const int64_t cols = chunk.slice.cols();
  return absl::DataLossError(
      absl::StrCat(Quote(name), " at [", chunk.slice.row_begin + bad / cols, ", ",
                   chunk.slice.col_begin + bad % cols, "] is NaN, infinite or too large for ",
                   kernels::DTypeName(dtype), ", expected a finite number; the file is damaged"));
}

// Reports progress of several threads, at most once a percent.
class Progress {
 public:
  Progress(const std::function<void(double)>& tell, int64_t all) : tell_(tell), all_(all) {}

  void Add(int64_t elements) EXCLUDES(mu_) {
    kernels::MutexLock lock(mu_);
    const int64_t before = std::exchange(done_, done_ + elements) * kSteps / all_;
    if (tell_ && done_ * kSteps / all_ != before) {
      tell_(static_cast<double>(done_) / static_cast<double>(all_));
    }
  }

 private:
  static constexpr int64_t kSteps = 100;
  const std::function<void(double)>& tell_;
  const int64_t all_;
  kernels::Mutex mu_;
  int64_t done_ GUARDED_BY(mu_) = 0;
};

absl::Status ReadChunks(const SafetensorsFolder& folder, const std::vector<Chunk>& chunks,
                        const LoadWeightsOptions& options, Backend& backend) {
  int64_t all = 0;
  std::vector<MemoryPiece> pieces;
  for (const Chunk& chunk : chunks) {
    all += chunk.slice.rows() * chunk.slice.cols();
    pieces.push_back(chunk.to);
  }
  Progress progress(options.progress, all);
  std::vector<std::vector<std::byte>> staging(
      static_cast<size_t>(backend.executor().num_threads()));
  return backend.FillPieces(pieces, [&](int64_t piece, int thread, std::byte* out) -> absl::Status {
    const Chunk& chunk = chunks[static_cast<size_t>(piece)];
    KVASIR_RETURN_IF_ERROR(
        ReadChunk(folder, chunk, options.dtype, staging[static_cast<size_t>(thread)], out));
    progress.Add(chunk.slice.rows() * chunk.slice.cols());
    return absl::OkStatus();
  });
}

// Checkpoints of the bare model name its tensors without "model.".
std::string PrefixOf(const SafetensorsFolder& folder) {
  return folder.Find("embed_tokens.weight") != nullptr ? "" : kModelPrefix;
}

}  // namespace

absl::StatusOr<ModelWeights> LoadWeights(const SafetensorsFolder& folder, const ModelConfig& config,
                                         const LoadWeightsOptions& options, Backend& backend) {
  // Where a tied checkpoint also has a head, the head is used, as in transformers.
  const bool has_lm_head =
      folder.Find("lm_head.weight") != nullptr || !config.tie_word_embeddings.value_or(true);
  ModelWeights weights;
  const WeightsLayout layout(config, options.plan,
                             {.has_lm_head = has_lm_head, .prefix = PrefixOf(folder)}, weights);
  for (const WeightPart& part : layout.parts()) KVASIR_RETURN_IF_ERROR(CheckPart(folder, part));
  LogUnexpectedTensors(folder, layout.parts());
  for (Tensor* target : layout.targets()) {
    KVASIR_RETURN_IF_ERROR(AllocateTarget(*target, options.dtype, backend));
  }
  std::vector<Chunk> chunks;
  for (const WeightPart& part : layout.parts()) AddChunks(part, chunks);
  KVASIR_RETURN_IF_ERROR(ReadChunks(folder, chunks, options, backend));
  if (!has_lm_head) TieHead(config, options.plan, weights);
  return weights;
}

}  // namespace kvasir::worker
