#include "coordinator/chat/evaluator.h"

#include <limits>

#include "absl/strings/str_cat.h"

#include "coordinator/chat/values/arithmetic.h"
#include "coordinator/chat/values/python_text.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using Kind = Expression::Kind;

constexpr absl::string_view kFunctions[] = {"namespace", "range", "raise_exception", "strftime_now",
                                            "dict"};

// Logs leave out what is quoted.
std::string WithQuotedClientText(const MarkedText& text) {
  std::string quoted;
  size_t end = 0;
  for (const TextSpan& span : text.client_spans()) {
    absl::StrAppend(&quoted, text.bytes().substr(end, span.begin - end), "\"",
                    text.bytes().substr(span.begin, span.end - span.begin), "\"");
    end = span.end;
  }
  absl::StrAppend(&quoted, text.bytes().substr(end));
  return quoted;
}

}  // namespace

void Scope::Set(absl::string_view name, Value value) {
  for (auto& [variable, current] : variables) {
    if (variable == name) {
      current = std::move(value);
      return;
    }
  }
  variables.emplace_back(std::string(name), std::move(value));
}

Evaluator::Evaluator(absl::Time now, Budget* budget) : budget_(*budget), now_(now) {
  for (const absl::string_view name : kFunctions) {
    globals_.Set(name, Value(Function{.name = std::string(name)}));
  }
}

Value Evaluator::Variable(const std::string& name) const {
  for (const Scope* scope = scope_; scope != nullptr; scope = scope->parent) {
    for (const auto& [variable, value] : scope->variables) {
      if (variable == name) return value;
    }
  }
  return Value(Undefined{name});
}

absl::StatusOr<Value> Evaluator::Evaluate(const Expression& expression) {
  KVASIR_RETURN_IF_ERROR(budget_.Enter());
  absl::StatusOr<Value> value = EvaluateNode(expression);
  budget_.Leave();
  return value;
}

absl::StatusOr<Value> Evaluator::EvaluateNode(const Expression& expression) {
  switch (expression.kind) {
    case Kind::kLiteral:
      return expression.literal;
    case Kind::kName:
      return Variable(expression.name);
    case Kind::kDict:
      return EvaluateDict(expression);
    case Kind::kSlice:
      return EvaluateSlice(expression);
    case Kind::kComparison:
      return EvaluateComparison(expression);
    case Kind::kCall:
      return EvaluateCall(expression);
    case Kind::kList:
    case Kind::kTuple: {
      std::vector<Value> elements;
      for (const ExpressionPtr& part : expression.parts) {
        KVASIR_ASSIGN_OR_RETURN(elements.emplace_back(), Evaluate(*part));
      }
      const bool tuple = expression.kind == Kind::kTuple;
      return MakeList(std::move(elements), tuple ? List::Kind::kTuple : List::Kind::kList,
                      &budget_);
    }
    case Kind::kConditional: {
      KVASIR_ASSIGN_OR_RETURN(const Value condition, Evaluate(*expression.parts[1]));
      if (condition.IsTrue()) return Evaluate(*expression.parts[0]);
      if (expression.parts[2] != nullptr) return Evaluate(*expression.parts[2]);
      return Value(Undefined{"an if without else"});
    }
    default:
      return EvaluateParts(expression);
  }
}

// The kinds that begin with the value of parts[0].
absl::StatusOr<Value> Evaluator::EvaluateParts(const Expression& expression) {
  KVASIR_ASSIGN_OR_RETURN(const Value first, Evaluate(*expression.parts[0]));
  switch (expression.kind) {
    case Kind::kAttribute:
      return Attribute(first, expression.name, &budget_);
    case Kind::kItem: {
      KVASIR_ASSIGN_OR_RETURN(const Value key, Evaluate(*expression.parts[1]));
      return Item(first, key, &budget_);
    }
    case Kind::kFilter: {
      KVASIR_ASSIGN_OR_RETURN(const CallArguments arguments,
                              EvaluateArguments(expression.arguments));
      return ApplyFilter(expression.name, first, arguments, &budget_);
    }
    case Kind::kTest: {
      KVASIR_ASSIGN_OR_RETURN(const CallArguments arguments,
                              EvaluateArguments(expression.arguments));
      KVASIR_ASSIGN_OR_RETURN(const bool passes,
                              ApplyTest(expression.name, first, arguments, &budget_));
      return Value(passes);
    }
    case Kind::kNot:
      return Value(!first.IsTrue());
    case Kind::kNegative: {
      if (const double* real = first.real()) return Value(-*real);
      return ApplyOperator("-", Value(int64_t{0}), first, &budget_);
    }
    case Kind::kAnd:
      return first.IsTrue() ? Evaluate(*expression.parts[1]) : first;
    case Kind::kOr:
      return first.IsTrue() ? first : Evaluate(*expression.parts[1]);
    default: {
      KVASIR_ASSIGN_OR_RETURN(const Value second, Evaluate(*expression.parts[1]));
      return ApplyOperator(expression.name, first, second, &budget_);
    }
  }
}

