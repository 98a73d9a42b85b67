#include "worker/checkpoint/model_config.h"

#include <cmath>
#include <filesystem>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

#include "tests/worker/model/test_files.h"
#include "worker/checkpoint/rope_frequencies.h"
#include "worker/checkpoint/shard_plan.h"
#include <nlohmann/json.hpp>

namespace kvasir::worker {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

json Llama() {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"model_type", "llama"},
          {"hidden_size", 64},
          {"intermediate_size", 96},
          {"num_hidden_layers", 2},
          {"num_attention_heads", 4},
          {"num_key_value_heads", 2},
          {"head_dim", 32},
          {"vocab_size", 256},
          {"max_position_embeddings", 8192},
          {"rms_norm_eps", 1e-5},
          {"rope_theta", 500000.0},
          {"hidden_act", "silu"}};
}

json With(json config, const json& fields) {
  for (const auto& [key, value] : fields.items()) {
    if (value == "absent") {
      config.erase(key);
    } else {
      config[key] = value;
    }
  }
  return config;
}

json Qwen(const std::string& number, const json& fields) {
  const json qwen = {{"architectures", {"Qwen" + number + "ForCausalLM"}},
                     {"model_type", "qwen" + number},
                     {"use_sliding_window", false},
                     {"sliding_window", 4096}};
  return With(With(Llama(), qwen), fields);
}

// Mistral 7B v0.2 and later, in small.
json Mistral(const json& fields) {
  const json mistral = {{"architectures", {"MistralForCausalLM"}},
                        {"model_type", "mistral"},
                        {"rope_theta", 1e6},
                        {"sliding_window", nullptr}};
  return With(With(Llama(), mistral), fields);
}

ModelConfig Parse(const json& config, const std::string& generation = "") {
  const auto parsed = ParseModelConfig(config.dump(), generation);
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  return parsed.value_or(ModelConfig{});
}

struct Refusal {
  json fields;  // over Llama()
  std::string message;
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
};

void ExpectRefused(const json& config, const Refusal& refusal) {
  const auto parsed = ParseModelConfig(config.dump(), "");
  EXPECT_EQ(parsed.status().code(), refusal.code) << refusal.fields << parsed.status();
  EXPECT_THAT(std::string(parsed.status().message()), HasSubstr(refusal.message));
}

TEST(ModelConfig, ReadsLlama) {
  const ModelConfig config = Parse(With(Llama(), {{"torch_dtype", "bfloat16"},
                                                  {"bos_token_id", 0},
                                                  {"eos_token_id", 7},
                                                  {"tie_word_embeddings", true}}));
  EXPECT_EQ(config.family, ModelFamily::kLlama);
  EXPECT_EQ(config.num_layers, 2);
  EXPECT_EQ(config.hidden_size, 64);
  EXPECT_EQ(config.intermediate_size, 96);
  EXPECT_EQ(config.num_heads, 4);
  EXPECT_EQ(config.num_kv_heads, 2);
  EXPECT_EQ(config.queries_per_kv_head(), 2);
  EXPECT_EQ(config.head_dim, 32);
  EXPECT_EQ(config.vocab_size, 256);
  EXPECT_EQ(config.max_position_embeddings, 8192);
  EXPECT_EQ(config.rms_norm_eps, 1e-5);
  EXPECT_EQ(config.rope.theta, 500000.0);
  EXPECT_EQ(config.tie_word_embeddings, true);
  EXPECT_FALSE(config.qkv_bias || config.output_bias || config.qk_norm);
  EXPECT_EQ(config.dtype, kernels::DType::kBFloat16);
  EXPECT_EQ(config.bos_token_id, 0);
  EXPECT_THAT(config.eos_token_ids, ElementsAre(7));
}

