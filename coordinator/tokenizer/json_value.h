// Reads untrusted JSON strictly: a parser that limits depth and number of values and refuses
// duplicate keys, and a view of a value that knows its path, for messages such as
// "model.byte_fallback is true". Hides nlohmann-json's exceptions. Called by the tokenizer's
// loader.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace kvasir::coordinator {

struct JsonLimits {
  int64_t max_values;  // scalars, arrays and objects
  int64_t max_keys;    // in one object
  int64_t max_depth;
};

// Errors: INVALID_ARGUMENT for text that is not JSON or exceeds a limit. Depth takes no stack.
absl::StatusOr<nlohmann::json> ParseJson(absl::string_view text, const JsonLimits& limits);

// View of a value. Borrows the document. All errors are INVALID_ARGUMENT and name the path.
class JsonValue {
 public:
  JsonValue(const nlohmann::json& value, std::string path)
      : value_(&value), path_(std::move(path)) {}

  const nlohmann::json& value() const { return *value_; }
  const std::string& path() const { return path_; }
  bool IsNull() const { return value_->is_null(); }

  // Returns the member `key` of an object. An absent one is an error; OptionalMember returns null.
  absl::StatusOr<JsonValue> Member(absl::string_view key) const;
  absl::StatusOr<JsonValue> OptionalMember(absl::string_view key) const;
  absl::StatusOr<std::vector<JsonValue>> Elements() const;  // of an array
  absl::StatusOr<bool> Bool() const;
  absl::StatusOr<std::string> String() const;
  // Returns an integer in [0, limit).
  absl::StatusOr<int32_t> Index(int64_t limit) const;
  // Returns the member `key`; `absent` when there is none or it is null.
  absl::StatusOr<bool> BoolMember(absl::string_view key, bool absent) const;

  // Returns the error "<path> <message>" with a short form of the value found.
  absl::Status Error(absl::string_view message) const;

 private:
  const nlohmann::json* value_;
  std::string path_;
};

}  // namespace kvasir::coordinator
