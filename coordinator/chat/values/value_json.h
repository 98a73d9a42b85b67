// Reads what a client sends, JSON text, as values of the template language. All texts in it are the
// client's. Limits and refusals are strict: depth, values, keys of an object, ints beyond 64 bits,
// keys that are there twice. Called by ChatTemplate. Pure function.
#pragma once

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "coordinator/chat/values/value.h"

namespace kvasir::coordinator {

inline constexpr int kMaxJsonDepth = 48;
inline constexpr size_t kMaxJsonKeys = 1024;  // of one object
inline constexpr size_t kMaxJsonValues = size_t{1} << 20;

// Errors: INVALID_ARGUMENT that says what is wrong, without the text.
absl::StatusOr<Value> ReadJsonValue(absl::string_view json);

}  // namespace kvasir::coordinator
