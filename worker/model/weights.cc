#include "worker/model/weights.h"

#include <algorithm>
#include <set>
#include <spdlog/spdlog.h>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "kernels/base/status_macros.h"
#include "worker/model/convert_elements.h"
#include "worker/model/strict_json.h"

namespace kvasir::worker {
namespace {

using kernels::DType;
using kernels::DTypeSize;
using kernels::HostBuffer;
using kernels::TensorView;

constexpr int64_t kChunkBytes = int64_t{512} << 10;  // read and converted while in the CPU's cache
constexpr size_t kNamesInLog = 8;

// A tensor that the checkpoint must have, and what this rank does with it.
struct Part {
  std::string name;
  std::vector<int64_t> shape;
  MatrixSlice slice = {};        // empty: another rank's
  HostTensor* target = nullptr;  // nullptr when the slice is empty
  int64_t target_row = 0;        // where the slice begins in the target
};

// The model as a list of parts. Targets get their shapes here and their memory later.
class Layout {
 public:
  Layout(const ModelConfig& config, const ShardPlan& plan, bool has_lm_head, ModelWeights& weights)
      : config_(config), plan_(plan) {
    const int64_t hidden = config.hidden_size;
    AddMatrix("model.embed_tokens.weight", config.vocab_size, hidden, weights.embedding);
    weights.layers.resize(static_cast<size_t>(config.num_layers));
    for (int64_t i = 0; i < config.num_layers; ++i) {
      const std::string prefix = absl::StrCat("model.layers.", i, ".");
      AddAttention(prefix, weights.layers[static_cast<size_t>(i)]);
      AddMlp(prefix, weights.layers[static_cast<size_t>(i)]);
    }
    AddVector("model.norm.weight", hidden, weights.final_norm);
    if (has_lm_head) {
      Declare(weights.lm_head, {plan.vocab.size(), hidden});
      AddRows("lm_head.weight", {config.vocab_size, hidden}, plan.vocab, weights.lm_head, 0);
    }
  }

  const std::vector<Part>& parts() const { return parts_; }
  const std::vector<HostTensor*>& targets() const { return targets_; }

 private:
  void Declare(HostTensor& target, std::initializer_list<int64_t> shape) {
    target.view = TensorView(nullptr, DType::kFloat32, shape);
    targets_.push_back(&target);
  }

  // A whole tensor.
  void AddVector(const std::string& name, int64_t size, HostTensor& target) {
    Declare(target, {size});
    AddRows(name, {size}, {.begin = 0, .end = size}, target, 0);
  }
  void AddMatrix(const std::string& name, int64_t rows, int64_t cols, HostTensor& target) {
    Declare(target, {rows, cols});
    AddRows(name, {rows, cols}, {.begin = 0, .end = rows}, target, 0);
  }
  // Some rows of a matrix, or elements of a vector.
  void AddRows(const std::string& name, std::vector<int64_t> shape, IndexRange rows,
               HostTensor& target, int64_t target_row) {
    const int64_t cols = shape.size() == 2 ? shape[1] : 1;
    parts_.push_back({.name = name,
                      .shape = std::move(shape),
                      .slice = {.row_begin = rows.begin, .row_end = rows.end, .col_end = cols},
                      .target = &target,
                      .target_row = target_row});
  }
  void AddCols(const std::string& name, int64_t rows, int64_t cols, IndexRange part,
               HostTensor& target) {
    Declare(target, {rows, part.size()});
    parts_.push_back({.name = name,
                      .shape = {rows, cols},
                      .slice = {.row_end = rows, .col_begin = part.begin, .col_end = part.end},
                      .target = &target});
  }

  // Rows of `heads` in a projection to heads of head_dim each.
  IndexRange HeadRows(IndexRange heads) const {
    return {.begin = heads.begin * config_.head_dim, .end = heads.end * config_.head_dim};
  }

  void AddAttention(const std::string& prefix, LayerWeights& layer) {
    const int64_t hidden = config_.hidden_size;
    const int64_t q_rows = config_.num_heads * config_.head_dim;
    const std::string attention = prefix + "self_attn.";
    AddVector(prefix + "input_layernorm.weight", hidden, layer.input_norm);
    AddQkv(attention, layer);
    if (config_.qk_norm) {
      AddVector(attention + "q_norm.weight", config_.head_dim, layer.q_norm);
      AddVector(attention + "k_norm.weight", config_.head_dim, layer.k_norm);
    }
    AddCols(attention + "o_proj.weight", hidden, q_rows, HeadRows(plan_.query_heads), layer.output);
    if (config_.output_bias && plan_.rank == 0) {
      AddVector(attention + "o_proj.bias", hidden, layer.output_bias);
    } else if (config_.output_bias) {
      parts_.push_back({.name = attention + "o_proj.bias", .shape = {hidden}});
    }
  }

