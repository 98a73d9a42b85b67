// Reads the fields of a request's JSON object by name and type. A field that is absent or null is
// not set; unknown fields are never asked for, and so ignored. The first wrong type is kept as an
// error that names the field, and later reads go on. Belongs to one thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace kvasir::coordinator {

class JsonFields {
 public:
  // `object` outlives the reader. `path` is the object's name in errors; empty for the body.
  explicit JsonFields(const nlohmann::json& object, std::string path = "");

  // Returns the field; null when it is absent or null.
  const nlohmann::json* Find(absl::string_view name) const;
  bool Has(absl::string_view name) const { return Find(name) != nullptr; }

  std::optional<bool> Bool(absl::string_view name);
  std::optional<double> Number(absl::string_view name);
  // An integer in [min, max]; 2.0 is one.
  std::optional<int64_t> Integer(absl::string_view name, int64_t min, int64_t max);
  std::optional<uint32_t> Count(absl::string_view name);
  std::optional<std::string> String(absl::string_view name);
  // A list of at most `most` ids; empty when absent.
  std::vector<uint32_t> Ids(absl::string_view name, size_t most);

  // Keeps an error about a field: "<name> is <value>; <expected>".
  void Refuse(absl::string_view name, absl::string_view expected);
  // Keeps the error of a part.
  void Keep(const absl::Status& status) { status_.Update(status); }

  // Returns the first error.
  const absl::Status& status() const { return status_; }

 private:
  const nlohmann::json& object_;
  const std::string path_;
  absl::Status status_;
};

// Returns the integer in [min, max] that the value is, 2.0 being one.
std::optional<int64_t> AsInteger(const nlohmann::json& value, int64_t min, int64_t max);
// Returns the token ids of a list; none when the value is another type or an element is no id.
std::optional<std::vector<uint32_t>> AsIds(const nlohmann::json& value);

}  // namespace kvasir::coordinator
