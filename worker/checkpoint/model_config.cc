#include "worker/checkpoint/model_config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "worker/checkpoint/input_file.h"
#include "worker/checkpoint/json_fields.h"
#include "worker/checkpoint/strict_json.h"

namespace kvasir::worker {
namespace {

using absl::StatusCode;
using nlohmann::json;
using IntRange = JsonFields::IntRange;
using NumberRange = JsonFields::NumberRange;

constexpr int64_t kMaxConfigBytes = int64_t{1} << 20;

// Wide enough for every model of these families, narrow enough that no product of two passes 2^53.
constexpr IntRange kLayers = {1, 1024};
constexpr IntRange kHidden = {1, 131'072};
constexpr IntRange kIntermediate = {1, 1'048'576};
constexpr IntRange kHeads = {1, 1024};
constexpr IntRange kHeadDim = {4, 512};
constexpr IntRange kVocab = {1, 2'097'152};
constexpr IntRange kPositions = {1, int64_t{1} << 30};
constexpr NumberRange kEps = {1e-12, 0.1};
constexpr NumberRange kTheta = {2.0, 1e15};
constexpr NumberRange kFactor = {1.0, 1e6};
constexpr NumberRange kFrequencyFactor = {1e-3, 1e6};
constexpr NumberRange kAttentionFactor = {1e-3, 1e3};
constexpr NumberRange kMscale = {0.0, 1e3};
constexpr size_t kMaxEosTokens = 64;
// Values where a file has none.
constexpr int64_t kDefaultWindow = 4096;
constexpr int64_t kMaxWindowLayers = 28;

struct FamilyRow {
  ModelFamily family;
  const char* name;
  const char* architecture;
  const char* model_type;
};
constexpr FamilyRow kFamilies[] = {
    {ModelFamily::kLlama, "llama", "LlamaForCausalLM", "llama"},
    {ModelFamily::kQwen2, "qwen2", "Qwen2ForCausalLM", "qwen2"},
    {ModelFamily::kQwen3, "qwen3", "Qwen3ForCausalLM", "qwen3"},
    {ModelFamily::kMistral, "mistral", "MistralForCausalLM", "mistral"},
};

struct RopeRow {
  RopeKind kind;
  const char* name;  // as rope_type
};
constexpr RopeRow kRopeKinds[] = {
    {RopeKind::kPlain, "default"},      {RopeKind::kLinear, "linear"},
    {RopeKind::kDynamicNtk, "dynamic"}, {RopeKind::kYarn, "yarn"},
    {RopeKind::kLlama3, "llama3"},
};

constexpr char kServedFamilies[] =
    "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM (mixture of experts "
    "and multi-modal models are not served)";

const FamilyRow* FindFamily(const char* FamilyRow::*field, const std::string& name) {
  const auto* row = std::find_if(std::begin(kFamilies), std::end(kFamilies),
                                 [&](const FamilyRow& r) { return name == r.*field; });
  return row == std::end(kFamilies) ? nullptr : row;
}

// Files written for the bare model have only model_type.
ModelFamily ReadFamily(JsonFields& fields) {
  const json* list = fields.Get("architectures");
  const std::optional<std::string> model_type = fields.OptionalString("model_type");
  if (list == nullptr && model_type.has_value()) {
    const FamilyRow* row = FindFamily(&FamilyRow::model_type, *model_type);
    if (row != nullptr) return row->family;
    fields.Expect("model_type", "one of llama, mistral, qwen2, qwen3, or architectures given",
                  StatusCode::kUnimplemented);
    return ModelFamily::kLlama;
  }
  const bool is_one_name =
      list != nullptr && list->is_array() && list->size() == 1 && list->front().is_string();
  if (!is_one_name) {
    fields.Expect("architectures", "a list of one name such as [\"LlamaForCausalLM\"]");
    return ModelFamily::kLlama;
  }
  const std::string& name = list->front().get_ref<const std::string&>();
  const FamilyRow* row = FindFamily(&FamilyRow::architecture, name);
  if (row == nullptr) {
    fields.Expect("architectures", absl::StrCat("one of ", kServedFamilies),
                  StatusCode::kUnimplemented);
    return ModelFamily::kLlama;
  }
  if (model_type.value_or(row->model_type) != row->model_type) {
    fields.Expect("model_type", absl::StrCat(row->model_type, ", which goes with ", name));
  }
  return row->family;
}

// Refuses settings that the families allow but that we do not compute.
void CheckServed(JsonFields& fields) {
  constexpr StatusCode kNo = StatusCode::kUnimplemented;
  if (fields.OptionalString("hidden_act").value_or("silu") != "silu") {
    fields.Expect("hidden_act", "silu", kNo);
  }
  if (fields.Bool("mlp_bias", false)) fields.Expect("mlp_bias", "false", kNo);
  if (fields.Get("quantization_config") != nullptr) {
    fields.Expect("quantization_config", "none: weights in float32, bfloat16 or float16", kNo);
  }
  for (const char* key : {"num_experts", "num_local_experts", "n_routed_experts"}) {
    if (fields.OptionalInt(key, {0, 1'000'000}).value_or(0) != 0) {
      fields.Expect(key, "none: mixture of experts is not served", kNo);
    }
  }
}

// Returns which layers have the model's window: as layer_types says, else all of Mistral's and
// those of Qwen's from max_window_layers on.
std::vector<bool> ReadWindowedLayers(JsonFields& fields, const ModelConfig& config,
                                     bool has_window) {
  const size_t num_layers = static_cast<size_t>(config.num_layers);
  const json* types = fields.Get("layer_types");
  std::vector<bool> windowed(num_layers);
  if (types == nullptr) {
    const bool is_mistral = config.family == ModelFamily::kMistral;
    const int64_t first =
        is_mistral ? 0 : fields.Int("max_window_layers", {0, kLayers.max}, kMaxWindowLayers);
    for (size_t i = 0; i < num_layers; ++i) {
      windowed[i] = has_window && static_cast<int64_t>(i) >= first;
    }
    return windowed;
  }
  const auto is_known = [](const json& type) {
    return type == "full_attention" || type == "sliding_attention";
  };
  if (!types->is_array() || types->size() != num_layers ||
      !std::all_of(types->begin(), types->end(), is_known)) {
    fields.Expect("layer_types",
                  absl::StrCat("num_hidden_layers, which is ", num_layers,
                               ", times full_attention or sliding_attention"),
                  StatusCode::kUnimplemented);
    return windowed;
  }
  for (size_t i = 0; i < num_layers; ++i) windowed[i] = (*types)[i] == "sliding_attention";
  return windowed;
}

// Llama's code has no sliding window, whatever its files say. Qwen's files state one also when it
// is off. Mistral's is on unless it is null. One that holds the model's longest context is full
// attention.
void ReadWindows(JsonFields& fields, ModelConfig& config) {
  if (config.family == ModelFamily::kLlama) return;
  const bool is_mistral = config.family == ModelFamily::kMistral;
  const int64_t unsaid = fields.IsNull("sliding_window") ? 0 : kDefaultWindow;
  int64_t window = fields.OptionalInt("sliding_window", kPositions).value_or(unsaid);
  if (!is_mistral && !fields.Bool("use_sliding_window", false)) window = 0;
  if (window >= config.max_position_embeddings) return;
  const std::vector<bool> windowed = ReadWindowedLayers(fields, config, window > 0);
  const int64_t count = std::count(windowed.begin(), windowed.end(), true);
  if (window == 0 && count > 0) {
    fields.Expect("layer_types",
                  "a list of full_attention only, because the file has no sliding_window in use");
    return;
  }
  if (window > 0 && is_mistral && count < config.num_layers) {
    fields.Expect("layer_types", "a list of sliding_attention only: Mistral's layers are alike",
                  StatusCode::kUnimplemented);
    return;
  }
  if (count == 0) return;
  for (const bool has_window : windowed) config.layer_windows.push_back(has_window ? window : 0);
}

RopeKind ReadRopeKind(JsonFields& rope) {
  // "type" is the older spelling; rope_type takes precedence where both exist.
  const char* key = rope.Get("rope_type") != nullptr ? "rope_type" : "type";
  const std::string name = rope.OptionalString(key).value_or("default");
  const auto* row = std::find_if(std::begin(kRopeKinds), std::end(kRopeKinds),
                                 [&name](const RopeRow& r) { return name == r.name; });
  if (row != std::end(kRopeKinds)) return row->kind;
  rope.Expect(key, "one of default, linear, dynamic, yarn, llama3", StatusCode::kUnimplemented);
  return RopeKind::kPlain;
}

int64_t ReadOriginalPositions(JsonFields& top, JsonFields& rope, int64_t max_positions) {
  const char* key = "original_max_position_embeddings";
  const std::optional<int64_t> outer = top.OptionalInt(key, kPositions);
  const std::optional<int64_t> inner = rope.OptionalInt(key, kPositions);
  if (outer.has_value() && inner.has_value() && *outer != *inner) {
    rope.Expect(key, absl::StrCat(*outer, ", as at the top of config.json"));
  }
  return outer.value_or(inner.value_or(max_positions));
}

void ReadYarn(JsonFields& fields, int64_t max_positions, RopeConfig& rope) {
  const double implied = static_cast<double>(max_positions) /
                         static_cast<double>(rope.original_max_position_embeddings);
  rope.factor = fields.Number("factor", kFactor, implied);
  if (rope.factor < kFactor.min || rope.factor > kFactor.max) {
    fields.Expect("factor", absl::StrCat("it given: max_position_embeddings over "
                                         "original_max_position_embeddings is ",
                                         implied));
  }
  rope.attention_factor = fields.OptionalNumber("attention_factor", kAttentionFactor);
  rope.mscale = fields.OptionalNumber("mscale", kMscale);
  rope.mscale_all_dim = fields.OptionalNumber("mscale_all_dim", kMscale);
  rope.beta_fast = fields.Number("beta_fast", kFrequencyFactor, rope.beta_fast);
  rope.beta_slow = fields.Number("beta_slow", kFrequencyFactor, rope.beta_slow);
  rope.truncate = fields.Bool("truncate", true);
  if (rope.beta_fast <= rope.beta_slow) {
    fields.Expect("beta_fast", absl::StrCat("more than beta_slow, which is ", rope.beta_slow));
  }
}

void ReadLlama3(JsonFields& fields, RopeConfig& rope) {
  rope.factor = fields.Number("factor", kFactor);
  rope.low_freq_factor = fields.Number("low_freq_factor", kFrequencyFactor);
  rope.high_freq_factor = fields.Number("high_freq_factor", kFrequencyFactor);
  if (rope.high_freq_factor <= rope.low_freq_factor) {
    fields.Expect("high_freq_factor",
                  absl::StrCat("more than low_freq_factor, which is ", rope.low_freq_factor));
  }
}

void CheckWholeUniformRope(JsonFields& fields) {
  if (fields.Number("partial_rotary_factor", {0.0, 1.0}, 1.0) != 1.0) {
    fields.Expect("partial_rotary_factor", "1", StatusCode::kUnimplemented);
  }
  for (const char* key : {"full_attention", "sliding_attention"}) {
    if (fields.Get(key) != nullptr) {
      fields.Expect(key, "one set of rope parameters for all layers", StatusCode::kUnimplemented);
    }
  }
}

// The parameters lie in rope_scaling (older; takes precedence when not empty) or rope_parameters,
// and theta inside or beside them.
RopeConfig ReadRope(JsonFields& top, int64_t max_positions) {
  const json none = json::object();
  const json* found = top.Get("rope_scaling");
  const char* key = "rope_scaling";
  if (found == nullptr || found->empty()) {
    found = top.Get("rope_parameters");
    key = "rope_parameters";
  }
  JsonFields fields(found == nullptr ? none : *found, absl::StrCat("config.json: ", key));
  CheckWholeUniformRope(top);
  CheckWholeUniformRope(fields);
  RopeConfig rope;
  rope.kind = ReadRopeKind(fields);
  rope.theta = fields.Number("rope_theta", kTheta, top.Number("rope_theta", kTheta, rope.theta));
  switch (rope.kind) {
    case RopeKind::kPlain:
      break;
    case RopeKind::kLinear:
    case RopeKind::kDynamicNtk:
      rope.factor = fields.Number("factor", kFactor);
      break;
    case RopeKind::kYarn:
      rope.original_max_position_embeddings = ReadOriginalPositions(top, fields, max_positions);
      ReadYarn(fields, max_positions, rope);
      break;
    case RopeKind::kLlama3:
      rope.original_max_position_embeddings = ReadOriginalPositions(top, fields, max_positions);
      ReadLlama3(fields, rope);
      break;
  }
  top.Adopt(fields.status());
  return rope;
}

void ReadHeads(JsonFields& fields, ModelConfig& config) {
  // Old Llama files leave out num_key_value_heads; the other families never do. Null means as many
  // as there are query heads.
  std::optional<int64_t> default_kv_heads;
  if (config.family == ModelFamily::kLlama || fields.IsNull("num_key_value_heads")) {
    default_kv_heads = config.num_heads;
  }
  config.num_kv_heads = fields.Int("num_key_value_heads", kHeads, default_kv_heads);
  if (config.num_heads % config.num_kv_heads != 0) {
    fields.Expect("num_key_value_heads",
                  absl::StrCat("a divisor of num_attention_heads, which is ", config.num_heads));
  }
  const std::optional<int64_t> head_dim = fields.OptionalInt("head_dim", kHeadDim);
  if (head_dim.has_value()) {
    config.head_dim = *head_dim;
  } else if (config.family == ModelFamily::kQwen3) {
    config.head_dim = 128;  // the family's default, whatever hidden_size is
  } else {
    config.head_dim = config.hidden_size / config.num_heads;
    if (config.hidden_size % config.num_heads != 0) {
      fields.Expect("hidden_size", absl::StrCat("a multiple of num_attention_heads, which is ",
                                                config.num_heads, ", or head_dim given"));
    }
  }
  if (config.head_dim % 2 != 0 || config.head_dim < kHeadDim.min ||
      config.head_dim > kHeadDim.max) {
    fields.Fail(StatusCode::kInvalidArgument,
                absl::StrCat("head_dim is ", config.head_dim, ", expected an even number from ",
                             kHeadDim.min, " to ", kHeadDim.max));
  }
}

std::optional<kernels::DType> ReadDType(JsonFields& fields) {
  const char* key = fields.Get("dtype") != nullptr ? "dtype" : "torch_dtype";
  const std::optional<std::string> name = fields.OptionalString(key);
  if (!name.has_value()) return std::nullopt;
  for (const kernels::DType dtype :
       {kernels::DType::kFloat32, kernels::DType::kBFloat16, kernels::DType::kFloat16}) {
    if (kernels::DTypeName(dtype) == *name) return dtype;
  }
  fields.Expect(key, "float32, bfloat16 or float16", StatusCode::kUnimplemented);
  return std::nullopt;
}

// Placeholder for no token where a file must give one.
constexpr int64_t kNoToken = -1;

// Reads a number, a list of numbers, or nothing.
std::vector<int32_t> ReadEosTokens(JsonFields& fields, int64_t vocab_size) {
  const json* value = fields.Get("eos_token_id");
  if (value == nullptr) return {};
  const json list = value->is_array() ? *value : json::array({*value});
  std::vector<int32_t> ids;
  for (const json& item : list) {
    const std::optional<int64_t> id = JsonFields::WholeNumber(item, {kNoToken, vocab_size - 1});
    if (id == kNoToken) continue;
    if (!id.has_value() || ids.size() == kMaxEosTokens) {
      fields.Expect("eos_token_id", absl::StrCat("at most ", kMaxEosTokens, " token ids from 0 to ",
                                                 vocab_size - 1));
      return {};
    }
    ids.push_back(static_cast<int32_t>(*id));
  }
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

void ReadShape(JsonFields& fields, ModelConfig& config) {
  config.num_layers = fields.Int("num_hidden_layers", kLayers);
  config.hidden_size = fields.Int("hidden_size", kHidden);
  config.intermediate_size = fields.Int("intermediate_size", kIntermediate);
  config.num_heads = fields.Int("num_attention_heads", kHeads);
  config.vocab_size = fields.Int("vocab_size", kVocab);
  config.max_position_embeddings = fields.Int("max_position_embeddings", kPositions);
  config.rms_norm_eps = fields.Number("rms_norm_eps", kEps);
  ReadHeads(fields, config);
}

}  // namespace

absl::string_view ModelFamilyName(ModelFamily family) {
  return kFamilies[static_cast<size_t>(family)].name;
}

absl::string_view RopeKindName(RopeKind kind) { return kRopeKinds[static_cast<size_t>(kind)].name; }

absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view config_text,
                                             absl::string_view generation_config_text) {
  KVASIR_ASSIGN_OR_RETURN(const json config_json, ParseStrictJson(config_text, "config.json"));
  JsonFields fields(config_json, "config.json");
  ModelConfig config;
  config.family = ReadFamily(fields);
  CheckServed(fields);
  ReadShape(fields, config);
  ReadWindows(fields, config);
  if (fields.Get("tie_word_embeddings") != nullptr) {
    config.tie_word_embeddings = fields.Bool("tie_word_embeddings", false);
  }
  // Qwen2 has biases on q, k and v by definition and none on o. Mistral has none, whatever its
  // files say. The others say so for all four.
  const bool says_bias =
      config.family == ModelFamily::kLlama || config.family == ModelFamily::kQwen3;
  config.output_bias = says_bias && fields.Bool("attention_bias", false);
  config.qkv_bias = config.family == ModelFamily::kQwen2 || config.output_bias;
  config.qk_norm = config.family == ModelFamily::kQwen3;
  config.rope = ReadRope(fields, config.max_position_embeddings);
  config.dtype = ReadDType(fields);
  const std::optional<int64_t> bos =
      fields.OptionalInt("bos_token_id", {kNoToken, config.vocab_size - 1});
  if (bos.value_or(kNoToken) != kNoToken) config.bos_token_id = static_cast<int32_t>(*bos);
  config.eos_token_ids = ReadEosTokens(fields, config.vocab_size);
  KVASIR_RETURN_IF_ERROR(fields.status());

  if (generation_config_text.empty()) return config;
  KVASIR_ASSIGN_OR_RETURN(const json generation_json,
                          ParseStrictJson(generation_config_text, "generation_config.json"));
  JsonFields generation(generation_json, "generation_config.json");
  std::vector<int32_t> eos_token_ids = ReadEosTokens(generation, config.vocab_size);
  if (!eos_token_ids.empty()) config.eos_token_ids = std::move(eos_token_ids);
  KVASIR_RETURN_IF_ERROR(generation.status());
  return config;
}

absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& folder) {
  KVASIR_ASSIGN_OR_RETURN(const std::string config,
                          ReadTextFile(folder + "/config.json", kMaxConfigBytes));
  absl::StatusOr<std::string> generation_config =
      ReadTextFile(folder + "/generation_config.json", kMaxConfigBytes);
  if (absl::IsNotFound(generation_config.status())) generation_config = "";
  KVASIR_RETURN_IF_ERROR(generation_config.status());
  absl::StatusOr<ModelConfig> parsed = ParseModelConfig(config, *generation_config);
  if (parsed.ok()) return parsed;
  return absl::Status(parsed.status().code(),
                      absl::StrCat(folder, ": ", parsed.status().message()));
}

}  // namespace kvasir::worker