TEST(ModelConfig, DefaultsAreThoseOfTransformers) {
  const ModelConfig llama = Parse(With(Llama(), {{"num_key_value_heads", "absent"},
                                                 {"head_dim", nullptr},
                                                 {"rope_theta", "absent"},
                                                 {"hidden_act", "absent"}}));
  EXPECT_EQ(llama.num_kv_heads, 4);
  EXPECT_EQ(llama.head_dim, 16);
  EXPECT_EQ(llama.rope.theta, 10000.0);
  EXPECT_EQ(llama.tie_word_embeddings, std::nullopt);
  EXPECT_EQ(llama.dtype, std::nullopt);
  EXPECT_EQ(llama.bos_token_id, std::nullopt);
  EXPECT_TRUE(llama.eos_token_ids.empty());
  EXPECT_EQ(Parse(Qwen("3", {{"head_dim", "absent"}})).head_dim, 128);
}

// As many key heads as query heads, no head_dim, no theta.
TEST(ModelConfig, ReadsLlama2) {
  const ModelConfig config = Parse(With(Llama(), {{"num_key_value_heads", 4},
                                                  {"head_dim", "absent"},
                                                  {"rope_theta", "absent"},
                                                  {"pretraining_tp", 1}}));
  EXPECT_EQ(config.queries_per_kv_head(), 1);
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_EQ(config.rope.theta, 10000.0);
}

TEST(ModelConfig, ReadsMistralWithoutAWindow) {
  const ModelConfig config = Parse(Mistral({{"attention_bias", true}}));
  EXPECT_EQ(config.family, ModelFamily::kMistral);
  EXPECT_EQ(ModelFamilyName(config.family), "mistral");
  EXPECT_EQ(config.rope.theta, 1e6);
  EXPECT_FALSE(config.qkv_bias || config.output_bias || config.qk_norm);
  EXPECT_EQ(Parse(Mistral({{"head_dim", "absent"}})).head_dim, 16);
  const json narrow = {{"sliding_window", "absent"}, {"max_position_embeddings", 4096}};
  EXPECT_EQ(Parse(Mistral(narrow)).max_position_embeddings, 4096);
}

TEST(ModelConfig, FamiliesDifferInBiasAndNorm) {
  const ModelConfig qwen2 = Parse(Qwen("2", {}));
  EXPECT_TRUE(qwen2.qkv_bias);
  EXPECT_FALSE(qwen2.output_bias);
  EXPECT_FALSE(qwen2.qk_norm);
  const ModelConfig qwen3 =
      Parse(Qwen("3", {{"layer_types", {"full_attention", "full_attention"}}}));
  EXPECT_FALSE(qwen3.qkv_bias);
  EXPECT_TRUE(qwen3.qk_norm);
  EXPECT_TRUE(Parse(Qwen("3", {{"attention_bias", true}})).output_bias);
  const ModelConfig biased = Parse(With(Llama(), {{"attention_bias", true}}));
  EXPECT_TRUE(biased.qkv_bias && biased.output_bias);
}

TEST(ModelConfig, EosTokensOfGenerationConfigWin) {
  const json config = With(Llama(), {{"eos_token_id", {9, 3, 9}}});
  EXPECT_THAT(Parse(config).eos_token_ids, ElementsAre(3, 9));
  EXPECT_THAT(Parse(config, R"({"temperature": 0.5})").eos_token_ids, ElementsAre(3, 9));
  EXPECT_THAT(Parse(config, R"({"eos_token_id": 5})").eos_token_ids, ElementsAre(5));
  EXPECT_THAT(Parse(config, R"({"eos_token_id": [6, 5]})").eos_token_ids, ElementsAre(5, 6));
  for (const char* bad :
       {"[]", "{", R"({"eos_token_id": 256})", R"({"eos_token_id": [1, -2]})",
        R"({"eos_token_id": "1"})", R"({"eos_token_id": 18446744073709551615})"}) {
    const auto parsed = ParseModelConfig(config.dump(), bad);
    EXPECT_THAT(std::string(parsed.status().message()), HasSubstr("generation_config.json: "));
  }
}

