#include "coordinator/service.h"

#include <memory>
#include <utility>

#include "coordinator/policy/limits.h"
#include "coordinator/request/generate_stream.h"
#include "coordinator/request/grpc_call.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {

grpc::ServerWriteReactor<v1::GenerateResponse>* GenerationService::Generate(
    grpc::CallbackServerContext* context, const v1::GenerateRequest* request) {
  const absl::StatusOr<std::shared_ptr<const Caller>> caller = CallerOf(*context, api_);
  const RequestOrigin origin = OriginOfCall(*context, *request, caller.value_or(nullptr), api_);
  const size_t bytes = request->ByteSizeLong();
  connections_.OnMessage(context->peer(), bytes);
  const std::shared_ptr<GenerateStream> stream = GenerateStream::Create(
      context, connections_.BeginCall(context->peer()), client_timeout_, AsItComes);
  if (!caller.ok()) {
    api_.Refuse(origin, *stream, caller.status());
    return stream.get();
  }
  // The request lives until the stream is closed.
  const absl::Status taken = api_.RunText(
      bytes, [this, request, origin, stream] { api_.Generate(*request, origin, stream); });
  if (!taken.ok()) api_.Refuse(origin, *stream, taken);
  return stream.get();
}

grpc::ServerUnaryReactor* GenerationService::AnswerText(grpc::CallbackServerContext* context,
                                                        size_t bytes,
                                                        std::function<absl::Status()> work) {
  connections_.OnMessage(context->peer(), bytes);
  const UnaryCall call(*context, api_);
  if (!call.known().ok()) return call.End(call.known());
  const absl::Status taken = api_.RunText(bytes, [context, call, work = std::move(work)] {
    call.End(context->IsCancelled() ? absl::CancelledError("the client is gone") : work());
  });
  return taken.ok() ? call.reactor() : call.End(taken);
}

grpc::ServerUnaryReactor* GenerationService::Tokenize(grpc::CallbackServerContext* context,
                                                      const v1::TokenizeRequest* request,
                                                      v1::TokenizeResponse* response) {
  return AnswerText(context, request->ByteSizeLong(), [this, request, response] {
    KVASIR_ASSIGN_OR_RETURN(*response, api_.Tokenize(*request));
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* GenerationService::Detokenize(grpc::CallbackServerContext* context,
                                                        const v1::DetokenizeRequest* request,
                                                        v1::DetokenizeResponse* response) {
  return AnswerText(context, request->ByteSizeLong(), [this, request, response] {
    KVASIR_ASSIGN_OR_RETURN(*response, api_.Detokenize(*request));
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* GenerationService::GetModelInfo(grpc::CallbackServerContext* context,
                                                          const v1::GetModelInfoRequest* request,
                                                          v1::GetModelInfoResponse* response) {
  connections_.OnMessage(context->peer(), request->ByteSizeLong());
  const UnaryCall call(*context, api_);
  if (!call.known().ok()) return call.End(call.known());
  absl::StatusOr<v1::GetModelInfoResponse> info = api_.ModelInfo();
  if (info.ok()) *response = *std::move(info);
  return call.End(info.status());
}

grpc::ServerUnaryReactor* GenerationService::GetServerInfo(grpc::CallbackServerContext* context,
                                                           const v1::GetServerInfoRequest* request,
                                                           v1::GetServerInfoResponse* response) {
  connections_.OnMessage(context->peer(), request->ByteSizeLong());
  const UnaryCall call(*context, api_);
  absl::Status answered = call.known();
  answered.Update(CheckLimits("", *request));
  if (answered.ok()) *response = api_.ServerInfo(*request);
  return call.End(answered);
}

}  // namespace kvasir::coordinator
