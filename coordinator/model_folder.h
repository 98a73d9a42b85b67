// What the coordinator reads of a model's folder besides the tokenizer: the tokens that end a text.
// Called by the server at start. Pure function: thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace kvasir::coordinator {

// eos_token_id of generation_config.json, or else of config.json: a number or a list; empty when
// neither file says. INVALID_ARGUMENT for files that are not JSON or say something else, NOT_FOUND
// without a config.json.
absl::StatusOr<std::vector<int32_t>> LoadEosTokenIds(const std::string& model_folder);

}  // namespace kvasir::coordinator
