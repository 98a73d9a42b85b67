// Filters (operations.h), by name.
#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "coordinator/chat/values/operations.h"
#include "coordinator/chat/values/python_text.h"
#include "coordinator/chat/values/text_operations.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using Result = absl::StatusOr<Value>;

struct Call {
  absl::string_view name;
  const Value& input;
  const CallArguments& arguments;
  Budget* budget;
};

Result TextOf(const Call& call) {
  KVASIR_ASSIGN_OR_RETURN(MarkedText text, PythonText(call.input, call.budget));
  return Value(std::move(text));
}

Result Trim(const Call& call) {
  KVASIR_ASSIGN_OR_RETURN(const MarkedText text, PythonText(call.input, call.budget));
  if (call.arguments.Find(0, "chars") == nullptr) {
    return Value(Strip(text, std::nullopt, Side::kBoth));
  }
  KVASIR_ASSIGN_OR_RETURN(const MarkedText* set, call.arguments.Text(0, "chars"));
  KVASIR_RETURN_IF_ERROR(call.budget->Spend(static_cast<int64_t>(set->size() * text.size() / 16)));
  return Value(Strip(text, set->bytes(), Side::kBoth));
}

template <Case to>
Result InCase(const Call& call) {
  KVASIR_ASSIGN_OR_RETURN(const MarkedText text, PythonText(call.input, call.budget));
  KVASIR_RETURN_IF_ERROR(call.budget->SpendBytes(3 * text.size()));
  return Value(ChangeCase(text, to));
}

Result Replace(const Call& call) {
  KVASIR_ASSIGN_OR_RETURN(const MarkedText text, PythonText(call.input, call.budget));
  KVASIR_ASSIGN_OR_RETURN(const MarkedText* from, call.arguments.Text(0, "old"));
  KVASIR_ASSIGN_OR_RETURN(const MarkedText* to, call.arguments.Text(1, "new"));
  KVASIR_ASSIGN_OR_RETURN(const int64_t most, call.arguments.Integer(2, "count", -1));
  KVASIR_ASSIGN_OR_RETURN(MarkedText out, ReplaceText(text, from->bytes(), *to, most, call.budget));
  return Value(std::move(out));
}

Result ToJson(const Call& call) {
  JsonFormat format;
  const CallArguments& arguments = call.arguments;
  format.ensures_ascii = arguments.IsTrue(0, "ensure_ascii", false);
  format.sorts_keys = arguments.IsTrue(3, "sort_keys", false);
  if (const Value* indent = arguments.Find(1, "indent"); indent != nullptr && !indent->IsNone()) {
    KVASIR_ASSIGN_OR_RETURN(format.indent, arguments.Integer(1, "indent", 0));
    if (*format.indent < 0 || *format.indent > 64) {
      return absl::InvalidArgumentError("tojson: indent is not in [0, 64]");
    }
  }
  const Value* separators = arguments.Find(2, "separators");
  if (separators != nullptr && !separators->IsNone()) {
    const List* list = separators->list();
    if (list == nullptr || list->elements.size() != 2 || list->elements[0].text() == nullptr ||
        list->elements[1].text() == nullptr) {
      return absl::InvalidArgumentError("tojson: separators are not two texts");
    }
    format.item_separator = std::string(list->elements[0].text()->bytes());
    format.key_separator = std::string(list->elements[1].text()->bytes());
  }
  KVASIR_ASSIGN_OR_RETURN(MarkedText text, JsonText(call.input, format, call.budget));
  return Value(std::move(text));
}

Result LengthOf(const Call& call) {
  KVASIR_ASSIGN_OR_RETURN(const int64_t length, Length(call.input));
  return Value(length);
}

Result Default(const Call& call) {
  const bool missing = call.input.IsUndefined() ||
                       (call.arguments.IsTrue(1, "boolean", false) && !call.input.IsTrue());
  if (!missing) return call.input;
  const Value* value = call.arguments.Find(0, "default_value");
  return value == nullptr ? Value(MarkedText()) : *value;
}

Result Items(const Call& call) {
  if (call.input.IsUndefined()) return MakeList({}, List::Kind::kGenerator, call.budget);
  if (call.input.dict() == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("items: a ", call.input.TypeName(), " has none"));
  }
  return DictItems(*call.input.dict(), call.budget);
}

