// Evaluates the expressions of a template: variables in nested scopes, operators, calls. Macros are
// run by the renderer, which derives from this. Belongs to one rendering.
#pragma once

#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "coordinator/chat/parsing/syntax.h"
#include "coordinator/chat/values/budget.h"
#include "coordinator/chat/values/operations.h"

namespace kvasir::coordinator {

// Variables of a loop's round, of a macro's call or of the template. Outlived by `parent`.
struct Scope {
  Scope* parent = nullptr;
  std::vector<std::pair<std::string, Value>> variables = {};

  void Set(absl::string_view name, Value value);
};

class Evaluator {
 protected:
  // `now` is what strftime_now tells, in local time.
  Evaluator(absl::Time now, Budget* budget);
  virtual ~Evaluator() = default;

  absl::StatusOr<Value> Evaluate(const Expression& expression);
  virtual absl::StatusOr<Value> CallMacro(const Statement& macro, CallArguments arguments) = 0;

  Budget& budget_;
  Scope globals_;
  Scope* scope_ = &globals_;
  bool raised_ = false;  // the error is the template's own

 private:
  absl::StatusOr<Value> EvaluateNode(const Expression& expression);
  absl::StatusOr<Value> EvaluateParts(const Expression& expression);
  Value Variable(const std::string& name) const;
  absl::StatusOr<Value> EvaluateDict(const Expression& expression);
  absl::StatusOr<Value> EvaluateSlice(const Expression& expression);
  absl::StatusOr<Value> EvaluateComparison(const Expression& expression);
  absl::StatusOr<Value> EvaluateCall(const Expression& expression);
  absl::StatusOr<CallArguments> EvaluateArguments(const Arguments& arguments);
  absl::StatusOr<Value> CallFunction(const Function& function, CallArguments arguments);
  absl::StatusOr<Value> MakeNamespace(CallArguments arguments);
  absl::StatusOr<Value> MakeRange(const CallArguments& arguments);
  absl::StatusOr<Value> FormatNow(const CallArguments& arguments);

  const absl::Time now_;
  std::deque<Namespace> namespaces_;  // of the whole rendering: values point to them
};

}  // namespace kvasir::coordinator
