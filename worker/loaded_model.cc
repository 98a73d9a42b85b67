#include "worker/loaded_model.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "worker/checkpoint/model_config.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/shard_plan.h"
#include "worker/model/dummy_weights.h"
#include "worker/model/load_weights.h"

namespace kvasir::worker {
namespace {

using kernels::DType;

constexpr uint64_t kDummySeed = 0;

// The caller says what "auto" means.
absl::StatusOr<DType> ParseDType(const std::string& name, DType automatic) {
  if (name.empty() || name == "auto") return automatic;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    if (name == DTypeName(dtype)) return dtype;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("dtype '", name, "'; it must be auto, bfloat16 or float32"));
}

// As ParseDType, for cached keys and values: these may also have 8 bits an element.
absl::StatusOr<DType> ParseKvDType(const std::string& name, DType automatic) {
  if (name == "fp8" || name == "fp8_e4m3") return DType::kFloat8E4M3;
  if (name == "int8") return DType::kInt8;
  const absl::StatusOr<DType> dtype = ParseDType(name, automatic);
  if (dtype.ok()) return dtype;
  return absl::InvalidArgumentError(
      absl::StrCat("kv_cache_dtype '", name,
                   "'; it must be auto, bfloat16, float32, fp8 (or fp8_e4m3) or int8"));
}

// float16 has too little range for sums of activations; bfloat16 holds its weights within rounding.
DType ComputeDType(const ModelConfig& config) {
  const DType saved = config.dtype.value_or(DType::kFloat32);
  return saved == DType::kFloat32 ? DType::kFloat32 : DType::kBFloat16;
}

absl::StatusOr<PositionExtension> ParseExtension(const std::string& name) {
  if (name.empty() || name == "none") return PositionExtension::kNone;
  if (name == "streaming") return PositionExtension::kStreaming;
  if (name == "self_extend") return PositionExtension::kSelfExtend;
  return absl::InvalidArgumentError(
      absl::StrCat("position_extension '", name, "'; it must be none, streaming or self_extend"));
}

// Returns the groups of self_extend; off for other extensions.
absl::StatusOr<kernels::GroupedPositions> Grouped(const v1::ModelConfig& model,
                                                  const ModelConfig& config,
                                                  PositionExtension extension) {
  if (extension != PositionExtension::kSelfExtend) return kernels::GroupedPositions{};
  if (!config.layer_windows.empty()) {
    return absl::InvalidArgumentError(
        "position_extension self_extend: layers of the model have sliding windows, which are not "
        "read at grouped positions; use none or streaming");
  }
  const kernels::GroupedPositions grouped = {.group_size = model.self_extend_group_size(),
                                             .window = model.self_extend_window()};
  if (grouped.group_size >= 2 && grouped.window >= 1 &&
      grouped.window < config.max_position_embeddings) {
    return grouped;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "self_extend_group_size ", grouped.group_size, " and self_extend_window ", grouped.window,
      "; groups are of 2 tokens or more, and the window is less than the ",
      config.max_position_embeddings, " positions of the model"));
}

constexpr int64_t kLeastContext = 2;  // tokens

absl::StatusOr<int64_t> ContextLength(const v1::ModelConfig& model, const ModelConfig& config,
                                      PositionExtension extension,
                                      const kernels::GroupedPositions& grouped) {
  if (model.max_model_len() == 0) return config.max_position_embeddings;
  // Dynamic scaling is meant to go beyond the length in config.json, by its factor.
  const double stretch = config.rope.kind == RopeKind::kDynamicNtk ? config.rope.factor : 1;
  const double longest = stretch * static_cast<double>(config.max_position_embeddings);
  const bool allowed =
      model.allow_long_max_model_len() || extension == PositionExtension::kStreaming;
  if (grouped.on() && !allowed) {
    const int64_t most = grouped.LongestContext(config.max_position_embeddings);
    if (model.max_model_len() <= most) return model.max_model_len();
    return absl::InvalidArgumentError(
        absl::StrCat("max_model_len ", model.max_model_len(), " is beyond the ", most,
                     " tokens that groups of ", grouped.group_size, " behind a window of ",
                     grouped.window, " bring to the ", config.max_position_embeddings,
                     " positions of the model; lower --max-model-len, or raise "
                     "--self-extend-group-size"));
  }
  if (model.max_model_len() > longest && !allowed) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_model_len ", model.max_model_len(), " is beyond the ", longest,
                     " positions of the model; lower --max-model-len, read it by sparse selectors "
                     "with --position-extension=streaming, or give --allow-long-max-model-len to "
                     "try it all the same"));
  }
  return model.max_model_len();
}

// Part of the KV's form: the KV of deeper layers depends on how the layers below attended.
std::string FormOfKeys(PositionExtension extension, const kernels::GroupedPositions& grouped) {
  if (extension == PositionExtension::kNone) return "rotated";
  if (!grouped.on()) return "unrotated";
  return absl::StrCat("unrotated, groups of ", grouped.group_size, " behind ", grouped.window);
}