absl::StatusOr<Value> Evaluator::EvaluateDict(const Expression& expression) {
  std::vector<std::pair<Value, Value>> entries;
  for (size_t i = 0; i < expression.parts.size(); i += 2) {
    KVASIR_ASSIGN_OR_RETURN(Value key, Evaluate(*expression.parts[i]));
    KVASIR_ASSIGN_OR_RETURN(Value value, Evaluate(*expression.parts[i + 1]));
    // The first of equal keys stays, with the last value; 1 and true are equal.
    Value* known = nullptr;
    for (auto& [other, other_value] : entries) {
      KVASIR_ASSIGN_OR_RETURN(const bool equal, EqualWithin(other, key, &budget_));
      if (equal) known = &other_value;
    }
    if (known != nullptr) {
      *known = std::move(value);
    } else {
      entries.emplace_back(std::move(key), std::move(value));
    }
  }
  return MakeDict(std::move(entries), &budget_);
}

absl::StatusOr<Value> Evaluator::EvaluateSlice(const Expression& expression) {
  KVASIR_ASSIGN_OR_RETURN(const Value self, Evaluate(*expression.parts[0]));
  Value bounds[3];
  for (size_t i = 0; i < 3; ++i) {
    if (expression.parts[i + 1] == nullptr) continue;
    KVASIR_ASSIGN_OR_RETURN(bounds[i], Evaluate(*expression.parts[i + 1]));
  }
  return Slice(self, bounds, &budget_);
}

absl::StatusOr<Value> Evaluator::EvaluateComparison(const Expression& expression) {
  KVASIR_ASSIGN_OR_RETURN(Value left, Evaluate(*expression.parts[0]));
  for (size_t i = 0; i < expression.operators.size(); ++i) {
    KVASIR_ASSIGN_OR_RETURN(Value right, Evaluate(*expression.parts[i + 1]));
    const std::string& op = expression.operators[i];
    bool holds = false;
    if (op == "in" || op == "not in") {
      KVASIR_ASSIGN_OR_RETURN(const bool contains, Contains(right, left, &budget_));
      holds = contains == (op == "in");
    } else if (op == "==" || op == "!=") {
      KVASIR_ASSIGN_OR_RETURN(const bool equal, EqualWithin(left, right, &budget_));
      holds = equal == (op == "==");
    } else {
      KVASIR_RETURN_IF_ERROR(budget_.Spend(std::min(left.weight(), right.weight())));
      KVASIR_ASSIGN_OR_RETURN(const int order, Compare(left, right));
      holds = op == "<" ? order < 0 : op == ">" ? order > 0 : op == "<=" ? order <= 0 : order >= 0;
    }
    if (!holds) return Value(false);
    left = std::move(right);
  }
  return Value(true);
}

absl::StatusOr<CallArguments> Evaluator::EvaluateArguments(const Arguments& arguments) {
  CallArguments values;
  for (const ExpressionPtr& argument : arguments.positional) {
    KVASIR_ASSIGN_OR_RETURN(values.positional.emplace_back(), Evaluate(*argument));
  }
  for (const auto& [name, argument] : arguments.named) {
    KVASIR_ASSIGN_OR_RETURN(Value value, Evaluate(*argument));
    values.named.emplace_back(name, std::move(value));
  }
  return values;
}

