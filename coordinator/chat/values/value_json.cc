#include "coordinator/chat/values/value_json.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

#include "coordinator/tokenizer/unicode/utf8.h"

namespace kvasir::coordinator {
namespace {

// Gets nlohmann-json's events. Keeps the order of keys, which the library's own values lose or keep
// in quadratic time.
class ValueBuilder : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool null() override { return Add(Value()); }
  bool boolean(bool value) override { return Add(Value(value)); }
  bool number_integer(int64_t value) override { return Add(Value(value)); }
  bool number_unsigned(uint64_t value) override {
    if (value > uint64_t{std::numeric_limits<int64_t>::max()}) {
      return Fail("a number is larger than 64 bits hold");
    }
    return Add(Value(static_cast<int64_t>(value)));
  }
  bool number_float(double value, const std::string& text) override {
    if (text.find_first_of(".eE") == std::string::npos) {
      return Fail("a number is larger than 64 bits hold");
    }
    return Add(Value(value));
  }
  bool string(std::string& value) override { return Add(ClientText(std::move(value))); }
  bool binary(nlohmann::json::binary_t&) override { return Fail("it has binary values"); }
  bool start_object(size_t) override { return Open(true); }
  bool start_array(size_t) override { return Open(false); }
  bool key(std::string& value) override {
    if (open_.back().entries.size() == kMaxJsonKeys) {
      return Fail(absl::StrCat("an object has more than ", kMaxJsonKeys, " keys"));
    }
    open_.back().entries.emplace_back(ClientText(std::move(value)), Value());
    return true;
  }
  bool end_array() override {
    Value list(List{.elements = std::move(open_.back().elements)});
    open_.pop_back();
    return Add(std::move(list));
  }
  bool end_object() override {
    std::vector<absl::string_view> keys;
    for (const auto& [name, value] : open_.back().entries) keys.push_back(name.text()->bytes());
    std::sort(keys.begin(), keys.end());
    const auto twice = std::adjacent_find(keys.begin(), keys.end());
    if (twice != keys.end()) {
      return Fail(absl::StrCat("the key \"", ForMessage(*twice), "\" is there twice"));
    }
    Value dict(Dict{.entries = std::move(open_.back().entries)});
    open_.pop_back();
    return Add(std::move(dict));
  }
  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    return Fail(absl::StrCat("it is not JSON, at byte ", position));
  }

  const std::string& error() const { return error_; }
  Value Take() { return std::move(root_); }

 private:
  struct Container {
    bool object;
    std::vector<Value> elements = {};
    std::vector<std::pair<Value, Value>> entries = {};
  };

  static Value ClientText(std::string text) {
    return Value(MarkedText(std::move(text), MarkedText::Source::kClient));
  }
  bool Fail(std::string error) {
    error_ = std::move(error);
    return false;
  }
  bool Open(bool object) {
    if (open_.size() == kMaxJsonDepth) {
      return Fail(absl::StrCat("it is nested more than ", kMaxJsonDepth, " deep"));
    }
    open_.push_back({.object = object});
    return true;
  }
  bool Add(Value value) {
    if (++num_values_ > kMaxJsonValues) {
      return Fail(absl::StrCat("it has more than ", kMaxJsonValues, " values"));
    }
    if (open_.empty()) {
      root_ = std::move(value);
    } else if (open_.back().object) {
      open_.back().entries.back().second = std::move(value);
    } else {
      open_.back().elements.push_back(std::move(value));
    }
    return true;
  }

  std::vector<Container> open_;
  size_t num_values_ = 0;
  Value root_;
  std::string error_;
};

}  // namespace

absl::StatusOr<Value> ReadJsonValue(absl::string_view json) {
  ValueBuilder builder;
  if (!nlohmann::json::sax_parse(json.begin(), json.end(), &builder)) {
    return absl::InvalidArgumentError(builder.error());
  }
  return builder.Take();
}

}  // namespace kvasir::coordinator
