// What the coordinator reads of a model's folder besides the tokenizer: the tokens that end a text,
// and what the model calls itself.
// Called by the server at start. Pure function: thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace kvasir::coordinator {

struct ModelFolder {
  std::string model_type = {};                  // of config.json; empty when it does not say
  std::vector<std::string> architectures = {};  // the same
  // eos_token_id of generation_config.json, or else of config.json: a number or a list; empty when
  // neither file says.
  std::vector<int32_t> eos_token_ids = {};
};

// INVALID_ARGUMENT for files that are not JSON or say something else, NOT_FOUND without a
// config.json.
absl::StatusOr<ModelFolder> LoadModelFolder(const std::string& path);

}  // namespace kvasir::coordinator
