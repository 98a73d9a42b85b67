// config.json and generation_config.json of a Hugging Face model folder, checked and in our own
// words. It hides the many spellings of the same fact and their defaults. Read when a worker
// starts; everything else takes a ModelConfig and may rely on the ranges below. Plain data and
// functions without state.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/base/dtype.h"

namespace kvasir::worker {

enum class ModelFamily : uint8_t { kLlama, kQwen2, kQwen3, kMistral };
absl::string_view ModelFamilyName(ModelFamily family);

enum class RopeKind : uint8_t { kPlain, kLinear, kDynamicNtk, kYarn, kLlama3 };
absl::string_view RopeKindName(RopeKind kind);

// Parameters of the rotary embedding; rope_frequencies.h has the formulas. Fields that a kind does
// not use keep their defaults.
struct RopeConfig {
  RopeKind kind = RopeKind::kPlain;
  double theta = 10'000.0;                       // base of the wavelengths, > 1
  double factor = 1.0;                           // >= 1
  int64_t original_max_position_embeddings = 0;  // yarn, llama3: before the extension
  std::optional<double> attention_factor;        // yarn: given outright
  std::optional<double> mscale, mscale_all_dim;  // yarn: given as a quotient
  double beta_fast = 32.0, beta_slow = 1.0;      // yarn: rotations; fast > slow > 0
  bool truncate = true;                          // yarn: whole dimensions as bounds of the ramp
  double low_freq_factor = 1.0, high_freq_factor = 4.0;  // llama3: high > low > 0
};

struct ModelConfig {
  ModelFamily family = ModelFamily::kLlama;
  int64_t num_layers = 0;               // 1 .. 1024
  int64_t hidden_size = 0;              // 1 .. 131,072
  int64_t intermediate_size = 0;        // 1 .. 1,048,576
  int64_t num_heads = 0;                // 1 .. 1024
  int64_t num_kv_heads = 0;             // divides num_heads
  int64_t head_dim = 0;                 // even, 4 .. 512
  int64_t vocab_size = 0;               // 1 .. 2,097,152
  int64_t max_position_embeddings = 0;  // 1 .. 2^30
  double rms_norm_eps = 0;              // above 0, below 1
  // Whether the output head is the embedding. Unset: it is if the checkpoint has no head.
  std::optional<bool> tie_word_embeddings;
  bool qkv_bias = false;     // q_proj, k_proj and v_proj have a bias
  bool output_bias = false;  // o_proj has a bias
  bool qk_norm = false;      // RMSNorm over head_dim of each query and key head
  // Per layer: tokens that a query sees, the last of which is its own; 0: all before it. Empty: no
  // layer has a window.
  std::vector<int64_t> layer_windows;
  RopeConfig rope;
  std::optional<kernels::DType> dtype;  // of the saved weights, if it is given
  std::optional<int32_t> bos_token_id;
  std::vector<int32_t> eos_token_ids;  // from generation_config.json, else config.json; sorted

  int64_t queries_per_kv_head() const { return num_heads / num_kv_heads; }
  // Context length at which a token's attention costs as much as its matrix products. Counts
  // multiplications. A layer has its weights, and two products of head_dim per head and token.
  int64_t attention_parity_tokens() const {
    const int64_t query_width = num_heads * head_dim;
    const int64_t kv_width = num_kv_heads * head_dim;
    const int64_t weights = hidden_size * (2 * query_width + 2 * kv_width + 3 * intermediate_size);
    return weights / (2 * query_width);
  }
};

// INVALID_ARGUMENT when a field is missing, of the wrong type or out of range; UNIMPLEMENTED when
// the model is sound but not served (its architecture, activation, experts, ...).
// Messages name the field, what was found and what was expected. `generation_config` may be empty.
absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view config,
                                             absl::string_view generation_config);

// Reads config.json and, if it exists, generation_config.json of `folder`.
absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& folder);

}  // namespace kvasir::worker
