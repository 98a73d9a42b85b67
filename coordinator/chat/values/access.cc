// Access to parts of values, and lists and dictionaries made of them (operations.h).
#include <algorithm>

#include "absl/strings/str_cat.h"

#include "coordinator/chat/values/operations.h"
#include "coordinator/chat/values/text_operations.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

absl::Status NoPart(const Value& self, absl::string_view part) {
  if (const Undefined* undefined = self.undefined()) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", undefined->name, "' is undefined, so it has no ", part));
  }
  return absl::OkStatus();
}

// Returns the part of a text or list at `index`, which may count from the end; undefined outside.
absl::StatusOr<Value> At(const Value& self, int64_t index, Budget* budget) {
  KVASIR_ASSIGN_OR_RETURN(const int64_t length, Length(self));
  if (index < 0) index += length;
  if (index < 0 || index >= length) return Value(Undefined{absl::StrCat("element ", index)});
  if (self.list() != nullptr) return self.list()->elements[static_cast<size_t>(index)];
  KVASIR_RETURN_IF_ERROR(budget->SpendBytes(self.text()->size()));
  const std::vector<size_t> offsets = CodePointOffsets(self.text()->bytes());
  const auto at = static_cast<size_t>(index);
  return Value(self.text()->Part(offsets[at], offsets[at + 1]));
}

absl::StatusOr<int64_t> Bound(const Value& bound, int64_t absent) {
  if (bound.IsNone()) return absent;
  const std::optional<int64_t> value = bound.AsInteger();
  if (!value.has_value()) return absl::InvalidArgumentError("a slice has bounds that are no int");
  return *value;
}

}  // namespace

absl::StatusOr<Value> Attribute(const Value& self, absl::string_view name, Budget* budget) {
  KVASIR_RETURN_IF_ERROR(NoPart(self, name));
  if (Namespace* space = self.space()) {
    const Value* member = space->Find(name);
    return member != nullptr ? *member : Value(Undefined{std::string(name)});
  }
  if (const Dict* dict = self.dict()) {
    constexpr absl::string_view kMethods[] = {"items", "keys", "values", "get"};
    if (std::find(std::begin(kMethods), std::end(kMethods), name) != std::end(kMethods)) {
      return Value(Function{.name = std::string(name)});
    }
    KVASIR_RETURN_IF_ERROR(budget->Spend(static_cast<int64_t>(dict->entries.size() / 16)));
    if (const Value* value = dict->Find(name)) return *value;
  }
  return Value(Undefined{std::string(name)});
}

absl::StatusOr<Value> Item(const Value& self, const Value& key, Budget* budget) {
  if (const MarkedText* name = key.text()) {
    KVASIR_RETURN_IF_ERROR(NoPart(self, name->bytes()));
    if (const Dict* dict = self.dict()) {
      KVASIR_RETURN_IF_ERROR(budget->Spend(static_cast<int64_t>(dict->entries.size() / 16)));
      if (const Value* value = dict->Find(name->bytes())) return *value;
    }
    return Attribute(self, name->bytes(), budget);
  }
  KVASIR_RETURN_IF_ERROR(NoPart(self, "elements"));
  if (const Dict* dict = self.dict()) {
    for (const auto& [candidate, value] : dict->entries) {
      KVASIR_ASSIGN_OR_RETURN(const bool equal, EqualWithin(candidate, key, budget));
      if (equal) return value;
    }
  } else if (self.list() != nullptr || self.text() != nullptr) {
    if (const std::optional<int64_t> index = key.AsInteger()) return At(self, *index, budget);
  }
  return Value(Undefined{"element"});
}

absl::StatusOr<Value> Slice(const Value& self, const Value (&bounds)[3], Budget* budget) {
  const bool is_text = self.text() != nullptr;
  if (!is_text && self.list() == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("a ", self.TypeName(), " has no slices"));
  }
  KVASIR_ASSIGN_OR_RETURN(const int64_t length, Length(self));
  KVASIR_ASSIGN_OR_RETURN(int64_t step, Bound(bounds[2], 1));
  if (step == 0) return absl::InvalidArgumentError("a slice has the step 0");
  step = std::clamp(step, -length - 1, length + 1);
  const int64_t least = step > 0 ? 0 : -1;
  const int64_t most = step > 0 ? length : length - 1;
  const auto clamp = [&](int64_t bound) {
    return std::clamp(bound < 0 ? bound + length : bound, least, most);
  };
  KVASIR_ASSIGN_OR_RETURN(int64_t begin, Bound(bounds[0], 0));
  KVASIR_ASSIGN_OR_RETURN(int64_t end, Bound(bounds[1], 0));
  begin = bounds[0].IsNone() ? (step > 0 ? 0 : length - 1) : clamp(begin);
  end = bounds[1].IsNone() ? (step > 0 ? length : -1) : clamp(end);
  std::vector<size_t> offsets;
  if (is_text) {
    KVASIR_RETURN_IF_ERROR(budget->SpendBytes(self.text()->size() * (1 + sizeof(size_t))));
    offsets = CodePointOffsets(self.text()->bytes());
    if (step == 1) {
      const size_t from = offsets[static_cast<size_t>(begin)];
      return Value(self.text()->Part(from, std::max(from, offsets[static_cast<size_t>(end)])));
    }
  }
  std::vector<Value> elements;
  MarkedText text;
  for (int64_t i = begin; step > 0 ? i < end : i > end; i += step) {
    KVASIR_RETURN_IF_ERROR(budget->Spend(1));
    const auto at = static_cast<size_t>(i);
    if (is_text) {
      text.AppendPart(*self.text(), offsets[at], offsets[at + 1]);
    } else {
      elements.push_back(self.list()->elements[at]);
    }
  }
  if (is_text) return Value(std::move(text));
  return MakeList(std::move(elements), self.list()->kind, budget);
}