Result ToInteger(const Call& call) {
  KVASIR_ASSIGN_OR_RETURN(const int64_t absent, call.arguments.Integer(0, "default", 0));
  if (const std::optional<int64_t> value = call.input.AsInteger()) return Value(*value);
  double real = std::numeric_limits<double>::quiet_NaN();
  if (call.input.real() != nullptr) real = *call.input.real();
  if (const MarkedText* text = call.input.text()) {
    int64_t value = 0;
    if (absl::SimpleAtoi(text->bytes(), &value)) return Value(value);
    real = ParseReal(text->bytes()).value_or(real);
  }
  if (!(std::abs(real) < 9e18)) return Value(absent);
  return Value(static_cast<int64_t>(real));
}

Result ToReal(const Call& call) {
  if (const std::optional<double> value = call.input.AsNumber()) return Value(*value);
  if (const MarkedText* text = call.input.text()) {
    if (const std::optional<double> value = ParseReal(text->bytes())) return Value(*value);
  }
  const Value* absent = call.arguments.Find(0, "default");
  return absent == nullptr ? Value(0.0) : *absent;
}

Result Absolute(const Call& call) {
  if (const std::optional<int64_t> value = call.input.AsInteger()) {
    return Value(*value == std::numeric_limits<int64_t>::min() ? *value : std::abs(*value));
  }
  if (const double* value = call.input.real()) return Value(std::abs(*value));
  return absl::InvalidArgumentError("abs: this is no number");
}

Result Round(const Call& call) {
  const std::optional<double> value = call.input.AsNumber();
  if (!value.has_value()) return absl::InvalidArgumentError("round: this is no number");
  KVASIR_ASSIGN_OR_RETURN(const int64_t digits, call.arguments.Integer(0, "precision", 0));
  const double scale = std::pow(10.0, static_cast<double>(std::clamp<int64_t>(digits, 0, 15)));
  const Value* method = call.arguments.Find(1, "method");
  const absl::string_view how =
      method != nullptr && method->text() != nullptr ? method->text()->bytes() : "common";
  // Python rounds an int to an int.
  if (how == "common" && call.input.AsInteger().has_value()) return Value(*call.input.AsInteger());
  const double scaled = *value * scale;
  if (how == "ceil") return Value(std::ceil(scaled) / scale);
  if (how == "floor") return Value(std::floor(scaled) / scale);
  return Value(std::nearbyint(scaled) / scale);
}

// Returns the attribute that a filter names: "a.b" is b of a, a number is an index.
Result Path(const Value& value, const Value& path, Budget* budget) {
  if (path.text() == nullptr) return Item(value, path, budget);
  Value current = value;
  for (const absl::string_view part : absl::StrSplit(path.text()->bytes(), '.')) {
    KVASIR_RETURN_IF_ERROR(budget->Spend(1));
    int64_t index = 0;
    const Value key =
        absl::SimpleAtoi(part, &index) ? Value(index) : Value::Text(std::string(part));
    KVASIR_ASSIGN_OR_RETURN(current, Item(current, key, budget));
  }
  return current;
}

Result Join(const Call& call) {
  KVASIR_ASSIGN_OR_RETURN(const std::vector<Value> elements, Elements(call.input, call.budget));
  MarkedText separator;
  if (const Value* argument = call.arguments.Find(0, "d")) {
    KVASIR_ASSIGN_OR_RETURN(separator, PythonText(*argument, call.budget));
  }
  const Value* attribute = call.arguments.Find(1, "attribute");
  MarkedText out;
  for (size_t i = 0; i < elements.size(); ++i) {
    Value element = elements[i];
    if (attribute != nullptr) {
      KVASIR_ASSIGN_OR_RETURN(element, Path(element, *attribute, call.budget));
    }
    KVASIR_RETURN_IF_ERROR(call.budget->SpendBytes(separator.size()));
    if (i > 0) out.Append(separator);
    KVASIR_ASSIGN_OR_RETURN(const MarkedText text, PythonText(element, call.budget));
    out.Append(text);
  }
  return Value(std::move(out));
}