absl::StatusOr<Value> Evaluator::EvaluateCall(const Expression& expression) {
  const Expression& callee = *expression.parts[0];
  if (callee.kind == Kind::kAttribute) {
    KVASIR_ASSIGN_OR_RETURN(const Value self, Evaluate(*callee.parts[0]));
    KVASIR_ASSIGN_OR_RETURN(CallArguments arguments, EvaluateArguments(expression.arguments));
    if (Namespace* space = self.space()) {
      const Value* member = space->Find(callee.name);
      if (member != nullptr && member->function() != nullptr) {
        return CallFunction(*member->function(), std::move(arguments));
      }
    }
    if (const Undefined* undefined = self.undefined()) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", undefined->name, "' is undefined, so it has no ", callee.name));
    }
    return CallMethod(self, callee.name, arguments, &budget_);
  }
  KVASIR_ASSIGN_OR_RETURN(const Value function, Evaluate(callee));
  if (function.function() == nullptr) {
    return absl::InvalidArgumentError(
        callee.kind == Kind::kName
            ? absl::StrCat("there is no function '", callee.name, "'")
            : absl::StrCat("a ", function.TypeName(), " is called; it is no function"));
  }
  KVASIR_ASSIGN_OR_RETURN(CallArguments arguments, EvaluateArguments(expression.arguments));
  return CallFunction(*function.function(), std::move(arguments));
}

absl::StatusOr<Value> Evaluator::CallFunction(const Function& function, CallArguments arguments) {
  if (function.macro != nullptr) return CallMacro(*function.macro, std::move(arguments));
  if (function.name == "namespace") return MakeNamespace(std::move(arguments));
  if (function.name == "range") return MakeRange(arguments);
  if (function.name == "strftime_now") return FormatNow(arguments);
  if (function.name == "dict") {
    std::vector<std::pair<Value, Value>> entries;
    for (auto& [name, value] : arguments.named) entries.emplace_back(Value::Text(name), value);
    return MakeDict(std::move(entries), &budget_);
  }
  if (function.name == "raise_exception") {
    const Value* message = arguments.Find(0, "message");
    KVASIR_ASSIGN_OR_RETURN(const MarkedText text,
                            PythonText(message == nullptr ? Value() : *message, &budget_));
    raised_ = true;
    return absl::InvalidArgumentError(WithQuotedClientText(text));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the method '", function.name, "' is called without its object"));
}

absl::StatusOr<Value> Evaluator::MakeNamespace(CallArguments arguments) {
  KVASIR_RETURN_IF_ERROR(budget_.SpendBytes(sizeof(Namespace)));
  Namespace& space = namespaces_.emplace_back();
  if (!arguments.positional.empty() && arguments.positional[0].dict() != nullptr) {
    for (const auto& [key, value] : arguments.positional[0].dict()->entries) {
      if (key.text() != nullptr) space.members.emplace_back(key.text()->bytes(), value);
    }
  }
  for (auto& [name, value] : arguments.named) {
    KVASIR_RETURN_IF_ERROR(budget_.SpendBytes(sizeof(Value) + name.size()));
    space.members.emplace_back(name, std::move(value));
  }
  return Value(&space);
}

absl::StatusOr<Value> Evaluator::MakeRange(const CallArguments& arguments) {
  int64_t numbers[3] = {0, 0, 1};
  const size_t count = arguments.positional.size();
  if (count == 0 || count > 3) return absl::InvalidArgumentError("range takes one to three ints");
  for (size_t i = 0; i < count; ++i) {
    KVASIR_ASSIGN_OR_RETURN(numbers[count == 1 ? 1 : i], arguments.Integer(i, "", 0));
  }
  const auto [begin, end, step] = numbers;
  constexpr int64_t kMost = int64_t{1} << 40;
  if (step == 0 || std::abs(static_cast<double>(step)) > kMost) {
    return absl::InvalidArgumentError("range: the step is 0 or too large");
  }
  if (std::abs(static_cast<double>(begin)) > kMost || std::abs(static_cast<double>(end)) > kMost) {
    return absl::InvalidArgumentError("range: a bound is too large");
  }
  std::vector<Value> elements;
  for (int64_t i = begin; step > 0 ? i < end : i > end; i += step) {
    KVASIR_RETURN_IF_ERROR(budget_.SpendBytes(sizeof(Value)));
    elements.emplace_back(i);
  }
  return MakeList(std::move(elements), List::Kind::kList, &budget_);
}

absl::StatusOr<Value> Evaluator::FormatNow(const CallArguments& arguments) {
  KVASIR_ASSIGN_OR_RETURN(const MarkedText* format, arguments.Text(0, "format"));
  if (format->size() > 256)
    return absl::InvalidArgumentError("strftime_now: the format is too long");
  return Value(
      format->Remade(absl::FormatTime(std::string(format->bytes()), now_, absl::LocalTimeZone())));
}

}  // namespace kvasir::coordinator
