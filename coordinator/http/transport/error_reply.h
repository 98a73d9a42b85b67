// Errors as HTTP tells them, in OpenAI's form: {"error": {message, type, param, code}}. Pure
// functions: thread-safe.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "coordinator/http/transport/exchange.h"

namespace kvasir::coordinator {

// Returns the same error about a field of the request's body, which clients find as "param".
absl::Status AboutField(absl::Status status, absl::string_view field);
// Returns the same error with a code for programs, e.g. "model_not_found".
absl::Status WithErrorCode(absl::Status status, absl::string_view code);

// Returns the same error, of a path that is served for other methods: `allow` lists them.
absl::Status WithAllowedMethods(absl::Status status, absl::string_view allow);

// Returns the HTTP status of an error: 405 with allowed methods, else 400 INVALID_ARGUMENT,
// UNIMPLEMENTED, and RESOURCE_EXHAUSTED without a time to try again; 401 UNAUTHENTICATED; 403
// PERMISSION_DENIED; 404 NOT_FOUND; 409 ALREADY_EXISTS; 413 OUT_OF_RANGE; 429 RESOURCE_EXHAUSTED;
// 503 UNAVAILABLE; 504 DEADLINE_EXCEEDED; 500 all others.
int HttpStatusOf(const absl::Status& status);

// Returns {"error": ...}.
std::string ErrorJson(const absl::Status& status);
// 405 says which methods are allowed, 429 and 503 say when to try again.
HttpReply ErrorReply(const absl::Status& status);

}  // namespace kvasir::coordinator
