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

// The template is text, or a list of templates by name of which "default" serves.
json ChatTemplate(const json& config) {
  const auto found = config.find("chat_template");
  if (found == config.end()) return nullptr;
  if (found->is_string()) return *found;
  if (!found->is_array()) return nullptr;
  for (const json& entry : *found) {
    if (entry.is_object() && entry.value("name", json()) == "default") {
      return entry.value("template", json());
    }
  }
  return nullptr;
}

}  // namespace

json TokenizerInfo(const std::optional<json>& tokenizer_config) {
  const json config = tokenizer_config.value_or(json::object());
  json info;
  for (const char* key : {"tokenizer_class", "bos_token", "eos_token", "pad_token", "unk_token"}) {
    info[key] = TokenText(config, key);
  }
  info["chat_template"] = ChatTemplate(config);
  return info;
}

}  // namespace kvasir::coordinator
