#include "coordinator/request/call_origin.h"

#include "absl/strings/string_view.h"

namespace kvasir::coordinator {
namespace {

constexpr char kRequestIdHeader[] = "x-request-id";

absl::string_view Header(const grpc::CallbackServerContext& context, const char* name) {
  const auto found = context.client_metadata().find(name);
  if (found == context.client_metadata().end()) return {};
  return {found->second.data(), found->second.size()};
}

}  // namespace

RequestOrigin OriginOfCall(grpc::CallbackServerContext& context, const v1::GenerateRequest& request,
                           GenerationApi& api) {
  RequestOrigin origin = OriginOf(
      request,
      {.request_id = Header(context, kRequestIdHeader),
       .traceparent = Header(context, "traceparent")},
      [&api] { return api.NewRequestId(); }, api.Now());
  context.AddInitialMetadata(kRequestIdHeader, HeaderText(origin.request_id));
  return origin;
}

}  // namespace kvasir::coordinator
