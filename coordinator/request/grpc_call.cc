#include "coordinator/request/grpc_call.h"

#include <utility>

#include "absl/strings/string_view.h"

#include "coordinator/request/request_log.h"
#include "proto/grpc_status.h"

namespace kvasir::coordinator {
namespace {

constexpr char kRequestIdHeader[] = "x-request-id";

absl::string_view Header(const grpc::ServerContextBase& context, const char* name) {
  const auto found = context.client_metadata().find(name);
  if (found == context.client_metadata().end()) return {};
  return {found->second.data(), found->second.size()};
}

}  // namespace

absl::StatusOr<std::shared_ptr<const Caller>> CallerOf(const grpc::ServerContextBase& context,
                                                       GenerationApi& api) {
  return api.Authenticate(Header(context, "authorization"));
}

RequestOrigin OriginOfCall(grpc::ServerContextBase& context, const v1::GenerateRequest& request,
                           std::shared_ptr<const Caller> caller, GenerationApi& api) {
  RequestOrigin origin = OriginOf(
      request,
      {.caller = std::move(caller),
       .authorization = Header(context, "authorization"),
       .request_id = Header(context, kRequestIdHeader),
       .traceparent = Header(context, "traceparent")},
      [&api] { return api.NewRequestId(); }, api.Now());
  context.AddInitialMetadata(kRequestIdHeader, HeaderText(origin.request_id));
  return origin;
}

UnaryCall::UnaryCall(grpc::CallbackServerContext& context, GenerationApi& api)
    : reactor_(context.DefaultReactor()) {
  const absl::StatusOr<std::shared_ptr<const Caller>> caller = CallerOf(context, api);
  known_ = caller.status();
  origin_ = OriginOfCall(context, {}, caller.value_or(nullptr), api);
}

grpc::ServerUnaryReactor* UnaryCall::End(const absl::Status& status) const {
  if (!status.ok()) LogRefusal(origin_, status);
  reactor_->Finish(proto::ToGrpcStatus(status));
  return reactor_;
}

}  // namespace kvasir::coordinator
