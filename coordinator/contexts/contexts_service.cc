#include "coordinator/contexts/contexts_service.h"

#include <algorithm>

#include "coordinator/request/grpc_call.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {

template <typename Request, typename Response, typename Call>
grpc::ServerUnaryReactor* ContextsService::AnswerLater(grpc::CallbackServerContext* context,
                                                       const Request& request, Response& response,
                                                       Call call) {
  const size_t bytes = request.ByteSizeLong();
  connections_.OnMessage(context->peer(), bytes);
  const UnaryCall unary(*context, api_);
  if (!unary.known().ok()) return unary.End(unary.known());
  const auto work = [context, unary, &request, &response, call] {
    if (context->IsCancelled()) {
      unary.End(absl::CancelledError("the client is gone"));
      return;
    }
    call(request, ContextCallerOf(unary.caller(), request.tenant_id()),
         [unary, &response](const absl::StatusOr<Response>& answer) {
           if (answer.ok()) response = *answer;
           unary.End(answer.status());
         });
  };
  // Records are files: never written on a thread that serves streams.
  const absl::Status taken = api_.RunText(std::max(bytes, kFileWorkBytes), work);
  return taken.ok() ? unary.reactor() : unary.End(taken);
}

template <typename Request, typename Response, typename Call>
grpc::ServerUnaryReactor* ContextsService::Answer(grpc::CallbackServerContext* context,
                                                  const Request& request, Response& response,
                                                  Call call) {
  return AnswerLater(context, request, response,
                     [call](const Request& asked, const ContextCaller& by, const auto& done) {
                       done(call(asked, by));
                     });
}

grpc::ServerUnaryReactor* ContextsService::Create(grpc::CallbackServerContext* context,
                                                  const v1::CreateContextRequest* request,
                                                  v1::Context* response) {
  return Answer(context, *request, *response, [this](const auto& asked, const ContextCaller& by) {
    return contexts_.Create(asked, by);
  });
}

grpc::ServerUnaryReactor* ContextsService::Fork(grpc::CallbackServerContext* context,
                                                const v1::ForkContextRequest* request,
                                                v1::Context* response) {
  return Answer(context, *request, *response, [this](const auto& asked, const ContextCaller& by) {
    return contexts_.Fork(asked, by);
  });
}

grpc::ServerUnaryReactor* ContextsService::Get(grpc::CallbackServerContext* context,
                                               const v1::GetContextRequest* request,
                                               v1::Context* response) {
  return Answer(context, *request, *response, [this](const auto& asked, const ContextCaller& by) {
    return contexts_.Get(asked, by);
  });
}

grpc::ServerUnaryReactor* ContextsService::List(grpc::CallbackServerContext* context,
                                                const v1::ListContextsRequest* request,
                                                v1::ListContextsResponse* response) {
  return Answer(context, *request, *response, [this](const auto& asked, const ContextCaller& by) {
    return contexts_.List(asked, by);
  });
}

grpc::ServerUnaryReactor* ContextsService::Delete(grpc::CallbackServerContext* context,
                                                  const v1::DeleteContextRequest* request,
                                                  v1::DeleteContextResponse* response) {
  return Answer(context, *request, *response,
                [this](const auto& asked,
                       const ContextCaller& by) -> absl::StatusOr<v1::DeleteContextResponse> {
                  KVASIR_RETURN_IF_ERROR(contexts_.Delete(asked, by));
                  return v1::DeleteContextResponse();
                });
}

grpc::ServerUnaryReactor* ContextsService::Pin(grpc::CallbackServerContext* context,
                                               const v1::PinContextRequest* request,
                                               v1::ContextHint* response) {
  return AnswerLater(context, *request, *response,
                     [this](const auto& asked, const ContextCaller& by, const auto& done) {
                       contexts_.Pin(asked, by, done);
                     });
}

grpc::ServerUnaryReactor* ContextsService::Unpin(grpc::CallbackServerContext* context,
                                                 const v1::UnpinContextRequest* request,
                                                 v1::ContextHint* response) {
  return AnswerLater(context, *request, *response,
                     [this](const auto& asked, const ContextCaller& by, const auto& done) {
                       contexts_.Unpin(asked, by, done);
                     });
}

grpc::ServerUnaryReactor* ContextsService::Prefetch(grpc::CallbackServerContext* context,
                                                    const v1::PrefetchContextRequest* request,
                                                    v1::ContextHint* response) {
  return AnswerLater(context, *request, *response,
                     [this](const auto& asked, const ContextCaller& by, const auto& done) {
                       contexts_.Prefetch(asked, by, done);
                     });
}

grpc::ServerUnaryReactor* ContextsService::Demote(grpc::CallbackServerContext* context,
                                                  const v1::DemoteContextRequest* request,
                                                  v1::ContextHint* response) {
  return AnswerLater(context, *request, *response,
                     [this](const auto& asked, const ContextCaller& by, const auto& done) {
                       contexts_.Demote(asked, by, done);
                     });
}

grpc::ServerUnaryReactor* ContextsService::Evict(grpc::CallbackServerContext* context,
                                                 const v1::EvictRequest* request,
                                                 v1::EvictResponse* response) {
  return AnswerLater(context, *request, *response,
                     [this](const auto& asked, const ContextCaller& by, const auto& done) {
                       contexts_.Evict(asked, by, done);
                     });
}

}  // namespace kvasir::coordinator
