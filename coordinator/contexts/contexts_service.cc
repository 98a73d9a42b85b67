#include "coordinator/contexts/contexts_service.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "coordinator/policy/limits.h"
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

// The right to transfer is taken before a thread is, so that at most one thread waits for a client,
// and given back before the client hears of the end, and may begin the next one.
grpc::ServerWriteReactor<v1::ContextPart>* ContextsService::Export(
    grpc::CallbackServerContext* context, const v1::ExportContextRequest* request) {
  connections_.OnMessage(context->peer(), request->ByteSizeLong());
  const std::shared_ptr<ExportStream> stream = ExportStream::Create(*context, client_timeout_);
  const auto begin = [&]() -> absl::Status {
    KVASIR_ASSIGN_OR_RETURN(const auto caller, CallerOf(*context, api_));
    KVASIR_ASSIGN_OR_RETURN(auto transfer, contexts_.BeginTransfer());
    return api_.RunText(
        kFileWorkBytes, [this, request, stream, caller, transfer = std::move(transfer)]() mutable {
          const absl::Status sent =
              contexts_.Export(*transfer, *request, ContextCallerOf(caller, request->tenant_id()),
                               [&](const v1::ContextPart& part) { return stream->Write(part); });
          transfer.reset();
          stream->End(sent);
        });
  };
  if (const absl::Status begun = begin(); !begun.ok()) stream->End(begun);
  return stream.get();
}

grpc::ServerReadReactor<v1::ImportContextRequest>* ContextsService::Import(
    grpc::CallbackServerContext* context, v1::Context* response) {
  const std::shared_ptr<ImportStream> stream = ImportStream::Create(*context, client_timeout_);
  const auto begin = [&]() -> absl::Status {
    KVASIR_ASSIGN_OR_RETURN(const auto caller, CallerOf(*context, api_));
    KVASIR_ASSIGN_OR_RETURN(auto transfer, contexts_.BeginTransfer());
    return api_.RunText(kFileWorkBytes, [this, context, response, stream, caller,
                                         transfer = std::move(transfer)]() mutable {
      const absl::StatusOr<v1::Context> made = Receive(*transfer, *context, caller, *stream);
      transfer.reset();
      if (made.ok()) *response = *made;
      stream->End(made.status());
    });
  };
  if (const absl::Status begun = begin(); !begun.ok()) stream->End(begun);
  return stream.get();
}

absl::StatusOr<v1::Context> ContextsService::Receive(const Contexts::Transfer& transfer,
                                                     const grpc::CallbackServerContext& context,
                                                     std::shared_ptr<const Caller> caller,
                                                     ImportStream& stream) {
  std::optional<v1::ImportContextRequest> message = stream.Read();
  if (!message.has_value()) return absl::InvalidArgumentError("there is no part");
  KVASIR_RETURN_IF_ERROR(CheckLimits("", *message));
  const std::string name = message->name();
  const ContextCaller by = ContextCallerOf(std::move(caller), message->tenant_id());
  const auto read = [&]() -> absl::StatusOr<std::optional<v1::ContextPart>> {
    if (!message.has_value()) message = stream.Read();
    if (!message.has_value()) {
      // A stream that broke ends like one that is whole.
      if (context.IsCancelled()) return absl::CancelledError("the client is gone");
      return std::optional<v1::ContextPart>();
    }
    connections_.OnMessage(context.peer(), message->ByteSizeLong());
    std::optional<v1::ContextPart> part = std::move(*message->mutable_part());
    message.reset();
    return part;
  };
  return contexts_.Import(transfer, name, by, read);
}

}  // namespace kvasir::coordinator