TEST(ModelConfig, RopeHasTwoSpellings) {
  const ModelConfig older =
      Parse(With(Llama(), {{"rope_scaling", {{"type", "linear"}, {"factor", 4}}}}));
  EXPECT_EQ(older.rope.kind, RopeKind::kLinear);
  EXPECT_EQ(older.rope.factor, 4.0);
  EXPECT_EQ(older.rope.theta, 500000.0);
  const ModelConfig newer = Parse(With(Llama(), {{"rope_parameters",
                                                  {{"rope_type", "llama3"},
                                                   {"rope_theta", 1e6},
                                                   {"factor", 8.0},
                                                   {"low_freq_factor", 1.0},
                                                   {"high_freq_factor", 4.0},
                                                   {"original_max_position_embeddings", 2048}}}}));
  EXPECT_EQ(newer.rope.kind, RopeKind::kLlama3);
  EXPECT_EQ(newer.rope.theta, 1e6);
  EXPECT_EQ(newer.rope.original_max_position_embeddings, 2048);
  EXPECT_EQ(Parse(With(Llama(), {{"rope_scaling", nullptr}})).rope.kind, RopeKind::kPlain);
  EXPECT_EQ(Parse(With(Llama(), {{"rope_scaling", json::object()}})).rope.kind, RopeKind::kPlain);
}

TEST(ModelConfig, SoundModelsThatAreNotServed) {
  const std::vector<Refusal> refusals = {
      {{{"architectures", {"GemmaForCausalLM"}}}, "expected one of LlamaForCausalLM, Mistral"},
      {{{"architectures", {"MixtralForCausalLM"}}}, "mixture of experts"},
      {{{"architectures", {"Qwen3MoeForCausalLM"}}}, "[\"Qwen3MoeForCausalLM\"], expected one of"},
      {{{"hidden_act", "gelu"}}, "hidden_act is \"gelu\", expected silu"},
      {{{"mlp_bias", true}}, "mlp_bias is true, expected false"},
      {{{"quantization_config", {{"bits", 4}}}}, "quantization_config is {\"bits\":4}"},
      {{{"num_experts", 8}}, "num_experts is 8, expected none"},
      {{{"num_local_experts", 8}}, "num_local_experts is 8"},
      {{{"n_routed_experts", 8}}, "n_routed_experts is 8"},
      {{{"architectures", "absent"}, {"model_type", "mixtral"}},
       "expected one of llama, mistral, q"},
      {{{"torch_dtype", "float8_e4m3fn"}}, "torch_dtype is \"float8_e4m3fn\", expected float32"},
      {{{"partial_rotary_factor", 0.5}}, "partial_rotary_factor is 0.5, expected 1"},
      {{{"rope_scaling", {{"rope_type", "longrope"}}}}, "rope_type is \"longrope\", expected one"},
      {{{"rope_scaling", {{"type", "mrope"}}}}, "type is \"mrope\", expected one of default"},
      {{{"rope_parameters", {{"full_attention", {{"rope_type", "default"}}}}}},
       "expected one set of rope parameters for all layers"},
      {{{"rope_parameters", {{"partial_rotary_factor", 0.25}}}},
       "config.json: rope_parameters: partial_rotary_factor is 0.25"},
  };
  for (Refusal refusal : refusals) {
    refusal.code = absl::StatusCode::kUnimplemented;
    ExpectRefused(With(Llama(), refusal.fields), refusal);
  }
  const std::vector<Refusal> of_qwen = {
      {{{"layer_types", {"full_attention", "linear_attention"}}},
       "num_hidden_layers, which is 2, times full_attention or sliding_attention"},
      {{{"layer_types", "full_attention"}}, "times full_attention or sliding_attention"},
      {{{"layer_types", {"full_attention"}}}, "num_hidden_layers, which is 2"},
  };
  for (Refusal refusal : of_qwen) {
    refusal.code = absl::StatusCode::kUnimplemented;
    ExpectRefused(Qwen("2", refusal.fields), refusal);
  }
  const std::vector<Refusal> of_mistral = {
      {{{"sliding_window", 16}, {"layer_types", {"full_attention", "sliding_attention"}}},
       "a list of sliding_attention only: Mistral's layers are alike"},
  };
  for (Refusal refusal : of_mistral) {
    refusal.code = absl::StatusCode::kUnimplemented;
    ExpectRefused(Mistral(refusal.fields), refusal);
  }
}

