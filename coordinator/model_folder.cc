#include "coordinator/model_folder.h"

#include <fstream>
#include <limits>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

#include "coordinator/tokenizer/json_value.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using nlohmann::json;

constexpr size_t kMaxConfigBytes = size_t{16} << 20;
constexpr JsonLimits kLimits = {.max_values = 1 << 20, .max_keys = 1 << 20, .max_depth = 64};
constexpr char kEosKey[] = "eos_token_id";

// Returns nullopt when there is no such file.
absl::StatusOr<std::optional<std::string>> ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  std::string text(kMaxConfigBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.size() > kMaxConfigBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " is longer than ", kMaxConfigBytes, " bytes; is it the right file?"));
  }
  return text;
}

absl::StatusOr<std::optional<json>> ReadJson(const std::string& path) {
  KVASIR_ASSIGN_OR_RETURN(const std::optional<std::string> text, ReadText(path));
  if (!text.has_value()) return std::nullopt;
  absl::StatusOr<json> document = ParseJson(*text, kLimits);
  if (!document.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " is not a JSON object: ", document.status().message()));
  }
  if (!document->is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is not a JSON object"));
  }
  return *std::move(document);
}

absl::StatusOr<ModelChat> LoadChat(const std::string& path,
                                   const std::optional<json>& tokenizer_config) {
  ChatFiles files = {.tokenizer_config = tokenizer_config};
  KVASIR_ASSIGN_OR_RETURN(files.jinja, ReadText(path + "/chat_template.jinja"));
  KVASIR_ASSIGN_OR_RETURN(files.chat_template, ReadJson(path + "/chat_template.json"));
  return ModelChat(files);
}

absl::StatusOr<int32_t> TokenId(const json& value, const std::string& path) {
  if (value.is_number_integer()) {
    const auto id = value.get<int64_t>();
    if (id >= 0 && id <= std::numeric_limits<int32_t>::max()) return static_cast<int32_t>(id);
  }
  return absl::InvalidArgumentError(
      absl::StrCat(path, ": ", kEosKey, " holds ", value.dump(), "; it must be a token id"));
}

absl::StatusOr<std::vector<int32_t>> TokenIds(const json& value, const std::string& path) {
  std::vector<int32_t> ids;
  const json list = value.is_array() ? value : json::array({value});
  for (const json& element : list) {
    if (element.type() == json::value_t::number_integer && element == -1) continue;  // no token
    KVASIR_ASSIGN_OR_RETURN(ids.emplace_back(), TokenId(element, path));
  }
  return ids;
}

absl::StatusOr<std::vector<int32_t>> EosTokenIds(const json& document, const std::string& path) {
  const auto value = document.find(kEosKey);
  if (value == document.end() || value->is_null()) return std::vector<int32_t>();
  return TokenIds(*value, path);
}

}  // namespace

absl::StatusOr<ModelFolder> LoadModelFolder(const std::string& path) {
  const std::string config_path = absl::StrCat(path, "/config.json");
  const std::string generation_path = absl::StrCat(path, "/generation_config.json");
  KVASIR_ASSIGN_OR_RETURN(const std::optional<json> config, ReadJson(config_path));
  KVASIR_ASSIGN_OR_RETURN(const std::optional<json> generation, ReadJson(generation_path));
  if (!config.has_value()) {
    return absl::NotFoundError(
        absl::StrCat("there is no ", config_path, "; is --model a model folder?"));
  }
  ModelFolder folder;
  if (generation.has_value()) {
    KVASIR_ASSIGN_OR_RETURN(folder.eos_token_ids, EosTokenIds(*generation, generation_path));
  }
  if (folder.eos_token_ids.empty()) {
    KVASIR_ASSIGN_OR_RETURN(folder.eos_token_ids, EosTokenIds(*config, config_path));
  }
  if (const auto size = config->find("vocab_size"); size != config->end()) {
    if (!size->is_number_integer() || *size < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat(config_path, ": vocab_size is ", size->dump(), "; it must be at least 1"));
    }
    folder.vocab_size = size->get<int64_t>();
  }
  KVASIR_ASSIGN_OR_RETURN(folder.tokenizer_config, ReadJson(path + "/tokenizer_config.json"));
  KVASIR_ASSIGN_OR_RETURN(folder.chat, LoadChat(path, folder.tokenizer_config));
  // Only people read these, so values that are not text are left out.
  if (const auto type = config->find("model_type"); type != config->end() && type->is_string()) {
    folder.model_type = *type;
  }
  for (const json& name : config->value("architectures", json::array())) {
    if (name.is_string()) folder.architectures.push_back(name);
  }
  return folder;
}

}  // namespace kvasir::coordinator
