// Sliding windows in config.json: which layers have one, as transformers reads the same file.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>

#include "nlohmann/json.hpp"

#include "worker/checkpoint/model_config.h"

namespace kvasir::worker {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A model of two layers and 8192 positions.
absl::StatusOr<ModelConfig> Read(const std::string& architecture, const json& fields) {
  json config = {{"architectures", {architecture}},
                 {"num_hidden_layers", 2},
                 {"hidden_size", 64},
                 {"intermediate_size", 128},
                 {"num_attention_heads", 4},
                 {"num_key_value_heads", 2},
                 {"vocab_size", 100},
                 {"max_position_embeddings", 8192},
                 {"rms_norm_eps", 1e-5}};
  config.update(fields);
  return ParseModelConfig(config.dump(), "");
}

std::vector<int64_t> WindowsOf(const std::string& architecture, const json& fields) {
  const auto config = Read(architecture, fields);
  EXPECT_TRUE(config.ok()) << fields << config.status();
  return config.value_or(ModelConfig{}).layer_windows;
}

TEST(ModelWindows, MistralHasOneInAllLayers) {
  const auto windows = [](const json& fields) { return WindowsOf("MistralForCausalLM", fields); };
  EXPECT_THAT(windows({{"sliding_window", nullptr}}), ElementsAre());
  EXPECT_THAT(windows({{"sliding_window", 16}}), ElementsAre(16, 16));
  EXPECT_THAT(windows(json::object()), ElementsAre(4096, 4096));
  EXPECT_THAT(windows({{"sliding_window", 8191}}), ElementsAre(8191, 8191));
  EXPECT_THAT(windows({{"sliding_window", 8192}}), ElementsAre());  // holds every context
  EXPECT_THAT(windows({{"sliding_window", 16},
                       {"layer_types", {"sliding_attention", "sliding_attention"}}}),
              ElementsAre(16, 16));
}

TEST(ModelWindows, QwenHasOneInSomeLayersWhereItIsOn) {
  for (const char* architecture : {"Qwen2ForCausalLM", "Qwen3ForCausalLM"}) {
    const auto windows = [&](json fields) {
      fields.update({{"use_sliding_window", true}}, /*merge_objects=*/false);
      return WindowsOf(architecture, fields);
    };
    EXPECT_THAT(WindowsOf(architecture, {{"sliding_window", 16}, {"max_window_layers", 0}}),
                ElementsAre());
    EXPECT_THAT(windows({{"sliding_window", 16}}), ElementsAre());  // from layer 28 on
    EXPECT_THAT(windows({{"sliding_window", 16}, {"max_window_layers", 0}}), ElementsAre(16, 16));
    EXPECT_THAT(windows({{"sliding_window", 16}, {"max_window_layers", 1}}), ElementsAre(0, 16));
    EXPECT_THAT(windows({{"max_window_layers", 1}}), ElementsAre(0, 4096));
    EXPECT_THAT(windows({{"sliding_window", nullptr}, {"max_window_layers", 0}}), ElementsAre());
    EXPECT_THAT(windows({{"sliding_window", 16},
                         {"max_window_layers", 0},
                         {"layer_types", {"sliding_attention", "full_attention"}}}),
                ElementsAre(16, 0));
  }
}

TEST(ModelWindows, LlamaHasNone) {
  EXPECT_THAT(WindowsOf("LlamaForCausalLM", {{"sliding_window", 16}}), ElementsAre());
}

TEST(ModelWindows, ContradictionsAreRefused) {
  const auto refused = [](const std::string& architecture, const json& fields,
                          const std::string& message) {
    const absl::Status status = Read(architecture, fields).status();
    EXPECT_FALSE(status.ok()) << fields;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  };
  const json first = {"sliding_attention", "full_attention"};
  refused("Qwen2ForCausalLM", {{"layer_types", first}}, "has no sliding_window in use");
  refused("MistralForCausalLM", {{"sliding_window", 16}, {"layer_types", first}},
          "Mistral's layers are alike");
  refused("Qwen2ForCausalLM", {{"layer_types", {"full_attention"}}},
          "num_hidden_layers, which is 2");
  refused("Qwen2ForCausalLM", {{"sliding_window", 0}, {"use_sliding_window", true}},
          "sliding_window is 0");
}

}  // namespace
}  // namespace kvasir::worker
