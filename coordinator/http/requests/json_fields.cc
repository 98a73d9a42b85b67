#include "coordinator/http/requests/json_fields.h"

#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"

#include "coordinator/http/transport/error_reply.h"
#include "coordinator/tokenizer/json_value.h"

namespace kvasir::coordinator {

using nlohmann::json;

std::optional<int64_t> AsInteger(const json& value, int64_t min, int64_t max) {
  int64_t integer = 0;
  if (value.is_number_unsigned()) {
    const auto number = value.get<uint64_t>();
    if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
    integer = static_cast<int64_t>(number);
  } else if (value.is_number_integer()) {
    integer = value.get<int64_t>();
  } else if (value.is_number_float()) {
    const auto number = value.get<double>();
    if (std::abs(number) > 1e15 || number != std::floor(number)) return std::nullopt;
    integer = static_cast<int64_t>(number);
  } else {
    return std::nullopt;
  }
  if (integer < min || integer > max) return std::nullopt;
  return integer;
}

std::optional<std::vector<uint32_t>> AsIds(const json& value) {
  if (!value.is_array()) return std::nullopt;
  std::vector<uint32_t> ids;
  ids.reserve(value.size());
  for (const json& element : value) {
    const std::optional<int64_t> id = AsInteger(element, 0, std::numeric_limits<int32_t>::max());
    if (!id.has_value()) return std::nullopt;
    ids.push_back(static_cast<uint32_t>(*id));
  }
  return ids;
}

JsonFields::JsonFields(const json& object, std::string path)
    : object_(object), path_(std::move(path)) {}

const json* JsonFields::Find(absl::string_view name) const {
  const auto found = object_.find(std::string(name));
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

void JsonFields::Refuse(absl::string_view name, absl::string_view expected) {
  if (!status_.ok()) return;
  const std::string path = absl::StrCat(path_, path_.empty() ? "" : ".", name);
  const json* value = Find(name);
  status_ = AboutField(
      value == nullptr ? absl::InvalidArgumentError(absl::StrCat(path, " is missing; ", expected))
                       : JsonValue(*value, path).Error(expected),
      path);
}

std::optional<bool> JsonFields::Bool(absl::string_view name) {
  const json* value = Find(name);
  if (value == nullptr) return std::nullopt;
  if (value->is_boolean()) return value->get<bool>();
  Refuse(name, "expected true or false");
  return std::nullopt;
}

std::optional<double> JsonFields::Number(absl::string_view name) {
  const json* value = Find(name);
  if (value == nullptr) return std::nullopt;
  if (value->is_number()) return value->get<double>();
  Refuse(name, "expected a number");
  return std::nullopt;
}

std::optional<int64_t> JsonFields::Integer(absl::string_view name, int64_t min, int64_t max) {
  const json* value = Find(name);
  if (value == nullptr) return std::nullopt;
  const std::optional<int64_t> integer = AsInteger(*value, min, max);
  if (!integer.has_value()) {
    Refuse(name, absl::StrCat("expected an integer in [", min, ", ", max, "]"));
  }
  return integer;
}

std::optional<uint32_t> JsonFields::Count(absl::string_view name) {
  const std::optional<int64_t> count = Integer(name, 0, std::numeric_limits<uint32_t>::max());
  if (!count.has_value()) return std::nullopt;
  return static_cast<uint32_t>(*count);
}

std::optional<std::string> JsonFields::String(absl::string_view name) {
  const json* value = Find(name);
  if (value == nullptr) return std::nullopt;
  if (value->is_string()) return value->get<std::string>();
  Refuse(name, "expected a string");
  return std::nullopt;
}

std::vector<uint32_t> JsonFields::Ids(absl::string_view name, size_t most) {
  const json* value = Find(name);
  if (value == nullptr) return {};
  constexpr char kExpected[] = "expected a list of token ids";
  if (!value->is_array() || value->size() > most) {
    Refuse(name, absl::StrCat(kExpected, ", at most ", most));
    return {};
  }
  std::optional<std::vector<uint32_t>> ids = AsIds(*value);
  if (!ids.has_value()) Refuse(name, kExpected);
  return std::move(ids).value_or(std::vector<uint32_t>());
}

}  // namespace kvasir::coordinator
