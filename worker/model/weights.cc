#include "worker/model/weights.h"

#include <algorithm>
#include <set>
#include <spdlog/spdlog.h>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "kernels/base/buffer.h"
#include "kernels/base/status_macros.h"
#include "worker/model/convert_elements.h"
#include "worker/model/strict_json.h"
#include "worker/model/weights_layout.h"

namespace kvasir::worker {
namespace {

using kernels::DType;
using kernels::DTypeSize;
using kernels::HostBuffer;
using kernels::TensorView;

constexpr int64_t kChunkBytes = int64_t{512} << 10;  // read and converted while in the CPU's cache
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

absl::Status AllocateTarget(Tensor& target, DType dtype) {
  const TensorView shape = target.view;
  KVASIR_ASSIGN_OR_RETURN(
      HostBuffer memory,
      HostBuffer::Allocate(shape.num_elements() * static_cast<int64_t>(DTypeSize(dtype))));
  target.memory = Memory(std::move(memory), kernels::Device::kCpu);
  target.view = shape.rank() == 1
                    ? TensorView(target.memory.data(), dtype, {shape.dim(0)})
                    : TensorView(target.memory.data(), dtype, {shape.dim(0), shape.dim(1)});
  return absl::OkStatus();
}

// Reads a part into its target, a chunk of whole rows at a time.
absl::Status ReadPart(const SafetensorsFolder& folder, const WeightPart& part,
                      std::vector<std::byte>& staging) {
  const DType from = *folder.Find(part.name)->dtype;
  const TensorView& target = part.target->view;
  const int64_t cols = part.slice.cols();
  const int64_t row_bytes = cols * static_cast<int64_t>(DTypeSize(from));
  const int64_t target_row_bytes = cols * static_cast<int64_t>(DTypeSize(target.dtype()));
  const int64_t chunk_rows = std::max(int64_t{1}, kChunkBytes / row_bytes);
  std::byte* out = target.As<std::byte>() + part.target_row * target_row_bytes;
  for (int64_t row = part.slice.row_begin; row < part.slice.row_end; row += chunk_rows) {
    MatrixSlice chunk = part.slice;
    chunk.row_begin = row;
    chunk.row_end = std::min(row + chunk_rows, part.slice.row_end);
    staging.resize(static_cast<size_t>(chunk.rows() * row_bytes));
    KVASIR_RETURN_IF_ERROR(folder.ReadSlice(part.name, chunk, staging));
    const int64_t bad = ConvertElements(from, staging, target.dtype(), out);
    if (bad >= 0) {
      return absl::DataLossError(absl::StrCat(
          Quote(part.name), " at [", row + bad / cols, ", ", part.slice.col_begin + bad % cols,
          "] is NaN, infinite or too large for ", kernels::DTypeName(target.dtype()),
          ", expected a finite number; the file is damaged"));
    }
    out += chunk.rows() * target_row_bytes;
  }
  return absl::OkStatus();
}

// Checkpoints of the bare model name its tensors without "model.".
std::string PrefixOf(const SafetensorsFolder& folder) {
  return folder.Find("embed_tokens.weight") != nullptr ? "" : kModelPrefix;
}

}  // namespace

absl::StatusOr<ModelWeights> LoadWeights(const SafetensorsFolder& folder, const ModelConfig& config,
                                         const LoadWeightsOptions& options) {
  // Where a tied checkpoint has a head all the same, the head is used, as in transformers.
  const bool has_lm_head =
      folder.Find("lm_head.weight") != nullptr || !config.tie_word_embeddings.value_or(true);
  ModelWeights weights;
  const WeightsLayout layout(config, options.plan,
                             {.has_lm_head = has_lm_head, .prefix = PrefixOf(folder)}, weights);
  int64_t all_elements = 0;
  for (const WeightPart& part : layout.parts()) {
    KVASIR_RETURN_IF_ERROR(CheckPart(folder, part));
    all_elements += part.slice.rows() * part.slice.cols();
  }
  LogUnexpectedTensors(folder, layout.parts());
  for (Tensor* target : layout.targets()) {
    KVASIR_RETURN_IF_ERROR(AllocateTarget(*target, options.dtype));
  }
  std::vector<std::byte> staging;
  int64_t elements = 0;
  for (const WeightPart& part : layout.parts()) {
    if (part.target != nullptr) KVASIR_RETURN_IF_ERROR(ReadPart(folder, part, staging));
    elements += part.slice.rows() * part.slice.cols();
    if (options.progress) {
      options.progress(static_cast<double>(elements) / static_cast<double>(all_elements));
    }
  }
  if (!has_lm_head) TieHead(config, options.plan, weights);
  return weights;
}

}  // namespace kvasir::worker
