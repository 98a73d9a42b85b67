// A Llama with random weights in a temporary folder, for tests that need a model whose output has
// no meaning. Weights are scaled so that attention is far from uniform and the greedy choice has a
// margin. The same seed gives the same weights.
#pragma once

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

#include "tests/worker/model/test_files.h"
#include "worker/checkpoint/model_config.h"

namespace kvasir::worker {

inline ModelConfig RandomModelShape() {
  ModelConfig config;
  config.num_layers = 3;
  config.hidden_size = 48;
  config.intermediate_size = 64;
  config.num_heads = 8;
  config.num_kv_heads = 4;
  config.head_dim = 16;
  config.vocab_size = 101;  // not a multiple of the ranks
  config.max_position_embeddings = 4096;
  config.rms_norm_eps = 1e-5;
  return config;
}

class RandomModel {
 public:
  explicit RandomModel(const ModelConfig& c = RandomModelShape(), uint32_t seed = 1)
      : random_(seed) {
    const int64_t q = c.num_heads * c.head_dim, kv = c.num_kv_heads * c.head_dim;
    AddMatrix("model.embed_tokens.weight", c.vocab_size, c.hidden_size, 1.0);
    for (int64_t i = 0; i < c.num_layers; ++i) {
      const std::string layer = absl::StrCat("model.layers.", i, ".");
      AddNorm(layer + "input_layernorm.weight", c.hidden_size);
      AddLinear(layer + "self_attn.q_proj.weight", q, c.hidden_size);
      AddLinear(layer + "self_attn.k_proj.weight", kv, c.hidden_size);
      AddLinear(layer + "self_attn.v_proj.weight", kv, c.hidden_size);
      AddLinear(layer + "self_attn.o_proj.weight", c.hidden_size, q);
      AddNorm(layer + "post_attention_layernorm.weight", c.hidden_size);
      AddLinear(layer + "mlp.gate_proj.weight", c.intermediate_size, c.hidden_size);
      AddLinear(layer + "mlp.up_proj.weight", c.intermediate_size, c.hidden_size);
      AddLinear(layer + "mlp.down_proj.weight", c.hidden_size, c.intermediate_size);
    }
    AddNorm("model.norm.weight", c.hidden_size);
    AddLinear("lm_head.weight", c.vocab_size, c.hidden_size);
    WriteFile(folder_.File("model.safetensors"), SafetensorsBytes(tensors_));
    const nlohmann::json config = {{"architectures", {"LlamaForCausalLM"}},
                                   {"model_type", "llama"},
                                   {"hidden_act", "silu"},
                                   {"num_hidden_layers", c.num_layers},
                                   {"hidden_size", c.hidden_size},
                                   {"intermediate_size", c.intermediate_size},
                                   {"num_attention_heads", c.num_heads},
                                   {"num_key_value_heads", c.num_kv_heads},
                                   {"head_dim", c.head_dim},
                                   {"vocab_size", c.vocab_size},
                                   {"max_position_embeddings", c.max_position_embeddings},
                                   {"rms_norm_eps", c.rms_norm_eps},
                                   {"rope_theta", 10000.0},
                                   {"torch_dtype", "float32"}};
    WriteFile(folder_.File("config.json"), config.dump());
  }

  const std::string& folder() const { return folder_.path(); }

 private:
  void AddLinear(const std::string& name, int64_t rows, int64_t cols) {
    AddMatrix(name, rows, cols, 1.5 / std::sqrt(static_cast<double>(cols)));
  }
  void AddMatrix(const std::string& name, int64_t rows, int64_t cols, double scale) {
    Add(name, {rows, cols}, 0.0, scale);
  }
  void AddNorm(const std::string& name, int64_t size) { Add(name, {size}, 1.0, 0.2); }
  void Add(const std::string& name, const std::vector<int64_t>& shape, double mean, double scale) {
    // Sums of uniform numbers are close enough to normal, and equal with every library.
    const auto uniform = [this] { return static_cast<double>(random_()) / 4294967296.0 - 0.5; };
    int64_t count = 1;
    for (const int64_t dim : shape) count *= dim;
    std::string data;
    for (int64_t i = 0; i < count; ++i) {
      const double normal = 2 * (uniform() + uniform() + uniform());
      const float value = static_cast<float>(mean + scale * normal);
      data.append(reinterpret_cast<const char*>(&value), sizeof(value));
    }
    tensors_.push_back({name, "F32", shape, std::move(data)});
  }

  std::mt19937 random_;
  TemporaryFolder folder_;
  std::vector<TestTensor> tensors_;
};

}  // namespace kvasir::worker
