// A small checkpoint in Hugging Face names whose every weight is known: a multiple of 1/64 between
// -2 and 2, exact in every dtype, different for neighbours and for equal places of two tensors.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/dtype.h"
#include "tests/worker/model/test_files.h"
#include "worker/checkpoint/model_config.h"

namespace kvasir::worker {

inline ModelConfig TinyModel() {
  ModelConfig config;
  config.num_layers = 2;
  config.hidden_size = 16;
  config.intermediate_size = 24;
  config.num_heads = 8;
  config.num_kv_heads = 2;
  config.head_dim = 4;
  config.vocab_size = 37;
  config.max_position_embeddings = 128;
  config.rms_norm_eps = 1e-5;
  return config;
}

class TestCheckpoint {
 public:
  // dtype: F32, BF16 or F16.
  TestCheckpoint(const ModelConfig& config, const std::string& dtype) : dtype_(dtype) {
    const int64_t hidden = config.hidden_size, d = config.head_dim;
    const int64_t q = config.num_heads * d, kv = config.num_kv_heads * d;
    AddWeight("model.embed_tokens.weight", {config.vocab_size, hidden});
    for (int64_t i = 0; i < config.num_layers; ++i) {
      const std::string layer = absl::StrCat("model.layers.", i, ".");
      AddWeight(layer + "input_layernorm.weight", {hidden});
      AddWeight(layer + "self_attn.q_proj.weight", {q, hidden});
      AddWeight(layer + "self_attn.k_proj.weight", {kv, hidden});
      AddWeight(layer + "self_attn.v_proj.weight", {kv, hidden});
      AddWeight(layer + "self_attn.o_proj.weight", {hidden, q});
      if (config.qkv_bias) {
        AddWeight(layer + "self_attn.q_proj.bias", {q});
        AddWeight(layer + "self_attn.k_proj.bias", {kv});
        AddWeight(layer + "self_attn.v_proj.bias", {kv});
      }
      if (config.output_bias) AddWeight(layer + "self_attn.o_proj.bias", {hidden});
      if (config.qk_norm) {
        AddWeight(layer + "self_attn.q_norm.weight", {d});
        AddWeight(layer + "self_attn.k_norm.weight", {d});
      }
      AddWeight(layer + "post_attention_layernorm.weight", {hidden});
      AddWeight(layer + "mlp.gate_proj.weight", {config.intermediate_size, hidden});
      AddWeight(layer + "mlp.up_proj.weight", {config.intermediate_size, hidden});
      AddWeight(layer + "mlp.down_proj.weight", {hidden, config.intermediate_size});
    }
    AddWeight("model.norm.weight", {hidden});
    if (!config.tie_word_embeddings.value_or(false)) {
      AddWeight("lm_head.weight", {config.vocab_size, hidden});
    }
  }

  const std::vector<TestTensor>& tensors() const { return tensors_; }

  // The weight as it was made (Set does not change it).
  double Value(const std::string& name, int64_t row, int64_t col) const {
    const size_t index = IndexOf(name);
    return ValueAt(index, row * Cols(tensors_[index]) + col);
  }
  TestTensor& Find(const std::string& name) { return tensors_[IndexOf(name)]; }
  void Add(TestTensor tensor) { tensors_.push_back(std::move(tensor)); }
  void Remove(const std::string& name) {
    tensors_.erase(tensors_.begin() + static_cast<int64_t>(IndexOf(name)));
  }
  // Gives the same tensors shorter names.
  void DropPrefix(const std::string& prefix) {
    for (TestTensor& tensor : tensors_) {
      if (tensor.name.starts_with(prefix)) tensor.name.erase(0, prefix.size());
    }
  }
  // REQUIRES: an F32 checkpoint.
  void Set(const std::string& name, int64_t row, int64_t col, float value) {
    TestTensor& tensor = Find(name);
    const int64_t i = row * Cols(tensor) + col;
    std::memcpy(tensor.data.data() + i * 4, &value, 4);
  }

 private:
  static int64_t Cols(const TestTensor& tensor) {
    return tensor.shape.size() == 2 ? tensor.shape[1] : 1;
  }
  static double ValueAt(size_t tensor, int64_t i) {
    return static_cast<double>((static_cast<int64_t>(tensor) * 131 + i * 17) % 251 - 125) / 64;
  }
  size_t IndexOf(const std::string& name) const {
    const auto it = std::find_if(tensors_.begin(), tensors_.end(),
                                 [&name](const TestTensor& t) { return t.name == name; });
    KVASIR_CHECK(it != tensors_.end());
    return static_cast<size_t>(it - tensors_.begin());
  }
  // The bits of a normal float16; the values here have at most 8 significant bits.
  static uint16_t HalfBits(float value) {
    if (value == 0.0f) return 0;
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t exponent = (bits >> 23 & 0xff) - 127 + 15;
    return static_cast<uint16_t>((bits >> 16 & 0x8000u) | exponent << 10 | (bits >> 13 & 0x3ffu));
  }
  std::string Encode(double value) const {
    const float wide = static_cast<float>(value);
    if (dtype_ == "F32") return Bytes(wide);
    return dtype_ == "BF16" ? Bytes(kernels::BFloat16(wide)) : Bytes(HalfBits(wide));
  }
  template <typename T>
  static std::string Bytes(T value) {
    std::string bytes(sizeof(T), '\0');
    std::memcpy(bytes.data(), &value, sizeof(T));
    return bytes;
  }
  void AddWeight(const std::string& name, const std::vector<int64_t>& shape) {
    int64_t count = 1;
    for (const int64_t dim : shape) count *= dim;
    std::string data;
    for (int64_t i = 0; i < count; ++i) data += Encode(ValueAt(tensors_.size(), i));
    tensors_.push_back({name, dtype_, shape, data});
  }

  std::string dtype_;
  std::vector<TestTensor> tensors_;
};

}  // namespace kvasir::worker
