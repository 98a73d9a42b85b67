#include "worker/loaded_model.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "worker/model/model_config.h"
#include "worker/model/safetensors.h"
#include "worker/model/shard_plan.h"
#include "worker/model/weights.h"

namespace kvasir::worker {
namespace {

using kernels::DType;

// What "auto" stands for is the caller's.
absl::StatusOr<DType> ParseDType(const std::string& name, DType automatic) {
  if (name.empty() || name == "auto") return automatic;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    if (name == DTypeName(dtype)) return dtype;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("dtype '", name, "'; it must be auto, bfloat16 or float32"));
}

// float16 has too little range for sums of activations; bfloat16 holds its weights within rounding.
DType ComputeDType(const ModelConfig& config) {
  const DType saved = config.dtype.value_or(DType::kFloat32);
  return saved == DType::kFloat32 ? DType::kFloat32 : DType::kBFloat16;
}

absl::StatusOr<PositionExtension> ParseExtension(const std::string& name) {
  if (name.empty() || name == "none") return PositionExtension::kNone;
  if (name == "streaming") return PositionExtension::kStreaming;
  return absl::InvalidArgumentError(
      absl::StrCat("position_extension '", name, "'; it must be none or streaming"));
}

absl::StatusOr<int64_t> ContextLength(const v1::ModelConfig& model, const ModelConfig& config,
                                      PositionExtension extension) {
  if (model.max_model_len() == 0) return config.max_position_embeddings;
  // Dynamic scaling is made to go beyond what config.json says, by its factor.
  const double stretch = config.rope.kind == RopeKind::kDynamicNtk ? config.rope.factor : 1;
  const double longest = stretch * static_cast<double>(config.max_position_embeddings);
  const bool allowed = model.allow_long_max_model_len() || extension != PositionExtension::kNone;
  if (model.max_model_len() > longest && !allowed) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_model_len ", model.max_model_len(), " is beyond the ", longest,
                     " positions of the model; lower --max-model-len, read it by sparse selectors "
                     "with --position-extension=streaming, or give --allow-long-max-model-len to "
                     "try it all the same"));
  }
  return model.max_model_len();
}

}  // namespace

absl::StatusOr<LoadedModel> LoadModel(const LoadModelOptions& options, Backend& backend) {
  const std::string& folder = options.model.model();
  KVASIR_ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(folder));
  KVASIR_ASSIGN_OR_RETURN(const ShardPlan shard,
                          ShardPlan::Make(config, options.rank, options.num_ranks));
  KVASIR_ASSIGN_OR_RETURN(const PositionExtension extension,
                          ParseExtension(options.model.position_extension()));
  KVASIR_ASSIGN_OR_RETURN(const int64_t context, ContextLength(options.model, config, extension));
  KVASIR_ASSIGN_OR_RETURN(const DType dtype,
                          ParseDType(options.model.dtype(), ComputeDType(config)));
  LoadedModel loaded;
  KVASIR_ASSIGN_OR_RETURN(loaded.kv_dtype, ParseDType(options.kv.kv_cache_dtype(), dtype));
  loaded.kv_form = absl::StrCat(extension == PositionExtension::kNone ? "rotated/" : "unrotated/",
                                DTypeName(loaded.kv_dtype));

  const TransformerOptions transformer = {.config = config,
                                          .shard = shard,
                                          .dtype = dtype,
                                          .max_model_len = context,
                                          .extension = extension};

  KVASIR_RETURN_IF_ERROR(backend.CheckModel(transformer, loaded.kv_dtype));

  options.progress("hashing the weights", 0);
  KVASIR_ASSIGN_OR_RETURN(const SafetensorsFolder tensors, SafetensorsFolder::Open(folder));
  KVASIR_ASSIGN_OR_RETURN(loaded.weights_hash,
                          HashModel(tensors, config, transformer.longest_position_range(), dtype));
  const auto progress = [&](double fraction) { options.progress("loading weights", fraction); };
  KVASIR_ASSIGN_OR_RETURN(
      ModelWeights weights,
      LoadWeights(tensors, config, {.plan = shard, .dtype = dtype, .progress = progress}));
  options.progress("packing weights", 1);
  KVASIR_ASSIGN_OR_RETURN(loaded.transformer,
                          Transformer::Create(std::move(weights), transformer, backend));
  return loaded;
}

}  // namespace kvasir::worker
