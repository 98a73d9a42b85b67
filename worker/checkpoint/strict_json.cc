#include "worker/checkpoint/strict_json.h"

#include <set>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace kvasir::worker {
namespace {

using nlohmann::json;

constexpr size_t kMaxDepth = 16;
constexpr size_t kMaxMessageChars = 100;

absl::string_view View(const std::string& text) { return {text.data(), text.size()}; }

std::string Cut(std::string text) {
  if (text.size() > kMaxMessageChars) {
    text.resize(kMaxMessageChars);
    text += "...";
  }
  return text;
}

// The library says "[id] parse error at line 1, column 2: reason; last read: 'text'", where the
// text may be long.
std::string Reason(absl::string_view message) {
  for (const absl::string_view prefix_end : {"] ", "column "}) {
    const size_t at = message.find(prefix_end);
    if (at != absl::string_view::npos) message.remove_prefix(at + prefix_end.size());
  }
  const size_t colon = message.find(": ");
  if (colon < 8) message.remove_prefix(colon + 2);  // after the number of the column
  return Cut(std::string(message.substr(0, message.find("; last read"))));
}

// Finds the first duplicate key or too deep nesting. Accepts everything else.
class StrictnessChecker : public nlohmann::json_sax<json> {
 public:
  const std::string& problem() const { return problem_; }

  bool start_object(size_t) override { return Enter(); }
  bool start_array(size_t) override { return Enter(); }
  bool end_object() override { return Leave(); }
  bool end_array() override { return Leave(); }
  bool key(string_t& key) override {
    if (keys_.back().insert(key).second) return true;
    problem_ = absl::StrCat("the key ", QuoteForMessage(View(key)), " appears twice in one object");
    return false;
  }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool parse_error(size_t, const std::string&, const json::exception&) override { return false; }

 private:
  bool Enter() {
    if (keys_.size() == kMaxDepth) {
      problem_ = absl::StrCat("arrays and objects nest deeper than ", kMaxDepth);
      return false;
    }
    keys_.emplace_back();
    return true;
  }
  bool Leave() {
    keys_.pop_back();
    return true;
  }

  std::vector<std::set<std::string>> keys_;  // of the open objects and (empty) arrays
  std::string problem_;
};

// Passes events on and keeps the library's description of a syntax error.
class ErrorRecorder : public nlohmann::json_sax<json> {
 public:
  explicit ErrorRecorder(nlohmann::json_sax<json>& next) : next_(next) {}
  const std::string& error() const { return error_; }

  bool null() override { return next_.null(); }
  bool boolean(bool v) override { return next_.boolean(v); }
  bool number_integer(number_integer_t v) override { return next_.number_integer(v); }
  bool number_unsigned(number_unsigned_t v) override { return next_.number_unsigned(v); }
  bool number_float(number_float_t v, const string_t& s) override {
    return next_.number_float(v, s);
  }
  bool string(string_t& v) override { return next_.string(v); }
  bool binary(binary_t& v) override { return next_.binary(v); }
  bool start_object(size_t n) override { return next_.start_object(n); }
  bool key(string_t& v) override { return next_.key(v); }
  bool end_object() override { return next_.end_object(); }
  bool start_array(size_t n) override { return next_.start_array(n); }
  bool end_array() override { return next_.end_array(); }
  bool parse_error(size_t position, const std::string&, const json::exception& error) override {
    error_ = absl::StrCat("not valid JSON at byte ", position, ": ", Reason(error.what()));
    return false;
  }

 private:
  nlohmann::json_sax<json>& next_;
  std::string error_;
};

}  // namespace

absl::Status ParseJsonEvents(absl::string_view text, absl::string_view what,
                             nlohmann::json_sax<json>& handler) {
  // The library takes a NUL byte for the end of its input and would ignore the rest.
  if (const size_t nul = text.find('\0'); nul != absl::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": not valid JSON at byte ", nul, ": a NUL byte"));
  }
  ErrorRecorder recorder(handler);
  json::sax_parse(text.begin(), text.end(), &recorder);
  if (recorder.error().empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(what, ": ", recorder.error()));
}

absl::StatusOr<json> ParseStrictJson(absl::string_view text, absl::string_view what) {
  StrictnessChecker checker;
  KVASIR_RETURN_IF_ERROR(ParseJsonEvents(text, what, checker));
  if (!checker.problem().empty()) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": ", checker.problem()));
  }
  return json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
}

std::string QuoteForMessage(absl::string_view text) {
  const bool is_cut = text.size() > kMaxMessageChars;
  return absl::StrCat("\"", absl::CHexEscape(text.substr(0, kMaxMessageChars)),
                      is_cut ? "...\"" : "\"");
}

std::string ValueForMessage(const json& value) {
  return Cut(value.dump(-1, ' ', /*ensure_ascii=*/true));
}

}  // namespace kvasir::worker
