// Python's binary operators of templates: + - ~ * / // % **. Called by the evaluator. Pure
// function.
#pragma once

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "coordinator/chat/values/budget.h"
#include "coordinator/chat/values/value.h"

namespace kvasir::coordinator {

// Errors: INVALID_ARGUMENT for types that the operator does not take, a division by zero, and ints
// beyond 64 bits.
absl::StatusOr<Value> ApplyOperator(absl::string_view op, const Value& left, const Value& right,
                                    Budget* budget);

}  // namespace kvasir::coordinator
