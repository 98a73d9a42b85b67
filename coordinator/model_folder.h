// Reads a model's folder, except the tokenizer: the tokens that end a text, the size of the
// vocabulary, the chat template, and the names of the model's type and architectures. Called by the
// server at start. Pure function: thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

#include "coordinator/chat/model_chat.h"

namespace kvasir::coordinator {

struct ModelFolder {
  std::string model_type = {};                  // from config.json; empty when absent
  std::vector<std::string> architectures = {};  // from config.json; empty when absent
  // eos_token_id, a number or a list, of generation_config.json or else of config.json; empty when
  // neither file has it.
  std::vector<int32_t> eos_token_ids = {};
  // vocab_size of config.json: rows of the embedding. None when absent.
  std::optional<int64_t> vocab_size = {};
  // tokenizer_config.json, an object; none when absent.
  std::optional<nlohmann::json> tokenizer_config = {};
  ModelChat chat = {};
};

// INVALID_ARGUMENT for files that are not JSON or have other types, NOT_FOUND without config.json.
absl::StatusOr<ModelFolder> LoadModelFolder(const std::string& path);

}  // namespace kvasir::coordinator
