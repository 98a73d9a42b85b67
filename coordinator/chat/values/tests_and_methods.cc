// Arguments, tests and methods (operations.h), by name.
#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

#include "coordinator/chat/values/operations.h"
#include "coordinator/chat/values/text_operations.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

struct Call {
  absl::string_view name;
  const Value& input;
  const CallArguments& arguments;
  Budget* budget;
};

const Value& Other(const Call& call) {
  static const Value kNone;
  const Value* other = call.arguments.Find(0, "other");
  return other == nullptr ? kNone : *other;
}

absl::StatusOr<bool> IsEqual(const Call& call) {
  KVASIR_ASSIGN_OR_RETURN(const bool equal, EqualWithin(call.input, Other(call), call.budget));
  return equal == (call.name != "ne");
}

absl::StatusOr<bool> IsIn(const Call& call) {
  return Contains(Other(call), call.input, call.budget);
}

absl::StatusOr<bool> HasParity(const Call& call) {
  const std::optional<int64_t> value = call.input.AsInteger();
  if (!value.has_value()) return absl::InvalidArgumentError("odd and even need an int");
  return (*value % 2 == 0) == (call.name == "even");
}

bool IsSequence(const Value& value) {
  return (value.list() != nullptr && value.list()->kind != List::Kind::kGenerator) ||
         value.dict() != nullptr || value.text() != nullptr || value.IsUndefined();
}

template <bool (*test)(const Value&)>
absl::StatusOr<bool> Is(const Call& call) {
  return test(call.input);
}

constexpr std::pair<absl::string_view, absl::StatusOr<bool> (*)(const Call&)> kTests[] = {
    {"defined", Is<[](const Value& v) { return !v.IsUndefined(); }>},
    {"undefined", Is<[](const Value& v) { return v.IsUndefined(); }>},
    {"none", Is<[](const Value& v) { return v.IsNone(); }>},
    {"string", Is<[](const Value& v) { return v.text() != nullptr; }>},
    {"mapping", Is<[](const Value& v) { return v.dict() != nullptr; }>},
    {"iterable", Is<[](const Value& v) { return IsSequence(v) || v.list() != nullptr; }>},
    {"sequence", Is<[](const Value& v) { return IsSequence(v); }>},
    {"true", Is<[](const Value& v) { return v.boolean() != nullptr && *v.boolean(); }>},
    {"false", Is<[](const Value& v) { return v.boolean() != nullptr && !*v.boolean(); }>},
    {"boolean", Is<[](const Value& v) { return v.boolean() != nullptr; }>},
    {"number", Is<[](const Value& v) { return v.AsNumber().has_value(); }>},
    {"integer", Is<[](const Value& v) { return v.integer() != nullptr; }>},
    {"float", Is<[](const Value& v) { return v.real() != nullptr; }>},
    {"callable", Is<[](const Value& v) { return v.function() != nullptr; }>},
    {"equalto", IsEqual},
    {"eq", IsEqual},
    {"ne", IsEqual},
    {"in", IsIn},
    {"odd", HasParity},
    {"even", HasParity},
};

const auto* FindTest(absl::string_view name) {
  return std::find_if(std::begin(kTests), std::end(kTests),
                      [&](const auto& row) { return row.first == name; });
}

absl::StatusOr<Value> StripMethod(const Call& call) {
  const Side side = call.name == "lstrip"   ? Side::kLeft
                    : call.name == "rstrip" ? Side::kRight
                                            : Side::kBoth;
  const MarkedText& text = *call.input.text();
  KVASIR_RETURN_IF_ERROR(call.budget->SpendBytes(text.size()));
  const Value* set = call.arguments.Find(0, "chars");
  if (set == nullptr || set->IsNone()) return Value(Strip(text, std::nullopt, side));
  KVASIR_ASSIGN_OR_RETURN(const MarkedText* characters, call.arguments.Text(0, "chars"));
  KVASIR_RETURN_IF_ERROR(
      call.budget->Spend(static_cast<int64_t>(characters->size() * text.size() / 16)));
  return Value(Strip(text, characters->bytes(), side));
}

absl::StatusOr<Value> SplitMethod(const Call& call) {
  std::optional<absl::string_view> separator;
  const Value* argument = call.arguments.Find(0, "sep");
  if (argument != nullptr && !argument->IsNone()) {
    KVASIR_ASSIGN_OR_RETURN(const MarkedText* text, call.arguments.Text(0, "sep"));
    separator = text->bytes();
    if (separator->empty()) return absl::InvalidArgumentError("split: the separator is empty");
  }
  KVASIR_ASSIGN_OR_RETURN(const int64_t most, call.arguments.Integer(1, "maxsplit", -1));
  const Side from = call.name == "rsplit" ? Side::kRight : Side::kLeft;
  KVASIR_ASSIGN_OR_RETURN(std::vector<MarkedText> parts,
                          SplitText(*call.input.text(), separator, most, from, call.budget));
  std::vector<Value> elements;
  for (MarkedText& part : parts) elements.emplace_back(std::move(part));
  return MakeList(std::move(elements), List::Kind::kList, call.budget);
}