// Config files found in practice, which transformers accepts.
TEST(ModelConfig, OddFilesOfServedModels) {
  const json bare = {{"architectures", "absent"}};
  EXPECT_EQ(Parse(With(With(Llama(), bare), {{"model_type", "llama"}})).family,
            ModelFamily::kLlama);
  EXPECT_EQ(Parse(With(Qwen("3", bare), {{"model_type", "qwen3"}})).family, ModelFamily::kQwen3);
  EXPECT_EQ(Parse(Qwen("2", {{"num_key_value_heads", nullptr}})).num_kv_heads, 4);
  EXPECT_EQ(Parse(With(Llama(), {{"num_key_value_heads", nullptr}})).num_kv_heads, 4);
  const ModelConfig no_tokens =
      Parse(With(Llama(), {{"bos_token_id", -1}, {"eos_token_id", {-1, 7}}}));
  EXPECT_EQ(no_tokens.bos_token_id, std::nullopt);
  EXPECT_THAT(no_tokens.eos_token_ids, ElementsAre(7));
  // Llama's code has no sliding window. For the others, one that holds every context is none.
  Parse(With(Llama(), {{"sliding_window", 16}, {"layer_types", {"sliding_attention"}}}));
  Parse(Qwen("2", {{"use_sliding_window", true}, {"sliding_window", nullptr}}));
  Parse(Qwen("2", {{"use_sliding_window", true},
                   {"sliding_window", 8192},
                   {"layer_types", {"sliding_attention"}}}));
}

TEST(ModelConfig, ContradictionsAndNonsense) {
  const json yarn = {{"rope_type", "yarn"}, {"factor", 4.0}};
  const json llama3 = {{"rope_type", "llama3"},
                       {"factor", 8.0},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0}};
  const std::vector<Refusal> refusals = {
      {{{"architectures", "absent"}, {"model_type", "absent"}},
       "architectures is missing, expected a list of one name"},
      {{{"architectures", json::array()}}, "architectures is [], expected a list of one name"},
      {{{"architectures", {"LlamaForCausalLM", "x"}}}, "expected a list of one name"},
      {{{"architectures", {1}}}, "architectures is [1], expected a list of one name"},
      {{{"model_type", "mistral"}}, "model_type is \"mistral\", expected llama, which goes with"},
      {{{"num_hidden_layers", int64_t{1} << 31}},
       "num_hidden_layers is 2147483648, expected a whole number from 1 to 1024"},
      {{{"num_hidden_layers", 2.0}}, "num_hidden_layers is 2.0, expected a whole number"},
      {{{"head_dim", 0}}, "head_dim is 0, expected a whole number from 4 to 512"},
      {{{"head_dim", 33}}, "head_dim is 33, expected an even number"},
      {{{"head_dim", "absent"}, {"hidden_size", 66}}, "expected a multiple of num_attention_heads"},
      {{{"num_key_value_heads", 3}},
       "num_key_value_heads is 3, expected a divisor of num_attention_heads, which is 4"},
      {{{"num_key_value_heads", 8}}, "num_key_value_heads is 8, expected a divisor"},
      {{{"rms_norm_eps", "1e-5"}}, "rms_norm_eps is \"1e-5\", expected a number"},
      {{{"rms_norm_eps", 0}}, "rms_norm_eps is 0, expected a number"},
      {{{"rope_theta", -1}}, "rope_theta is -1, expected a number from 2 to 1e+15"},
      {{{"rope_theta", true}}, "rope_theta is true, expected a number"},
      {{{"tie_word_embeddings", 1}}, "tie_word_embeddings is 1, expected true or false"},
      {{{"bos_token_id", 256}}, "bos_token_id is 256, expected a whole number from -1 to 255"},
      {{{"eos_token_id", -2}}, "eos_token_id is -2, expected at most 64 token ids from 0 to 255"},
      {{{"eos_token_id", std::vector<int>(65, 1)}}, "expected at most 64 token ids"},
      {{{"rope_scaling", 4}}, "config.json: rope_scaling: is 4, expected an object"},
      {{{"rope_scaling", {{"rope_type", 1}}}}, "rope_type is 1, expected a text"},
      {{{"rope_scaling", {{"type", "linear"}}}}, "factor is missing, expected a number"},
      {{{"rope_scaling", {{"type", "dynamic"}, {"factor", 0.5}}}},
       "factor is 0.5, expected a numb"},
      {{{"rope_scaling", With(yarn, {{"factor", -4}})}}, "factor is -4, expected a number"},
      {{{"rope_scaling", With(yarn, {{"beta_fast", 1}})}}, "expected more than beta_slow"},
      {{{"rope_scaling", With(yarn, {{"attention_factor", 0}})}},
       "attention_factor is 0, expected"},
      {{{"rope_scaling",
         With(yarn, {{"factor", nullptr}, {"original_max_position_embeddings", 16384}})}},
       "max_position_embeddings over original_max_position_embeddings is 0.5"},
      {{{"rope_scaling", With(yarn, {{"original_max_position_embeddings", 2048}})},
        {"original_max_position_embeddings", 4096}},
       "original_max_position_embeddings is 2048, expected 4096, as at the top"},
      {{{"rope_scaling", With(llama3, {{"high_freq_factor", 1.0}})}},
       "high_freq_factor is 1.0, expected more than low_freq_factor, which is 1"},
      {{{"rope_scaling", With(llama3, {{"low_freq_factor", "absent"}})}},
       "low_freq_factor is missing, expected a number"},
  };
  for (const Refusal& refusal : refusals) ExpectRefused(With(Llama(), refusal.fields), refusal);
  ExpectRefused(Qwen("2", {{"num_key_value_heads", "absent"}}),
                {{}, "num_key_value_heads is missing"});
  for (const char* text : {"", "[]", "1", "{", R"({"vocab_size": 1, "vocab_size": 2})"}) {
    EXPECT_EQ(ParseModelConfig(text, "").status().code(), absl::StatusCode::kInvalidArgument);
  }
}

