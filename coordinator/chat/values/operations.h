// The functions of the template language: filters, tests, methods of texts and dictionaries, and
// access to parts of values. Each is a row of a table with its name. Called by the parser, which
// refuses unknown names, and by the evaluator. Pure functions; errors are INVALID_ARGUMENT.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "coordinator/chat/values/budget.h"
#include "coordinator/chat/values/value.h"

namespace kvasir::coordinator {

struct CallArguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;

  // Returns the argument of this name or at this position; null when there is neither.
  const Value* Find(size_t position, absl::string_view name) const;
  // Return the argument, or `absent`. Errors: it has another type.
  absl::StatusOr<int64_t> Integer(size_t position, absl::string_view name, int64_t absent) const;
  bool IsTrue(size_t position, absl::string_view name, bool absent) const;
  // Returns a text, which must be there.
  absl::StatusOr<const MarkedText*> Text(size_t position, absl::string_view name) const;
};

bool IsFilter(absl::string_view name);
bool IsTest(absl::string_view name);
absl::StatusOr<Value> ApplyFilter(absl::string_view name, const Value& input,
                                  const CallArguments& arguments, Budget* budget);
absl::StatusOr<bool> ApplyTest(absl::string_view name, const Value& input,
                               const CallArguments& arguments, Budget* budget);
absl::StatusOr<Value> CallMethod(const Value& self, absl::string_view name,
                                 const CallArguments& arguments, Budget* budget);

// Returns self.name: a member, undefined, or a function where that names a method of self's type.
absl::StatusOr<Value> Attribute(const Value& self, absl::string_view name, Budget* budget);
absl::StatusOr<Value> Item(const Value& self, const Value& key, Budget* budget);
// `bounds`: begin, end, step; None where absent.
absl::StatusOr<Value> Slice(const Value& self, const Value (&bounds)[3], Budget* budget);
// Returns the elements of a list, the keys of a dictionary, the characters of a text, or none of
// undefined.
absl::StatusOr<std::vector<Value>> Elements(const Value& value, Budget* budget);
// Returns the number of the same.
absl::StatusOr<int64_t> Length(const Value& value);
absl::StatusOr<bool> Contains(const Value& container, const Value& value, Budget* budget);
absl::StatusOr<bool> EqualWithin(const Value& a, const Value& b, Budget* budget);
// Makes the list; an error when it is nested too deeply.
absl::StatusOr<Value> MakeList(std::vector<Value> elements, List::Kind kind, Budget* budget);
absl::StatusOr<Value> MakeDict(std::vector<std::pair<Value, Value>> entries, Budget* budget);
// Returns pairs (key, value).
absl::StatusOr<Value> DictItems(const Dict& dict, Budget* budget);

}  // namespace kvasir::coordinator
