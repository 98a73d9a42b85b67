#include "worker/checkpoint/json_fields.h"

#include <limits>

#include "absl/strings/str_cat.h"

#include "worker/checkpoint/strict_json.h"

namespace kvasir::worker {

using nlohmann::json;

JsonFields::JsonFields(const json& object, absl::string_view what)
    : object_(object), what_(std::string(what)) {
  if (!object.is_object()) {
    Fail(absl::StatusCode::kInvalidArgument,
         absl::StrCat("is ", ValueForMessage(object), ", expected an object"));
  }
}

const json* JsonFields::Get(const char* key) const {
  if (!object_.is_object()) return nullptr;
  const auto it = object_.find(key);
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

bool JsonFields::IsNull(const char* key) const {
  if (!object_.is_object()) return false;
  const auto it = object_.find(key);
  return it != object_.end() && it->is_null();
}

std::optional<int64_t> JsonFields::WholeNumber(const json& value, IntRange range) {
  if (!value.is_number_integer()) return std::nullopt;
  // A number above 2^63 - 1 is kept as unsigned and would turn negative.
  constexpr uint64_t kMax = std::numeric_limits<int64_t>::max();
  if (value.is_number_unsigned() && value.get<uint64_t>() > kMax) return std::nullopt;
  const int64_t number = value.get<int64_t>();
  if (number < range.min || number > range.max) return std::nullopt;
  return number;
}

std::optional<int64_t> JsonFields::OptionalInt(const char* key, IntRange range) {
  const json* value = Get(key);
  if (value == nullptr) return std::nullopt;
  const std::optional<int64_t> number = WholeNumber(*value, range);
  if (!number.has_value()) {
    Expect(key, absl::StrCat("a whole number from ", range.min, " to ", range.max));
  }
  return number;
}

std::optional<double> JsonFields::OptionalNumber(const char* key, NumberRange range) {
  const json* value = Get(key);
  if (value == nullptr) return std::nullopt;
  if (value->is_number()) {
    const double number = value->get<double>();
    if (number >= range.min && number <= range.max) return number;
  }
  Expect(key, absl::StrCat("a number from ", range.min, " to ", range.max));
  return std::nullopt;
}

int64_t JsonFields::Int(const char* key, IntRange range, std::optional<int64_t> default_value) {
  if (Get(key) == nullptr && !default_value.has_value()) {
    Expect(key, absl::StrCat("a whole number from ", range.min, " to ", range.max));
  }
  return OptionalInt(key, range).value_or(default_value.value_or(range.min));
}

double JsonFields::Number(const char* key, NumberRange range, std::optional<double> default_value) {
  if (Get(key) == nullptr && !default_value.has_value()) {
    Expect(key, absl::StrCat("a number from ", range.min, " to ", range.max));
  }
  return OptionalNumber(key, range).value_or(default_value.value_or(range.min));
}

std::optional<std::string> JsonFields::OptionalString(const char* key) {
  const json* value = Get(key);
  if (value == nullptr) return std::nullopt;
  if (value->is_string()) return value->get<std::string>();
  Expect(key, "a text");
  return std::nullopt;
}

bool JsonFields::Bool(const char* key, bool default_value) {
  const json* value = Get(key);
  if (value == nullptr) return default_value;
  if (value->is_boolean()) return value->get<bool>();
  Expect(key, "true or false");
  return default_value;
}

void JsonFields::Expect(const char* key, absl::string_view expected, absl::StatusCode code) {
  const json* value = Get(key);
  Fail(code, absl::StrCat(key, " is ", value == nullptr ? "missing" : ValueForMessage(*value),
                          ", expected ", expected));
}

void JsonFields::Fail(absl::StatusCode code, absl::string_view message) {
  if (status_.ok()) status_ = absl::Status(code, absl::StrCat(what_, ": ", message));
}

}  // namespace kvasir::worker
