// Values of chat templates: what Jinja knows of Python's types. Lists, dictionaries and texts are
// shared and never change, except namespaces, which belong to the rendering and are only pointed
// to: so no cycle of owners can form. Depth is limited, so that functions may recurse. Called by
// the template engine. Thread-safe as const.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "coordinator/chat/values/marked_text.h"

namespace kvasir::coordinator {

struct List;
struct Dict;
struct Namespace;
struct Statement;

struct Undefined {
  std::string name;  // for messages
};
struct None {};
// A function that the template may call or test: a macro, or a name that the engine knows.
struct Function {
  std::string name;
  const Statement* macro = nullptr;
};

class Value {
 public:
  static constexpr int kMaxDepth = 96;  // of lists and dictionaries within each other
  static constexpr int64_t kMaxWeight = int64_t{1} << 40;

  Value() : data_(None()) {}
  Value(Undefined undefined) : data_(std::move(undefined)) {}
  Value(bool value) : data_(value) {}
  Value(int64_t value) : data_(value) {}
  Value(double value) : data_(value) {}
  Value(MarkedText text) : data_(std::make_shared<const MarkedText>(std::move(text))) {}
  Value(Function function) : data_(std::move(function)) {}
  Value(Namespace* space) : data_(space) {}
  explicit Value(List list);
  explicit Value(Dict dict);
  // Text of the template's.
  static Value Text(std::string text) { return Value(MarkedText(std::move(text))); }

  bool IsUndefined() const { return std::holds_alternative<Undefined>(data_); }
  bool IsNone() const { return std::holds_alternative<None>(data_); }
  // Return null for another type.
  const Undefined* undefined() const { return std::get_if<Undefined>(&data_); }
  const bool* boolean() const { return std::get_if<bool>(&data_); }
  const int64_t* integer() const { return std::get_if<int64_t>(&data_); }
  const double* real() const { return std::get_if<double>(&data_); }
  const MarkedText* text() const { return Pointee<MarkedText>(); }
  const List* list() const { return Pointee<List>(); }
  const Dict* dict() const { return Pointee<Dict>(); }
  const Function* function() const { return std::get_if<Function>(&data_); }
  Namespace* space() const;

  // Returns an int or a bool as a number, as Python does.
  std::optional<int64_t> AsInteger() const;
  std::optional<double> AsNumber() const;  // or a float
  bool IsTrue() const;
  // Returns Python's name of the type.
  absl::string_view TypeName() const;
  int depth() const;  // 0 for a scalar
  // Returns about how many steps a comparison with an equal value takes, at most kMaxWeight.
  int64_t weight() const;

 private:
  template <typename T>
  const T* Pointee() const {
    const auto* pointer = std::get_if<std::shared_ptr<const T>>(&data_);
    return pointer == nullptr ? nullptr : pointer->get();
  }

  std::variant<None, Undefined, bool, int64_t, double, std::shared_ptr<const MarkedText>,
               std::shared_ptr<const List>, std::shared_ptr<const Dict>, Namespace*, Function>
      data_;
};

struct List {
  enum class Kind { kList, kTuple, kGenerator };  // generators are always true, as in Python
  std::vector<Value> elements;
  Kind kind = Kind::kList;
  int depth = 1;  // this and the next are set when it becomes a Value
  int64_t weight = 1;
};

struct Dict {
  std::vector<std::pair<Value, Value>> entries;  // in order of insertion
  int depth = 1;  // this and the next are set when it becomes a Value
  int64_t weight = 1;

  // Returns null when there is no such key.
  const Value* Find(absl::string_view key) const;
};

struct Namespace {
  std::vector<std::pair<std::string, Value>> members;

  Value* Find(absl::string_view name);
};

// Python's ==.
bool Equal(const Value& a, const Value& b);
// Returns a number below, equal to or above 0. Errors: INVALID_ARGUMENT for types without an order.
absl::StatusOr<int> Compare(const Value& a, const Value& b);

}  // namespace kvasir::coordinator
