// Reads typed fields of a JSON object with their ranges. The first problem is kept, and reads after
// it yield defaults, so that a reader of a schema is a plain list of fields. Null counts as absent.
// Called by model_config.cc. Thread-compatible.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include <nlohmann/json.hpp>

namespace kvasir::worker {

class JsonFields {
 public:
  struct IntRange {
    int64_t min, max;  // both included
  };
  struct NumberRange {
    double min, max;  // both included
  };

  // `what` names the object in messages: "config.json". Both must outlive this.
  JsonFields(const nlohmann::json& object, absl::string_view what);

  // An absent field without a default is an error. Values must be whole numbers: 4096.0 and true
  // are not.
  int64_t Int(const char* key, IntRange range, std::optional<int64_t> default_value = {});
  double Number(const char* key, NumberRange range, std::optional<double> default_value = {});
  std::optional<int64_t> OptionalInt(const char* key, IntRange range);
  std::optional<double> OptionalNumber(const char* key, NumberRange range);
  std::optional<std::string> OptionalString(const char* key);
  bool Bool(const char* key, bool default_value);

  // Returns `value` if it is a whole number within the range.
  static std::optional<int64_t> WholeNumber(const nlohmann::json& value, IntRange range);

  // nullptr when absent.
  const nlohmann::json* Get(const char* key) const;
  // Whether the value is null, for the few fields where null and absence differ.
  bool IsNull(const char* key) const;

  // Records "<what>: <key> is <value>, expected <expected>" unless there is a problem already.
  void Expect(const char* key, absl::string_view expected,
              absl::StatusCode code = absl::StatusCode::kInvalidArgument);
  // Records "<what>: <message>".
  void Fail(absl::StatusCode code, absl::string_view message);

  // Takes over the problem of a nested object, unless there is one already.
  void Adopt(const absl::Status& status) { status_.Update(status); }

  const absl::Status& status() const { return status_; }

 private:
  const nlohmann::json& object_;
  const std::string what_;
  absl::Status status_;
};

}  // namespace kvasir::worker
