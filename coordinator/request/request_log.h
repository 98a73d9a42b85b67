// The log line of a request at its end, and that of a refusal: who asked, what it cost, how it
// ended. Prompts and answers are never part of it. Called by requests and the API. Thread-safe.
#pragma once

#include "absl/status/status.h"
#include "absl/time/time.h"

#include "coordinator/request/accepted_request.h"
#include "coordinator/request/request_origin.h"
#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::coordinator {

// `summary` is what is known of the request; that of a request which has ended before it was
// admitted is empty.
void LogRequestEnd(const AcceptedRequest& request, const absl::Status& status,
                   const v1::Finish& summary, absl::Duration total);

// The reason is that of `why` to its first quotation mark: quoted is what the client sent.
void LogRefusal(const RequestOrigin& origin, const absl::Status& why);

}  // namespace kvasir::coordinator
