#include "coordinator/http/tokenizer_info.h"

namespace kvasir::coordinator {
namespace {

using nlohmann::json;

// A token is written as its text or as {"content": text}.
json TokenText(const json& config, const char* key) {
  const auto token = config.find(key);
  if (token == config.end()) return nullptr;
  if (token->is_string()) return *token;
  if (!token->is_object()) return nullptr;
  const auto content = token->find("content");
  return content != token->end() && content->is_string() ? *content : json(nullptr);
}

}  // namespace

json TokenizerInfo(const std::optional<json>& tokenizer_config,
                   const std::optional<std::string>& chat_template) {
  const json config = tokenizer_config.value_or(json::object());
  json info;
  for (const char* key : {"tokenizer_class", "bos_token", "eos_token", "pad_token", "unk_token"}) {
    info[key] = TokenText(config, key);
  }
  info["chat_template"] = chat_template.has_value() ? json(*chat_template) : json(nullptr);
  return info;
}

}  // namespace kvasir::coordinator
