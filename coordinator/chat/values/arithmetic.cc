#include "coordinator/chat/values/arithmetic.h"

#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"

#include "coordinator/chat/values/operations.h"
#include "coordinator/chat/values/python_text.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

absl::StatusOr<Value> OnIntegers(absl::string_view op, int64_t a, int64_t b) {
  int64_t result = 0;
  bool overflows = false;
  if (op == "+") {
    overflows = __builtin_add_overflow(a, b, &result);
  } else if (op == "-") {
    overflows = __builtin_sub_overflow(a, b, &result);
  } else if (op == "*") {
    overflows = __builtin_mul_overflow(a, b, &result);
  } else if (b == -1) {  // the one quotient that may be too large
    overflows = op == "//" && __builtin_sub_overflow(0, a, &result);
  } else {  // Python rounds down, C++ to zero
    const int64_t rest = a % b;
    const bool down = rest != 0 && (rest < 0) != (b < 0);
    result = op == "//" ? a / b - (down ? 1 : 0) : rest + (down ? b : 0);
  }
  if (overflows) return absl::InvalidArgumentError("an int has more than 64 bits");
  return Value(result);
}

absl::StatusOr<Value> OnReals(absl::string_view op, double a, double b) {
  if (op == "+") return Value(a + b);
  if (op == "-") return Value(a - b);
  if (op == "*") return Value(a * b);
  if (op == "/") return Value(a / b);
  if (op == "//") return Value(std::floor(a / b));
  if (op == "%") return Value(a - b * std::floor(a / b));
  return Value(std::pow(a, b));
}

absl::StatusOr<Value> Concatenate(const MarkedText& left, const MarkedText& right, Budget* budget) {
  KVASIR_RETURN_IF_ERROR(budget->SpendBytes(left.size() + right.size()));
  MarkedText text = left;
  text.Append(right);
  return Value(std::move(text));
}

absl::StatusOr<Value> Repeat(const Value& value, int64_t count, Budget* budget) {
  if (value.list() != nullptr) {
    std::vector<Value> elements;
    for (int64_t i = 0; i < count; ++i) {
      KVASIR_RETURN_IF_ERROR(budget->SpendBytes(value.list()->elements.size() * sizeof(Value)));
      elements.insert(elements.end(), value.list()->elements.begin(), value.list()->elements.end());
    }
    return MakeList(std::move(elements), value.list()->kind, budget);
  }
  MarkedText text;
  for (int64_t i = 0; i < count; ++i) {
    KVASIR_RETURN_IF_ERROR(budget->SpendBytes(value.text()->size()));
    text.Append(*value.text());
  }
  return Value(std::move(text));
}

}  // namespace

absl::StatusOr<Value> ApplyOperator(absl::string_view op, const Value& left, const Value& right,
                                    Budget* budget) {
  if (op == "~") {
    KVASIR_ASSIGN_OR_RETURN(const MarkedText a, PythonText(left, budget));
    KVASIR_ASSIGN_OR_RETURN(const MarkedText b, PythonText(right, budget));
    return Concatenate(a, b, budget);
  }
  const std::optional<double> a = left.AsNumber();
  const std::optional<double> b = right.AsNumber();
  if (a.has_value() && b.has_value()) {
    if (*b == 0 && (op == "/" || op == "//" || op == "%")) {
      return absl::InvalidArgumentError("a division by zero");
    }
    const bool integers = left.AsInteger().has_value() && right.AsInteger().has_value();
    if (integers && op == "**") {
      const double power = std::pow(*a, *b);
      if (*b >= 0 && std::abs(power) < 9e15) return Value(static_cast<int64_t>(power));
    } else if (integers && op != "/") {
      return OnIntegers(op, *left.AsInteger(), *right.AsInteger());
    }
    return OnReals(op, *a, *b);
  }
  if (op == "+" && left.text() != nullptr && right.text() != nullptr) {
    return Concatenate(*left.text(), *right.text(), budget);
  }
  if (op == "+" && left.list() != nullptr && right.list() != nullptr) {
    KVASIR_ASSIGN_OR_RETURN(std::vector<Value> elements, Elements(left, budget));
    KVASIR_ASSIGN_OR_RETURN(const std::vector<Value> more, Elements(right, budget));
    elements.insert(elements.end(), more.begin(), more.end());
    return MakeList(std::move(elements), left.list()->kind, budget);
  }
  if (op == "*") {
    for (const auto& [value, count] : {std::pair(&left, &right), std::pair(&right, &left)}) {
      if ((value->text() != nullptr || value->list() != nullptr) &&
          count->AsInteger().has_value()) {
        return Repeat(*value, *count->AsInteger(), budget);
      }
    }
  }
  const Value& wrong = left.IsUndefined() ? left : right;
  if (const Undefined* undefined = wrong.undefined()) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", undefined->name, "' is undefined; the operator ", op, " needs a value"));
  }
  return absl::InvalidArgumentError(absl::StrCat("the operator ", op, " does not take a ",
                                                 left.TypeName(), " and a ", right.TypeName()));
}

}  // namespace kvasir::coordinator
