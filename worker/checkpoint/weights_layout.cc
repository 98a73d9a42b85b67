#include "worker/checkpoint/weights_layout.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace kvasir::worker {

using kernels::DType;
using kernels::TensorView;

WeightsLayout::WeightsLayout(const ModelConfig& config, const ShardPlan& plan,
                             const CheckpointForm& form, ModelWeights& weights)
    : config_(config), plan_(plan) {
  const int64_t hidden = config.hidden_size;
  AddMatrix(form.prefix + "embed_tokens.weight", config.vocab_size, hidden, weights.embedding);
  weights.layers.resize(static_cast<size_t>(config.num_layers));
  for (int64_t i = 0; i < config.num_layers; ++i) {
    const std::string prefix = absl::StrCat(form.prefix, "layers.", i, ".");
    AddAttention(prefix, weights.layers[static_cast<size_t>(i)]);
    AddMlp(prefix, weights.layers[static_cast<size_t>(i)]);
  }
  AddVector(form.prefix + "norm.weight", hidden, weights.final_norm);
  if (form.has_lm_head) {
    Declare(weights.lm_head, {plan.vocab.size(), hidden});
    AddRows("lm_head.weight", {config.vocab_size, hidden}, plan.vocab, weights.lm_head, 0);
  }
}

void WeightsLayout::Declare(Tensor& target, std::initializer_list<int64_t> shape) {
  target.view = TensorView(nullptr, DType::kFloat32, shape);
  targets_.push_back(&target);
}

void WeightsLayout::AddVector(const std::string& name, int64_t size, Tensor& target) {
  Declare(target, {size});
  AddRows(name, {size}, {.begin = 0, .end = size}, target, 0);
}

void WeightsLayout::AddMatrix(const std::string& name, int64_t rows, int64_t cols, Tensor& target) {
  Declare(target, {rows, cols});
  AddRows(name, {rows, cols}, {.begin = 0, .end = rows}, target, 0);
}

void WeightsLayout::AddRows(const std::string& name, std::vector<int64_t> shape, IndexRange rows,
                            Tensor& target, int64_t target_row) {
  const int64_t cols = shape.size() == 2 ? shape[1] : 1;
  parts_.push_back({.name = name,
                    .shape = std::move(shape),
                    .slice = {.row_begin = rows.begin, .row_end = rows.end, .col_end = cols},
                    .target = &target,
                    .target_row = target_row});
}

void WeightsLayout::AddCols(const std::string& name, int64_t rows, int64_t cols, IndexRange part,
                            Tensor& target) {
  Declare(target, {rows, part.size()});
  parts_.push_back({.name = name,
                    .shape = {rows, cols},
                    .slice = {.row_end = rows, .col_begin = part.begin, .col_end = part.end},
                    .target = &target});
}

IndexRange WeightsLayout::HeadRows(IndexRange heads) const {
  return {.begin = heads.begin * config_.head_dim, .end = heads.end * config_.head_dim};
}

void WeightsLayout::AddAttention(const std::string& prefix, LayerWeights& layer) {
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

void WeightsLayout::AddQkv(const std::string& attention, LayerWeights& layer) {
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
    AddRows(absl::StrCat(attention, p.name, ".weight"), {rows, config_.hidden_size}, own, layer.qkv,
            row);
    if (config_.qkv_bias) {
      AddRows(absl::StrCat(attention, p.name, ".bias"), {rows}, own, layer.qkv_bias, row);
    }
    row += own.size();
  }
}

void WeightsLayout::AddMlp(const std::string& prefix, LayerWeights& layer) {
  const int64_t hidden = config_.hidden_size, intermediate = config_.intermediate_size;
  const IndexRange own = plan_.intermediate;
  AddVector(prefix + "post_attention_layernorm.weight", hidden, layer.post_attention_norm);
  Declare(layer.gate_up, {2 * own.size(), hidden});
  AddRows(prefix + "mlp.gate_proj.weight", {intermediate, hidden}, own, layer.gate_up, 0);
  AddRows(prefix + "mlp.up_proj.weight", {intermediate, hidden}, own, layer.gate_up, own.size());
  AddCols(prefix + "mlp.down_proj.weight", hidden, intermediate, own, layer.down);
}

void TieHead(const ModelConfig& config, const ShardPlan& plan, ModelWeights& weights) {
  const TensorView& embedding = weights.embedding.view;
  const int64_t row_bytes = config.hidden_size * static_cast<int64_t>(DTypeSize(embedding.dtype()));
  weights.lm_head.view =
      TensorView(embedding.As<std::byte>() + plan.vocab.begin * row_bytes, embedding.dtype(),
                 {plan.vocab.size(), config.hidden_size}, embedding.device());
}

}  // namespace kvasir::worker