absl::StatusOr<Value> BeginsOrEnds(const Call& call) {
  std::vector<Value> candidates;
  const Value* argument = call.arguments.Find(0, "prefix");
  if (argument != nullptr && argument->list() != nullptr) {
    KVASIR_ASSIGN_OR_RETURN(candidates, Elements(*argument, call.budget));
  } else if (argument != nullptr) {
    candidates.push_back(*argument);
  }
  for (const Value& candidate : candidates) {
    if (candidate.text() == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat(call.name, ": the argument is no text"));
    }
    const absl::string_view text = call.input.text()->bytes();
    const absl::string_view part = candidate.text()->bytes();
    if (call.name == "startswith" ? absl::StartsWith(text, part) : absl::EndsWith(text, part)) {
      return Value(true);
    }
  }
  return Value(false);
}

absl::StatusOr<Value> ReplaceMethod(const Call& call) {
  return ApplyFilter("replace", call.input, call.arguments, call.budget);
}

absl::StatusOr<Value> CaseMethod(const Call& call) {
  return ApplyFilter(call.name, call.input, call.arguments, call.budget);
}

absl::StatusOr<Value> DictMethod(const Call& call) {
  const Dict& dict = *call.input.dict();
  if (call.name == "items") return DictItems(dict, call.budget);
  if (call.name == "get") {
    const Value* key = call.arguments.Find(0, "key");
    if (key == nullptr) return absl::InvalidArgumentError("get: it needs a key");
    KVASIR_RETURN_IF_ERROR(call.budget->Spend(static_cast<int64_t>(dict.entries.size() / 16)));
    const Value* found = key->text() == nullptr ? nullptr : dict.Find(key->text()->bytes());
    if (found == nullptr) found = call.arguments.Find(1, "default");
    return found == nullptr ? Value() : *found;
  }
  std::vector<Value> parts;
  for (const auto& [key, value] : dict.entries) parts.push_back(call.name == "keys" ? key : value);
  return MakeList(std::move(parts), List::Kind::kList, call.budget);
}

struct Method {
  absl::string_view name;
  bool of_text;  // or of a dictionary
  absl::StatusOr<Value> (*run)(const Call&);
};

constexpr Method kMethods[] = {
    {"strip", true, StripMethod},     {"lstrip", true, StripMethod},
    {"rstrip", true, StripMethod},    {"split", true, SplitMethod},
    {"rsplit", true, SplitMethod},    {"startswith", true, BeginsOrEnds},
    {"endswith", true, BeginsOrEnds}, {"replace", true, ReplaceMethod},
    {"upper", true, CaseMethod},      {"lower", true, CaseMethod},
    {"title", true, CaseMethod},      {"capitalize", true, CaseMethod},
    {"items", false, DictMethod},     {"keys", false, DictMethod},
    {"values", false, DictMethod},    {"get", false, DictMethod},
};

}  // namespace

const Value* CallArguments::Find(size_t position, absl::string_view name) const {
  for (const auto& [candidate, value] : named) {
    if (candidate == name) return &value;
  }
  return position < positional.size() ? &positional[position] : nullptr;
}

absl::StatusOr<int64_t> CallArguments::Integer(size_t position, absl::string_view name,
                                               int64_t absent) const {
  const Value* value = Find(position, name);
  if (value == nullptr) return absent;
  if (const std::optional<int64_t> integer = value->AsInteger()) return *integer;
  return absl::InvalidArgumentError(
      absl::StrCat("the argument ", name, " is a ", value->TypeName(), ", not an int"));
}

bool CallArguments::IsTrue(size_t position, absl::string_view name, bool absent) const {
  const Value* value = Find(position, name);
  return value == nullptr ? absent : value->IsTrue();
}

absl::StatusOr<const MarkedText*> CallArguments::Text(size_t position,
                                                      absl::string_view name) const {
  const Value* value = Find(position, name);
  if (value != nullptr && value->text() != nullptr) return value->text();
  return absl::InvalidArgumentError(absl::StrCat(
      "the argument ", name, " is ",
      value == nullptr ? "missing" : absl::StrCat("a ", value->TypeName()), "; it must be a text"));
}

bool IsTest(absl::string_view name) { return FindTest(name) != std::end(kTests); }

absl::StatusOr<bool> ApplyTest(absl::string_view name, const Value& input,
                               const CallArguments& arguments, Budget* budget) {
  const auto* row = FindTest(name);
  if (row == std::end(kTests)) {
    return absl::InvalidArgumentError(absl::StrCat("there is no test '", name, "'"));
  }
  return row->second({.name = name, .input = input, .arguments = arguments, .budget = budget});
}

absl::StatusOr<Value> CallMethod(const Value& self, absl::string_view name,
                                 const CallArguments& arguments, Budget* budget) {
  for (const Method& method : kMethods) {
    if (method.name != name || (method.of_text ? self.text() == nullptr : self.dict() == nullptr)) {
      continue;
    }
    return method.run({.name = name, .input = self, .arguments = arguments, .budget = budget});
  }
  return absl::InvalidArgumentError(
      absl::StrCat("a ", self.TypeName(), " has no method '", name, "' that templates may call"));
}

}  // namespace kvasir::coordinator