// Edge values of a field, as JSON.
constexpr char kEdgeValues[] =
    R"(null true false 0 -0 1 -1 2 3 4 64 127 512 513 1024 1025 65535 65536 2097152 2097153
2147483647 2147483648 -2147483648 4294967295 4294967296 1073741824 1073741825
9007199254740993 9223372036854775807 9223372036854775808 -9223372036854775808
18446744073709551615 18446744073709551616 0.0 -0.0 0.5 1.0 2.5 1e-13 1e-300 4e-324 1e15 1e16
1e308 -1e308 1e999 NaN Infinity -Infinity "" "4" "NaN" "full_attention" [] [1] [[]] [1,2,3]
[4294967296] {} {"a":1} {"rope_type":"yarn"})";

// The parameters of rope scaling that may be given.
std::vector<json> RopeScalings() {
  const json yarn = {{"rope_type", "yarn"},
                     {"factor", 4.0},
                     {"beta_fast", 32},
                     {"beta_slow", 1},
                     {"original_max_position_embeddings", 2048},
                     {"attention_factor", 1.5},
                     {"mscale", 1.0},
                     {"mscale_all_dim", 0.5},
                     {"truncate", true},
                     {"rope_theta", 10000.0},
                     {"partial_rotary_factor", 1.0}};
  const json llama3 = {{"rope_type", "llama3"},
                       {"factor", 8.0},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0},
                       {"original_max_position_embeddings", 2048}};
  const json dynamic = {{"type", "dynamic"}, {"factor", 8.0}};
  return {yarn, llama3, dynamic};
}

json WithEveryField(const json& rope) {
  const json everything = {{"use_sliding_window", false},
                           {"sliding_window", 4096},
                           {"layer_types", {"full_attention", "full_attention"}},
                           {"num_experts", 0},
                           {"mlp_bias", false},
                           {"attention_bias", false},
                           {"dtype", "float16"},
                           {"bos_token_id", 1},
                           {"eos_token_id", 2},
                           {"tie_word_embeddings", false},
                           {"quantization_config", nullptr},
                           {"partial_rotary_factor", 1.0}};
  json config = Qwen("3", everything);
  config["rope_scaling"] = rope;
  return config;
}

