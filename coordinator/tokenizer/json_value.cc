#include "coordinator/tokenizer/json_value.h"

#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"

#include "coordinator/tokenizer/unicode/utf8.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using nlohmann::json;

// First pass over the text. It builds nothing, so a hostile document is refused before it takes
// memory. Refuses duplicate keys, because a document object keeps only one of them.
class LimitChecker : public nlohmann::json_sax<json> {
 public:
  explicit LimitChecker(const JsonLimits& limits) : limits_(limits) {}

  const absl::Status& status() const { return status_; }

  bool null() override { return Count(); }
  bool boolean(bool) override { return Count(); }
  bool number_integer(json::number_integer_t) override { return Count(); }
  bool number_unsigned(json::number_unsigned_t) override { return Count(); }
  bool number_float(json::number_float_t, const std::string&) override { return Count(); }
  bool string(std::string&) override { return Count(); }
  bool binary(json::binary_t&) override { return Count(); }
  bool start_object(size_t) override {
    keys_.emplace_back();
    return Open();
  }
  bool key(std::string& name) override {
    if (!keys_.back().insert(name).second) {
      return Fail(absl::StrCat("an object has the key \"", ForMessage(name), "\" twice"));
    }
    if (static_cast<int64_t>(keys_.back().size()) <= limits_.max_keys) return true;
    return Fail(absl::StrCat("an object has more than ", limits_.max_keys, " keys"));
  }
  bool end_object() override {
    keys_.pop_back();
    --depth_;
    return true;
  }
  bool start_array(size_t) override { return Open(); }
  bool end_array() override {
    --depth_;
    return true;
  }
  bool parse_error(size_t, const std::string&, const json::exception& e) override {
    return Fail(ForMessage(e.what()));
  }

 private:
  bool Count() {
    if (++values_ <= limits_.max_values) return true;
    return Fail(absl::StrCat("more than ", limits_.max_values, " values"));
  }
  bool Open() {
    if (++depth_ <= limits_.max_depth) return Count();
    return Fail(absl::StrCat("nested deeper than ", limits_.max_depth));
  }
  bool Fail(absl::string_view message) {
    status_ = absl::InvalidArgumentError(absl::StrCat("not acceptable JSON: ", message));
    return false;
  }

  JsonLimits limits_;
  int64_t values_ = 0;
  int64_t depth_ = 0;
  std::vector<absl::flat_hash_set<std::string>> keys_;  // of each open object
  absl::Status status_;
};

std::string Shown(const json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "an array";
  if (value.is_string()) {
    return absl::StrCat("\"", ForMessage(value.get_ref<const std::string&>()), "\"");
  }
  return value.dump();
}

}  // namespace

absl::StatusOr<json> ParseJson(absl::string_view text, const JsonLimits& limits) {
  // For the library a NUL byte ends the text, and it would not see the rest.
  if (const size_t nul = text.find('\0'); nul != absl::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("not acceptable JSON: NUL at byte ", nul, " of ", text.size()));
  }
  LimitChecker checker(limits);
  if (!json::sax_parse(text.begin(), text.end(), &checker)) return checker.status();
  return json::parse(text.begin(), text.end());
}

absl::Status JsonValue::Error(absl::string_view message) const {
  return absl::InvalidArgumentError(
      absl::StrCat(path_.empty() ? "the document" : path_, " is ", Shown(*value_), "; ", message));
}

absl::StatusOr<JsonValue> JsonValue::OptionalMember(absl::string_view key) const {
  static const json kNull;
  if (!value_->is_object()) return Error("expected an object");
  std::string path = absl::StrCat(path_, path_.empty() ? "" : ".", ForMessage(key));
  const auto it = value_->find(std::string(key));
  return JsonValue(it == value_->end() ? kNull : *it, std::move(path));
}

absl::StatusOr<JsonValue> JsonValue::Member(absl::string_view key) const {
  KVASIR_ASSIGN_OR_RETURN(JsonValue member, OptionalMember(key));
  if (!value_->contains(std::string(key))) {
    return absl::InvalidArgumentError(absl::StrCat(member.path(), " is missing"));
  }
  return member;
}

absl::StatusOr<std::vector<JsonValue>> JsonValue::Elements() const {
  if (!value_->is_array()) return Error("expected an array");
  std::vector<JsonValue> elements;
  for (const json& element : *value_) {
    elements.emplace_back(element, absl::StrCat(path_, "[", elements.size(), "]"));
  }
  return elements;
}

absl::StatusOr<bool> JsonValue::Bool() const {
  if (!value_->is_boolean()) return Error("expected true or false");
  return value_->get<bool>();
}

absl::StatusOr<std::string> JsonValue::String() const {
  if (!value_->is_string()) return Error("expected a string");
  return value_->get<std::string>();
}

absl::StatusOr<int32_t> JsonValue::Index(int64_t limit) const {
  // The library keeps integers unsigned if possible. A negative one converts to a huge value.
  if (!value_->is_number_integer() || value_->get<uint64_t>() >= static_cast<uint64_t>(limit)) {
    return Error(absl::StrCat("expected an integer in [0, ", limit, ")"));
  }
  return static_cast<int32_t>(value_->get<uint64_t>());
}

absl::StatusOr<bool> JsonValue::BoolMember(absl::string_view key, bool absent) const {
  KVASIR_ASSIGN_OR_RETURN(const JsonValue member, OptionalMember(key));
  if (member.IsNull()) return absent;
  return member.Bool();
}

}  // namespace kvasir::coordinator
