#include "coordinator/http/tokenizer_info.h"

#include <fstream>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "coordinator/tokenizer/json_value.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using nlohmann::json;

constexpr size_t kMaxFileBytes = size_t{16} << 20;
constexpr JsonLimits kLimits = {.max_values = 1 << 20, .max_keys = 1 << 20, .max_depth = 64};

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

absl::StatusOr<json> LoadTokenizerInfo(const std::string& model_folder) {
  const std::string path = absl::StrCat(model_folder, "/tokenizer_config.json");
  json config = json::object();
  if (std::ifstream file(path, std::ios::binary); file) {
    std::string text(kMaxFileBytes + 1, '\0');
    file.read(text.data(), static_cast<std::streamsize>(text.size()));
    text.resize(static_cast<size_t>(file.gcount()));
    if (text.size() > kMaxFileBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, " is longer than ", kMaxFileBytes, " bytes; is it the right file?"));
    }
    absl::StatusOr<json> parsed = ParseJson(text, kLimits);
    if (!parsed.ok() || !parsed->is_object()) {
      return absl::InvalidArgumentError(absl::StrCat(path, " is not a JSON object"));
    }
    config = *std::move(parsed);
  }
  json info;
  for (const char* key : {"tokenizer_class", "bos_token", "eos_token", "pad_token", "unk_token"}) {
    info[key] = TokenText(config, key);
  }
  info["chat_template"] = ChatTemplate(config);
  return info;
}

}  // namespace kvasir::coordinator
