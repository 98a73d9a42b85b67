#include "coordinator/chat/values/value.h"

#include <algorithm>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

int Sign(double a, double b) { return a < b ? -1 : (a > b ? 1 : 0); }

bool EqualDicts(const Dict& a, const Dict& b) {
  if (a.entries.size() != b.entries.size()) return false;
  absl::flat_hash_map<absl::string_view, const Value*> by_text;
  for (const auto& [key, value] : b.entries) {
    if (key.text() != nullptr) by_text.emplace(key.text()->bytes(), &value);
  }
  return std::all_of(a.entries.begin(), a.entries.end(), [&](const auto& entry) {
    if (entry.first.text() != nullptr) {
      const auto other = by_text.find(entry.first.text()->bytes());
      return other != by_text.end() && Equal(entry.second, *other->second);
    }
    return std::any_of(b.entries.begin(), b.entries.end(), [&](const auto& other) {
      return Equal(entry.first, other.first) && Equal(entry.second, other.second);
    });
  });
}

template <typename Container>
void Include(const Value& part, Container& whole) {
  whole.depth = std::max(whole.depth, part.depth() + 1);
  whole.weight = std::min(Value::kMaxWeight, whole.weight + part.weight());
}

}  // namespace

Value::Value(List list) {
  for (const Value& element : list.elements) Include(element, list);
  data_ = std::make_shared<const List>(std::move(list));
}

Value::Value(Dict dict) {
  for (const auto& [key, value] : dict.entries) {
    Include(key, dict);
    Include(value, dict);
  }
  data_ = std::make_shared<const Dict>(std::move(dict));
}

Namespace* Value::space() const {
  Namespace* const* space = std::get_if<Namespace*>(&data_);
  return space == nullptr ? nullptr : *space;
}

std::optional<int64_t> Value::AsInteger() const {
  if (const bool* value = boolean()) return *value ? 1 : 0;
  if (const int64_t* value = integer()) return *value;
  return std::nullopt;
}

std::optional<double> Value::AsNumber() const {
  if (const double* value = real()) return *value;
  if (const std::optional<int64_t> value = AsInteger()) return static_cast<double>(*value);
  return std::nullopt;
}

bool Value::IsTrue() const {
  if (IsUndefined() || IsNone()) return false;
  if (const std::optional<double> number = AsNumber()) return *number != 0;
  if (const MarkedText* value = text()) return !value->empty();
  if (const List* value = list()) {
    return value->kind == List::Kind::kGenerator || !value->elements.empty();
  }
  if (const Dict* value = dict()) return !value->entries.empty();
  return true;
}

absl::string_view Value::TypeName() const {
  constexpr absl::string_view kNames[] = {"NoneType", "Undefined", "bool", "int",       "float",
                                          "str",      "list",      "dict", "Namespace", "function"};
  return kNames[data_.index()];
}

int Value::depth() const {
  if (const List* value = list()) return value->depth;
  if (const Dict* value = dict()) return value->depth;
  return 0;
}

int64_t Value::weight() const {
  if (const List* value = list()) return value->weight;
  if (const Dict* value = dict()) return value->weight;
  if (const MarkedText* value = text()) return 1 + static_cast<int64_t>(value->size() / 64);
  return 1;
}

const Value* Dict::Find(absl::string_view key) const {
  for (const auto& [name, value] : entries) {
    const MarkedText* text = name.text();
    if (text != nullptr && text->bytes() == key) return &value;
  }
  return nullptr;
}

Value* Namespace::Find(absl::string_view name) {
  for (auto& [member, value] : members) {
    if (member == name) return &value;
  }
  return nullptr;
}

bool Equal(const Value& a, const Value& b) {
  if (a.AsNumber().has_value() && b.AsNumber().has_value()) {
    if (a.AsInteger().has_value() && b.AsInteger().has_value()) {
      return *a.AsInteger() == *b.AsInteger();
    }
    return *a.AsNumber() == *b.AsNumber();
  }
  if (a.text() != nullptr && b.text() != nullptr) return a.text()->bytes() == b.text()->bytes();
  if (a.list() != nullptr && b.list() != nullptr) {
    return a.list()->kind == b.list()->kind &&
           std::equal(a.list()->elements.begin(), a.list()->elements.end(),
                      b.list()->elements.begin(), b.list()->elements.end(), Equal);
  }
  if (a.dict() != nullptr && b.dict() != nullptr) return EqualDicts(*a.dict(), *b.dict());
  if (a.space() != nullptr) return a.space() == b.space();
  return (a.IsNone() && b.IsNone()) || (a.IsUndefined() && b.IsUndefined());
}

absl::StatusOr<int> Compare(const Value& a, const Value& b) {
  const std::optional<int64_t> x = a.AsInteger();
  const std::optional<int64_t> y = b.AsInteger();
  if (x.has_value() && y.has_value()) return *x < *y ? -1 : (*x > *y ? 1 : 0);
  if (a.AsNumber().has_value() && b.AsNumber().has_value()) {
    return Sign(*a.AsNumber(), *b.AsNumber());
  }
  // The order of UTF-8 is the order of code points.
  if (a.text() != nullptr && b.text() != nullptr) {
    return a.text()->bytes().compare(b.text()->bytes());
  }
  if (a.list() != nullptr && b.list() != nullptr) {
    const auto& left = a.list()->elements;
    const auto& right = b.list()->elements;
    for (size_t i = 0; i < std::min(left.size(), right.size()); ++i) {
      if (!Equal(left[i], right[i])) return Compare(left[i], right[i]);
    }
    return Sign(static_cast<double>(left.size()), static_cast<double>(right.size()));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("a ", a.TypeName(), " and a ", b.TypeName(), " have no order"));
}

}  // namespace kvasir::coordinator