Result FirstOrLast(const Call& call) {
  KVASIR_ASSIGN_OR_RETURN(std::vector<Value> elements, Elements(call.input, call.budget));
  if (elements.empty()) return Value(Undefined{absl::StrCat("the ", call.name, " element")});
  return call.name == "first" ? elements.front() : elements.back();
}

Result ToList(const Call& call) {
  KVASIR_ASSIGN_OR_RETURN(std::vector<Value> elements, Elements(call.input, call.budget));
  return MakeList(std::move(elements), List::Kind::kList, call.budget);
}

Result Reverse(const Call& call) {
  if (call.input.text() != nullptr) {
    return Slice(call.input, {Value(), Value(), Value(int64_t{-1})}, call.budget);
  }
  KVASIR_ASSIGN_OR_RETURN(std::vector<Value> elements, Elements(call.input, call.budget));
  std::reverse(elements.begin(), elements.end());
  return MakeList(std::move(elements), List::Kind::kGenerator, call.budget);
}

// The arguments after the first `count` positional ones.
CallArguments After(const CallArguments& arguments, size_t count) {
  CallArguments rest = arguments;
  rest.positional.erase(
      rest.positional.begin(),
      rest.positional.begin() + static_cast<ptrdiff_t>(std::min(count, rest.positional.size())));
  return rest;
}

Result Map(const Call& call) {
  KVASIR_ASSIGN_OR_RETURN(std::vector<Value> elements, Elements(call.input, call.budget));
  for (Value& element : elements) {
    if (call.arguments.positional.empty()) {
      const Value* attribute = call.arguments.Find(0, "attribute");
      if (attribute == nullptr) return absl::InvalidArgumentError("map: it needs a filter");
      KVASIR_ASSIGN_OR_RETURN(element, Path(element, *attribute, call.budget));
      const Value* absent = call.arguments.Find(1, "default");
      if (element.IsUndefined() && absent != nullptr) element = *absent;
      continue;
    }
    KVASIR_ASSIGN_OR_RETURN(const MarkedText* filter, call.arguments.Text(0, "filter"));
    KVASIR_ASSIGN_OR_RETURN(
        element, ApplyFilter(filter->bytes(), element, After(call.arguments, 1), call.budget));
  }
  return MakeList(std::move(elements), List::Kind::kGenerator, call.budget);
}

// select, reject, selectattr and rejectattr.
Result Choose(const Call& call) {
  const bool by_attribute = absl::string_view(call.name).find("attr") != absl::string_view::npos;
  const bool keeps = call.name[0] == 's';
  const size_t test_at = by_attribute ? 1 : 0;
  if (call.arguments.positional.size() < test_at) {
    return absl::InvalidArgumentError(absl::StrCat(call.name, ": it needs an attribute"));
  }
  KVASIR_ASSIGN_OR_RETURN(const std::vector<Value> elements, Elements(call.input, call.budget));
  const CallArguments rest = After(call.arguments, test_at + 1);
  std::vector<Value> chosen;
  for (const Value& element : elements) {
    KVASIR_RETURN_IF_ERROR(call.budget->Spend(1));
    Value tested = element;
    if (by_attribute) {
      KVASIR_ASSIGN_OR_RETURN(tested, Path(element, call.arguments.positional[0], call.budget));
    }
    bool passes = tested.IsTrue();
    if (call.arguments.positional.size() > test_at) {
      KVASIR_ASSIGN_OR_RETURN(const MarkedText* test, call.arguments.Text(test_at, "test"));
      KVASIR_ASSIGN_OR_RETURN(passes, ApplyTest(test->bytes(), tested, rest, call.budget));
    }
    if (passes == keeps) chosen.push_back(element);
  }
  return MakeList(std::move(chosen), List::Kind::kGenerator, call.budget);
}

// Returns what sort and unique compare: texts without regard to case unless told otherwise.
Result ComparedKey(const Value& element, const Value* attribute, bool case_sensitive,
                   Budget* budget) {
  Value key = element;
  if (attribute != nullptr && !attribute->IsNone()) {
    KVASIR_ASSIGN_OR_RETURN(key, Path(element, *attribute, budget));
  }
  if (case_sensitive || key.text() == nullptr) return key;
  KVASIR_RETURN_IF_ERROR(budget->SpendBytes(3 * key.text()->size()));
  return Value(ChangeCase(*key.text(), Case::kLower));
}

