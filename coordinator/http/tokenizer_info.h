// The answer of GET /tokenizer_info: what clients ask about a model's tokenizer. Called by the
// server at start. Pure function: thread-safe.
#pragma once

#include <optional>
#include <string>

#include "nlohmann/json.hpp"

namespace kvasir::coordinator {

// Returns {tokenizer_class, bos_token, eos_token, pad_token, unk_token}, each a string, or null
// where tokenizer_config.json has none or is absent, and the chat_template that serves, or null.
nlohmann::json TokenizerInfo(const std::optional<nlohmann::json>& tokenizer_config,
                             const std::optional<std::string>& chat_template);

}  // namespace kvasir::coordinator