// Returns whether `text` is a config. Its error names `field` or what is derived from it, and its
// derived quantities are valid.
bool NamesTheFieldOrIsValid(const std::string& text, const std::string& field) {
  const auto config = ParseModelConfig(text, "");
  if (!config.ok()) {
    EXPECT_LT(config.status().message().size(), 500u);
    EXPECT_THAT(std::string(config.status().message()),
                testing::AnyOf(HasSubstr(field), HasSubstr("head_dim"), HasSubstr("not valid JSON"),
                               HasSubstr("rope_"), HasSubstr("beta_fast"), HasSubstr("token_id")))
        << text;
    return false;
  }
  const RopeFrequencies frequencies =
      ComputeRopeFrequencies(*config, config->max_position_embeddings);
  EXPECT_EQ(frequencies.inv_freq.size(), static_cast<size_t>(config->head_dim / 2)) << text;
  for (const double f : frequencies.inv_freq) EXPECT_TRUE(f > 0 && f <= 1) << text;
  EXPECT_TRUE(std::isfinite(frequencies.attention_factor)) << text;
  EXPECT_TRUE(ShardPlan::Make(*config, 0, 1).ok()) << text;
  return true;
}

// Each field with each edge value gives an error that names the field, or a config whose every
// derived quantity is valid. Nothing is allocated in proportion to a value.
TEST(ModelConfig, AnyFieldMayHoldAnyValue) {
  int num_ok = 0, num_refused = 0;
  for (const json& rope : RopeScalings()) {
    const json base = WithEveryField(rope);
    std::vector<json::json_pointer> fields;
    for (const auto& [key, unused] : base.items()) fields.push_back(json::json_pointer("/" + key));
    for (const auto& [key, unused] : rope.items()) {
      fields.push_back(json::json_pointer("/rope_scaling/" + key));
    }
    for (const json::json_pointer& field : fields) {
      for (const absl::string_view value : absl::StrSplit(kEdgeValues, absl::ByAnyChar(" \n"))) {
        json marked = base;
        marked[field] = "@";
        std::string text = marked.dump();
        text.replace(text.find("\"@\""), 3, value.data(), value.size());
        ++(NamesTheFieldOrIsValid(text, field.back()) ? num_ok : num_refused);
      }
    }
  }
  EXPECT_GT(num_ok, 500);
  EXPECT_GT(num_refused, 2000);
}

TEST(ModelConfig, CorpusIsAcceptedOrRefusedAsItsNamesSay) {
  int num_files = 0;
  for (const auto& entry : std::filesystem::directory_iterator("tests/fuzz/corpus/model_config")) {
    const std::string content = ReadFile(entry.path());
    const size_t nul = std::min(content.find('\0'), content.size());
    const std::string generation = nul < content.size() ? content.substr(nul + 1) : "";
    const std::string name = entry.path().filename();
    const auto config = ParseModelConfig(content.substr(0, nul), generation);
    EXPECT_EQ(config.ok(), name.starts_with("ok_")) << name << ": " << config.status();
    ++num_files;
  }
  EXPECT_GT(num_files, 20);
}

TEST(LoadModelConfig, ReadsAFolderOfTransformers) {
  const auto config = LoadModelConfig(std::string(kTestData) + "/llama-tied");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->tie_word_embeddings, true);
  EXPECT_EQ(config->head_dim, 16);
  EXPECT_EQ(config->dtype, kernels::DType::kBFloat16);
  EXPECT_THAT(config->eos_token_ids, ElementsAre(1));
}

TEST(LoadModelConfig, NamesTheFolderAndTheFile) {
  const TemporaryFolder folder;
  EXPECT_EQ(LoadModelConfig(folder.path()).status().code(), absl::StatusCode::kNotFound);
  WriteFile(folder.File("config.json"), "{}");
  EXPECT_THAT(std::string(LoadModelConfig(folder.path()).status().message()),
              HasSubstr(folder.path() + ": config.json: architectures is missing"));
  WriteFile(folder.File("config.json"), std::string((1 << 20) + 1, ' '));
  EXPECT_THAT(std::string(LoadModelConfig(folder.path()).status().message()),
              HasSubstr("has 1048577 bytes, expected at most 1048576"));
}

}  // namespace
}  // namespace kvasir::worker
