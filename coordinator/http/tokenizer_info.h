// The answer of GET /tokenizer_info: what clients ask about a model's tokenizer, read from
// tokenizer_config.json of its folder. Called by the server at start. Pure function: thread-safe.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace kvasir::coordinator {

// Returns {tokenizer_class, bos_token, eos_token, pad_token, unk_token, chat_template}, each a
// string, or null where the file has none or is absent. INVALID_ARGUMENT when it is no JSON object.
absl::StatusOr<nlohmann::json> LoadTokenizerInfo(const std::string& model_folder);

}  // namespace kvasir::coordinator
