// The answer of GET /tokenizer_info: what clients ask about a model's tokenizer. Called by the
// server at start. Pure function: thread-safe.
#pragma once

#include <optional>

#include "nlohmann/json.hpp"

namespace kvasir::coordinator {

// Returns {tokenizer_class, bos_token, eos_token, pad_token, unk_token, chat_template}, each a
// string, or null where tokenizer_config.json has none or is absent.
nlohmann::json TokenizerInfo(const std::optional<nlohmann::json>& tokenizer_config);

}  // namespace kvasir::coordinator