absl::StatusOr<std::vector<Value>> Elements(const Value& value, Budget* budget) {
  std::vector<Value> elements;
  if (value.IsUndefined()) return elements;
  KVASIR_ASSIGN_OR_RETURN(const int64_t length, Length(value));
  KVASIR_RETURN_IF_ERROR(budget->SpendBytes(static_cast<size_t>(length) * sizeof(Value)));
  if (value.list() != nullptr) return value.list()->elements;
  if (const Dict* dict = value.dict()) {
    for (const auto& [key, member] : dict->entries) elements.push_back(key);
    return elements;
  }
  KVASIR_RETURN_IF_ERROR(budget->SpendBytes(static_cast<size_t>(length) * sizeof(MarkedText)));
  const std::vector<size_t> offsets = CodePointOffsets(value.text()->bytes());
  for (size_t i = 0; i + 1 < offsets.size(); ++i) {
    elements.emplace_back(value.text()->Part(offsets[i], offsets[i + 1]));
  }
  return elements;
}

absl::StatusOr<int64_t> Length(const Value& value) {
  if (value.IsUndefined()) return 0;
  if (const List* list = value.list()) return static_cast<int64_t>(list->elements.size());
  if (const Dict* dict = value.dict()) return static_cast<int64_t>(dict->entries.size());
  if (const MarkedText* text = value.text()) return CountCodePoints(text->bytes());
  return absl::InvalidArgumentError(absl::StrCat("a ", value.TypeName(), " has no elements"));
}

absl::StatusOr<bool> EqualWithin(const Value& a, const Value& b, Budget* budget) {
  KVASIR_RETURN_IF_ERROR(budget->Spend(std::min(a.weight(), b.weight())));
  return Equal(a, b);
}

absl::StatusOr<bool> Contains(const Value& container, const Value& value, Budget* budget) {
  if (const MarkedText* text = container.text()) {
    if (value.text() == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("a text contains texts only, not a ", value.TypeName()));
    }
    KVASIR_RETURN_IF_ERROR(budget->Spend(static_cast<int64_t>(text->size() / 64)));
    return text->bytes().find(value.text()->bytes()) != absl::string_view::npos;
  }
  if (const Dict* dict = container.dict(); dict != nullptr && value.text() != nullptr) {
    KVASIR_RETURN_IF_ERROR(budget->Spend(static_cast<int64_t>(dict->entries.size() / 16)));
    return dict->Find(value.text()->bytes()) != nullptr;
  }
  KVASIR_ASSIGN_OR_RETURN(const std::vector<Value> elements, Elements(container, budget));
  for (const Value& element : elements) {
    KVASIR_ASSIGN_OR_RETURN(const bool equal, EqualWithin(element, value, budget));
    if (equal) return true;
  }
  return false;
}

absl::StatusOr<Value> MakeList(std::vector<Value> elements, List::Kind kind, Budget* budget) {
  KVASIR_RETURN_IF_ERROR(budget->SpendBytes(elements.size() * sizeof(Value) + sizeof(List)));
  Value value(List{.elements = std::move(elements), .kind = kind});
  if (value.depth() <= Value::kMaxDepth) return value;
  return absl::InvalidArgumentError("lists are nested too deeply");
}

absl::StatusOr<Value> MakeDict(std::vector<std::pair<Value, Value>> entries, Budget* budget) {
  KVASIR_RETURN_IF_ERROR(budget->SpendBytes(2 * entries.size() * sizeof(Value) + sizeof(Dict)));
  Value value(Dict{.entries = std::move(entries)});
  if (value.depth() <= Value::kMaxDepth) return value;
  return absl::InvalidArgumentError("dictionaries are nested too deeply");
}

absl::StatusOr<Value> DictItems(const Dict& dict, Budget* budget) {
  std::vector<Value> pairs;
  for (const auto& [key, value] : dict.entries) {
    KVASIR_ASSIGN_OR_RETURN(pairs.emplace_back(),
                            MakeList({key, value}, List::Kind::kTuple, budget));
  }
  return MakeList(std::move(pairs), List::Kind::kList, budget);
}

}  // namespace kvasir::coordinator