Result Unique(const Call& call) {
  KVASIR_ASSIGN_OR_RETURN(const std::vector<Value> elements, Elements(call.input, call.budget));
  std::vector<Value> keys;
  std::vector<Value> kept;
  for (const Value& element : elements) {
    KVASIR_ASSIGN_OR_RETURN(
        Value key, ComparedKey(element, call.arguments.Find(1, "attribute"),
                               call.arguments.IsTrue(0, "case_sensitive", false), call.budget));
    bool known = false;
    for (size_t i = 0; i < keys.size() && !known; ++i) {
      KVASIR_ASSIGN_OR_RETURN(known, EqualWithin(keys[i], key, call.budget));
    }
    if (known) continue;
    keys.push_back(std::move(key));
    kept.push_back(element);
  }
  return MakeList(std::move(kept), List::Kind::kGenerator, call.budget);
}

Result Sort(const Call& call) {
  KVASIR_ASSIGN_OR_RETURN(const std::vector<Value> elements, Elements(call.input, call.budget));
  std::vector<std::pair<Value, Value>> keyed;
  for (const Value& element : elements) {
    KVASIR_ASSIGN_OR_RETURN(
        Value key, ComparedKey(element, call.arguments.Find(2, "attribute"),
                               call.arguments.IsTrue(1, "case_sensitive", false), call.budget));
    keyed.emplace_back(std::move(key), element);
  }
  absl::Status status;
  const bool reverse = call.arguments.IsTrue(0, "reverse", false);
  // After an error everything counts as equal, which is an order too.
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    status.Update(call.budget->Spend(std::min(a.first.weight(), b.first.weight())));
    const absl::StatusOr<int> order = Compare(a.first, b.first);
    status.Update(order.status());
    return status.ok() && (reverse ? *order > 0 : *order < 0);
  });
  KVASIR_RETURN_IF_ERROR(status);
  std::vector<Value> sorted;
  for (auto& [key, element] : keyed) sorted.push_back(std::move(element));
  return MakeList(std::move(sorted), List::Kind::kList, call.budget);
}

constexpr std::pair<absl::string_view, Result (*)(const Call&)> kFilters[] = {
    {"trim", Trim},
    {"length", LengthOf},
    {"count", LengthOf},
    {"tojson", ToJson},
    {"join", Join},
    {"select", Choose},
    {"reject", Choose},
    {"selectattr", Choose},
    {"rejectattr", Choose},
    {"map", Map},
    {"default", Default},
    {"d", Default},
    {"upper", InCase<Case::kUpper>},
    {"lower", InCase<Case::kLower>},
    {"title", InCase<Case::kTitle>},
    {"capitalize", InCase<Case::kCapitalized>},
    {"first", FirstOrLast},
    {"last", FirstOrLast},
    {"list", ToList},
    {"items", Items},
    {"string", TextOf},
    {"safe", TextOf},
    {"int", ToInteger},
    {"float", ToReal},
    {"abs", Absolute},
    {"round", Round},
    {"replace", Replace},
    {"unique", Unique},
    {"sort", Sort},
    {"reverse", Reverse},
};

const auto* FindFilter(absl::string_view name) {
  return std::find_if(std::begin(kFilters), std::end(kFilters),
                      [&](const auto& row) { return row.first == name; });
}

}  // namespace

bool IsFilter(absl::string_view name) { return FindFilter(name) != std::end(kFilters); }

absl::StatusOr<Value> ApplyFilter(absl::string_view name, const Value& input,
                                  const CallArguments& arguments, Budget* budget) {
  const auto* row = FindFilter(name);
  if (row == std::end(kFilters)) {
    return absl::InvalidArgumentError(absl::StrCat("there is no filter '", name, "'"));
  }
  KVASIR_RETURN_IF_ERROR(budget->Enter());
  Result result =
      row->second({.name = name, .input = input, .arguments = arguments, .budget = budget});
  budget->Leave();
  return result;
}

}  // namespace kvasir::coordinator