  void AddQkv(const std::string& attention, LayerWeights& layer) {
    struct Projection {
      const char* name;
      int64_t all_heads;
      IndexRange heads;
    };
    const Projection projections[] = {{"q_proj", config_.num_heads, plan_.query_heads},
                                      {"k_proj", config_.num_kv_heads, plan_.kv_heads},
                                      {"v_proj", config_.num_kv_heads, plan_.kv_heads}};
    const int64_t own_heads = plan_.query_heads.size() + 2 * plan_.kv_heads.size();
    Declare(layer.qkv, {own_heads * config_.head_dim, config_.hidden_size});
    if (config_.qkv_bias) Declare(layer.qkv_bias, {own_heads * config_.head_dim});
    int64_t row = 0;
    for (const Projection& p : projections) {
      const int64_t rows = p.all_heads * config_.head_dim;
      const IndexRange own = HeadRows(p.heads);
      AddRows(absl::StrCat(attention, p.name, ".weight"), {rows, config_.hidden_size}, own,
              layer.qkv, row);
      if (config_.qkv_bias) {
        AddRows(absl::StrCat(attention, p.name, ".bias"), {rows}, own, layer.qkv_bias, row);
      }
      row += own.size();
    }
  }

  void AddMlp(const std::string& prefix, LayerWeights& layer) {
    const int64_t hidden = config_.hidden_size, intermediate = config_.intermediate_size;
    const IndexRange own = plan_.intermediate;
    AddVector(prefix + "post_attention_layernorm.weight", hidden, layer.post_attention_norm);
    Declare(layer.gate_up, {2 * own.size(), hidden});
    AddRows(prefix + "mlp.gate_proj.weight", {intermediate, hidden}, own, layer.gate_up, 0);
    AddRows(prefix + "mlp.up_proj.weight", {intermediate, hidden}, own, layer.gate_up, own.size());
    AddCols(prefix + "mlp.down_proj.weight", hidden, intermediate, own, layer.down);
  }

  const ModelConfig& config_;
  const ShardPlan& plan_;
  std::vector<Part> parts_;
  std::vector<HostTensor*> targets_;
};

std::string Quote(const std::string& text) { return QuoteForMessage({text.data(), text.size()}); }

absl::Status CheckPart(const SafetensorsFolder& folder, const Part& part) {
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

void LogUnexpectedTensors(const SafetensorsFolder& folder, const std::vector<Part>& parts) {
  std::set<std::string> expected;
  for (const Part& part : parts) expected.insert(part.name);
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

absl::Status AllocateTarget(HostTensor& target, DType dtype) {
  const TensorView shape = target.view;
  KVASIR_ASSIGN_OR_RETURN(
      target.memory,
      HostBuffer::Allocate(shape.num_elements() * static_cast<int64_t>(DTypeSize(dtype))));
  target.view = shape.rank() == 1
                    ? TensorView(target.memory.data(), dtype, {shape.dim(0)})
                    : TensorView(target.memory.data(), dtype, {shape.dim(0), shape.dim(1)});
  return absl::OkStatus();
}

// Reads a part into its target, a chunk of whole rows at a time.
absl::Status ReadPart(const SafetensorsFolder& folder, const Part& part,
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

}  // namespace

absl::StatusOr<ModelWeights> LoadWeights(const SafetensorsFolder& folder, const ModelConfig& config,
                                         const LoadWeightsOptions& options) {
  // Where a tied checkpoint has a head all the same, the head is used, as in transformers.
  const bool has_lm_head = !config.tie_word_embeddings || folder.Find("lm_head.weight") != nullptr;
  ModelWeights weights;
  const Layout layout(config, options.plan, has_lm_head, weights);
  int64_t all_elements = 0;
  for (const Part& part : layout.parts()) {
    KVASIR_RETURN_IF_ERROR(CheckPart(folder, part));
    all_elements += part.slice.rows() * part.slice.cols();
  }
  LogUnexpectedTensors(folder, layout.parts());
  for (HostTensor* target : layout.targets()) {
    KVASIR_RETURN_IF_ERROR(AllocateTarget(*target, options.dtype));
  }
  std::vector<std::byte> staging;
  int64_t elements = 0;
  for (const Part& part : layout.parts()) {
    if (part.target != nullptr) KVASIR_RETURN_IF_ERROR(ReadPart(folder, part, staging));
    elements += part.slice.rows() * part.slice.cols();
    if (options.progress) {
      options.progress(static_cast<double>(elements) / static_cast<double>(all_elements));
    }
  }
  if (!has_lm_head) {
    const int64_t row_bytes = config.hidden_size * static_cast<int64_t>(DTypeSize(options.dtype));
    weights.lm_head.view =
        TensorView(weights.embedding.memory.data() + options.plan.vocab.begin * row_bytes,
                   options.dtype, {options.plan.vocab.size(), config.hidden_size});
  }
  return weights;
}

}  // namespace kvasir::worker
