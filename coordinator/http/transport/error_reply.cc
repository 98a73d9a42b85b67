#include "coordinator/http/transport/error_reply.h"

#include <optional>

#include "absl/strings/cord.h"
#include "nlohmann/json.hpp"

#include "proto/grpc_status.h"

namespace kvasir::coordinator {
namespace {

constexpr char kFieldUrl[] = "kvasir.http/field";
constexpr char kAllowUrl[] = "kvasir.http/allow";
constexpr char kCodeUrl[] = "kvasir.http/code";
// Time after which a server that starts or forms its group again may be asked again.
constexpr absl::Duration kRetry = absl::Seconds(2);

const char* TypeOf(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 404:
      return "not_found_error";
    case 429:
      return "rate_limit_error";
    case 500:
    case 503:
    case 504:
      return "server_error";
    default:
      return "invalid_request_error";
  }
}

nlohmann::json Payload(const absl::Status& status, absl::string_view url) {
  const absl::optional<absl::Cord> payload = status.GetPayload(url);
  if (!payload.has_value()) return nullptr;
  return std::string(*payload);
}

}  // namespace

absl::Status AboutField(absl::Status status, absl::string_view field) {
  status.SetPayload(kFieldUrl, absl::Cord(field));
  return status;
}

absl::Status WithErrorCode(absl::Status status, absl::string_view code) {
  status.SetPayload(kCodeUrl, absl::Cord(code));
  return status;
}

absl::Status WithAllowedMethods(absl::Status status, absl::string_view allow) {
  status.SetPayload(kAllowUrl, absl::Cord(allow));
  return status;
}

int HttpStatusOf(const absl::Status& status) {
  if (status.GetPayload(kAllowUrl).has_value()) return 405;
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kUnimplemented:
      return 400;
    case absl::StatusCode::kUnauthenticated:
      return 401;
    case absl::StatusCode::kPermissionDenied:
      return 403;
    case absl::StatusCode::kNotFound:
      return 404;
    case absl::StatusCode::kAlreadyExists:
      return 409;
    case absl::StatusCode::kOutOfRange:
      return 413;
    case absl::StatusCode::kResourceExhausted:
      return proto::RetryDelay(status).has_value() ? 429 : 400;
    case absl::StatusCode::kUnavailable:
      return 503;
    case absl::StatusCode::kDeadlineExceeded:
      return 504;
    default:
      return 500;
  }
}

std::string ErrorJson(const absl::Status& status) {
  nlohmann::json code = Payload(status, kCodeUrl);
  const int http_status = HttpStatusOf(status);
  if (code.is_null()) code = http_status;
  const nlohmann::json error = {{"message", std::string(status.message())},
                                {"type", TypeOf(http_status)},
                                {"param", Payload(status, kFieldUrl)},
                                {"code", std::move(code)}};
  return nlohmann::json{{"error", error}}.dump(-1, ' ', false,
                                               nlohmann::json::error_handler_t::replace);
}

HttpReply ErrorReply(const absl::Status& status) {
  HttpReply reply = {.status = HttpStatusOf(status), .body = ErrorJson(status)};
  if (reply.status == 429 || reply.status == 503) {
    reply.retry_after = proto::RetryDelay(status).value_or(kRetry);
  }
  if (const auto allow = status.GetPayload(kAllowUrl)) reply.allow = std::string(*allow);
  return reply;
}

}  // namespace kvasir::coordinator
