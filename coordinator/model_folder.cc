#include "coordinator/model_folder.h"

#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using nlohmann::json;

constexpr size_t kMaxConfigBytes = size_t{16} << 20;
constexpr char kKey[] = "eos_token_id";

// Nothing when there is no such file.
absl::StatusOr<std::optional<json>> ReadJson(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  std::string text(kMaxConfigBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.size() > kMaxConfigBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " is longer than ", kMaxConfigBytes, " bytes; is it the right file?"));
  }
  json document = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!document.is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is not a JSON object"));
  }
  return document;
}

absl::StatusOr<int32_t> TokenId(const json& value, const std::string& path) {
  if (value.is_number_integer()) {
    const auto id = value.get<int64_t>();
    if (id >= 0 && id <= std::numeric_limits<int32_t>::max()) return static_cast<int32_t>(id);
  }
  return absl::InvalidArgumentError(
      absl::StrCat(path, ": ", kKey, " holds ", value.dump(), "; it must be a token id"));
}

absl::StatusOr<std::vector<int32_t>> TokenIds(const json& value, const std::string& path) {
  std::vector<int32_t> ids;
  const json list = value.is_array() ? value : json::array({value});
  for (const json& element : list) {
    KVASIR_ASSIGN_OR_RETURN(ids.emplace_back(), TokenId(element, path));
  }
  return ids;
}

}  // namespace

absl::StatusOr<std::vector<int32_t>> LoadEosTokenIds(const std::string& model_folder) {
  for (const char* name : {"generation_config.json", "config.json"}) {
    const std::string path = absl::StrCat(model_folder, "/", name);
    KVASIR_ASSIGN_OR_RETURN(const std::optional<json> document, ReadJson(path));
    if (!document.has_value()) {
      if (absl::string_view(name) == "generation_config.json") continue;
      return absl::NotFoundError(
          absl::StrCat("there is no ", path, "; is --model a model folder?"));
    }
    const auto value = document->find(kKey);
    if (value != document->end() && !value->is_null()) return TokenIds(*value, path);
  }
  return std::vector<int32_t>();
}

}  // namespace kvasir::coordinator
