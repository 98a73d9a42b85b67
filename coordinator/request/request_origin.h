// Where a request comes from, as its transport knows it before anything is checked: the id that
// names it in answers and log lines, the tenant, the client's trace, the time. Made by the gRPC
// service and the HTTP front, kept with the request to its end. Values only.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

#include "coordinator/security/caller.h"
#include "coordinator/time/clock.h"
#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::coordinator {

// The caller's part of a W3C trace, in lower-case hexadecimal digits.
struct TraceContext {
  std::string trace_id;   // 32 digits, not all 0
  std::string parent_id;  // 16 digits, not all 0: the span of the caller
  bool is_sampled = false;
};

// Parses a header `traceparent`. None when it is malformed: then the trace begins here.
std::optional<TraceContext> ParseTraceparent(absl::string_view header);

struct RequestOrigin {
  std::string request_id = {};                // 1 to 128 bytes
  std::shared_ptr<const Caller> caller = {};  // null on a server without API keys
  // Its requests share cached prefixes: the caller's, or the part of it that the request names;
  // without API keys what the request names. At most 193 bytes.
  std::string tenant = {};
  std::optional<TraceContext> trace = {};
  // The header by which the caller is known, for the server that the request moves to; empty: none.
  std::string authorization = {};
  TimePoint arrived = {};
};

// Headers of a request; empty where the client sent none.
struct OriginHeaders {
  std::shared_ptr<const Caller> caller = {};  // of the header authorization
  absl::string_view authorization = {};
  absl::string_view request_id = {};   // x-request-id
  absl::string_view traceparent = {};  // W3C
};

// The id is that of the request, else the header's, else `new_id`'s. Ids and tenants that are too
// long are not kept; the first two are refused later, the header's is replaced.
RequestOrigin OriginOf(const v1::GenerateRequest& request, const OriginHeaders& headers,
                       const std::function<std::string()>& new_id, TimePoint arrived);

// Returns the id as a header's value: unchanged when it is printable ASCII, otherwise with its
// other bytes, and '%', in percent-encoding.
std::string HeaderText(absl::string_view id);

}  // namespace kvasir::coordinator
