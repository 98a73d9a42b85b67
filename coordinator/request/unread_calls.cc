#include "coordinator/request/unread_calls.h"

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "grpcpp/server_context.h"

#include "coordinator/request/grpc_call.h"
#include "coordinator/request/request_log.h"
#include "proto/grpc_status.h"

namespace kvasir::coordinator {
namespace {

using grpc::experimental::InterceptionHookPoints;
using grpc::experimental::ServerRpcInfo;

class Watch final : public grpc::experimental::Interceptor {
 public:
  Watch(ServerRpcInfo& call, GenerationApi& api) : call_(call), api_(api) {}

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_MESSAGE)) {
      if (methods->GetRecvMessage() == nullptr) Refuse();
    }
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS)) {
      if (!why_.ok()) methods->ModifySendStatus(proto::ToGrpcStatus(why_));
    }
    methods->Proceed();
  }

 private:
  // A call without a key is told no more than that.
  void Refuse() {
    grpc::ServerContextBase& context = *call_.server_context();
    const absl::StatusOr<std::shared_ptr<const Caller>> caller = CallerOf(context, api_);
    why_ = caller.ok() ? absl::InvalidArgumentError(
                             absl::StrCat("the message cannot be read as the request of ",
                                          call_.method(), "; docs/api.md names its proto"))
                       : caller.status();
    LogRefusal(OriginOfCall(context, {}, caller.value_or(nullptr), api_), why_);
  }

  ServerRpcInfo& call_;
  GenerationApi& api_;
  absl::Status why_;
};

}  // namespace

grpc::experimental::Interceptor* UnreadCalls::CreateServerInterceptor(ServerRpcInfo* call) {
  // The messages of other calls are read after their service was told of them.
  const bool one_request = call->type() == ServerRpcInfo::Type::UNARY ||
                           call->type() == ServerRpcInfo::Type::SERVER_STREAMING;
  return one_request ? new Watch(*call, api_) : nullptr;
}

}  // namespace kvasir::coordinator