absl::StatusOr<bool> ParseIsDummy(const std::string& load_format) {
  if (load_format.empty() || load_format == "safetensors") return false;
  if (load_format == "dummy") return true;
  return absl::InvalidArgumentError(
      absl::StrCat("load_format '", load_format, "'; it must be safetensors or dummy"));
}

absl::StatusOr<kernels::WeightForm> ParseWeightForm(const std::string& weights_dtype) {
  if (weights_dtype.empty() || weights_dtype == "auto") return kernels::WeightForm::kAsInput;
  if (weights_dtype == "int8") return kernels::WeightForm::kInt8;
  return absl::InvalidArgumentError(
      absl::StrCat("weights_dtype '", weights_dtype, "'; it must be auto or int8"));
}

ModelIdentity IdentityOf(const TransformerOptions& model) {
  return {.config = model.config,
          .context_length = model.longest_position_range(),
          .dtype = model.dtype,
          .weights = model.weights};
}

absl::StatusOr<ModelWeights> ReadWeights(const LoadModelOptions& options,
                                         const TransformerOptions& model, Backend& backend,
                                         ModelHash& hash) {
  options.progress("hashing the weights", 0);
  KVASIR_ASSIGN_OR_RETURN(const SafetensorsFolder tensors,
                          SafetensorsFolder::Open(options.model.model()));
  KVASIR_ASSIGN_OR_RETURN(hash, HashModel(tensors, IdentityOf(model), backend.executor()));
  const auto progress = [&](double fraction) { options.progress("loading weights", fraction); };
  progress(0);
  return LoadWeights(tensors, model.config,
                     {.plan = model.shard, .dtype = model.dtype, .progress = progress}, backend);
}

int64_t BytesOf(const ModelWeights& weights) {
  int64_t bytes = 0;
  const auto add = [&](const auto&... tensors) { ((bytes += tensors.memory.size_bytes()), ...); };
  add(weights.embedding, weights.final_norm, weights.lm_head);
  for (const LayerWeights& layer : weights.layers) {
    add(layer.input_norm, layer.qkv, layer.qkv_bias, layer.q_norm, layer.k_norm, layer.output,
        layer.output_bias, layer.post_attention_norm, layer.gate_up, layer.down);
  }
  return bytes;
}

}  // namespace

absl::StatusOr<LoadedModel> LoadModel(const LoadModelOptions& options, Backend& backend) {
  KVASIR_ASSIGN_OR_RETURN(const bool is_dummy, ParseIsDummy(options.model.load_format()));
  KVASIR_ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(options.model.model()));
  KVASIR_ASSIGN_OR_RETURN(const ShardPlan shard,
                          ShardPlan::Make(config, options.rank, options.num_ranks));
  KVASIR_ASSIGN_OR_RETURN(const PositionExtension extension,
                          ParseExtension(options.model.position_extension()));
  KVASIR_ASSIGN_OR_RETURN(const kernels::GroupedPositions grouped,
                          Grouped(options.model, config, extension));
  KVASIR_ASSIGN_OR_RETURN(const int64_t context,
                          ContextLength(options.model, config, extension, grouped));
  if (context < kLeastContext) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the context has ", context, " tokens; a prompt and an answer need ", kLeastContext,
        ": see --max-model-len and max_position_embeddings in config.json"));
  }
  KVASIR_ASSIGN_OR_RETURN(const DType dtype,
                          ParseDType(options.model.dtype(), ComputeDType(config)));
  KVASIR_ASSIGN_OR_RETURN(const kernels::WeightForm weight_form,
                          ParseWeightForm(options.model.weights_dtype()));
  LoadedModel loaded;
  KVASIR_ASSIGN_OR_RETURN(loaded.kv_dtype, ParseKvDType(options.kv.kv_cache_dtype(), dtype));
  loaded.kv_form = absl::StrCat(FormOfKeys(extension, grouped), "/", DTypeName(loaded.kv_dtype));

  const TransformerOptions transformer = {.config = config,
                                          .shard = shard,
                                          .dtype = dtype,
                                          .weights = weight_form,
                                          .max_model_len = context,
                                          .extension = extension,
                                          .grouped = grouped};

  KVASIR_RETURN_IF_ERROR(backend.CheckModel(transformer, loaded.kv_dtype));

  ModelWeights weights;
  if (is_dummy) {
    options.progress("making random weights", 0);
    loaded.weights_hash = HashDummyModel(kDummySeed, IdentityOf(transformer));
    KVASIR_ASSIGN_OR_RETURN(
        weights,
        MakeDummyWeights(config, {.plan = shard, .dtype = dtype, .seed = kDummySeed}, backend));
  } else {
    KVASIR_ASSIGN_OR_RETURN(weights,
                            ReadWeights(options, transformer, backend, loaded.weights_hash));
  }
  loaded.weight_bytes = BytesOf(weights);
  options.progress("packing weights", 1);
  KVASIR_ASSIGN_OR_RETURN(loaded.transformer,
                          Transformer::Create(std::move(weights), transformer, backend));
  return loaded;
}

}  // namespace kvasir::worker
