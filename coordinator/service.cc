#include "coordinator/service.h"

#include <optional>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"

#include "coordinator/policy/limits.h"
#include "coordinator/request/parse_request.h"
#include "coordinator/server_info.h"
#include "kernels/base/status_macros.h"
#include "proto/grpc_status.h"

namespace kvasir::coordinator {
namespace {

uint64_t Random64() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, const absl::Status& status) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(proto::ToGrpcStatus(status));
  return reactor;
}

absl::Status TokenizeText(const v1::TokenizeRequest& request, const Tokenizer& tokenizer,
                          v1::TokenizeResponse& response) {
  KVASIR_RETURN_IF_ERROR(CheckLimits("", request));
  KVASIR_ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                          tokenizer.Encode(request.text(), EncodingOf(request, kMaxContextTokens)));
  response.mutable_token_ids()->Assign(ids.begin(), ids.end());
  return absl::OkStatus();
}

absl::Status DetokenizeIds(const v1::DetokenizeRequest& request, const Tokenizer& tokenizer,
                           v1::DetokenizeResponse& response) {
  KVASIR_RETURN_IF_ERROR(CheckLimits("", request));
  const std::vector<int32_t> ids(request.token_ids().begin(), request.token_ids().end());
  KVASIR_ASSIGN_OR_RETURN(
      *response.mutable_text(),
      tokenizer.Decode(
          ids, request.skip_special_tokens() ? SpecialTokens::kSkip : SpecialTokens::kKeep));
  return absl::OkStatus();
}

}  // namespace

grpc::ServerWriteReactor<v1::GenerateResponse>* GenerationService::Generate(
    grpc::CallbackServerContext* context, const v1::GenerateRequest* request) {
  const TimePoint arrival = context_.clock.Now();
  const size_t bytes = request->ByteSizeLong();
  context_.connections.OnMessage(context->peer(), bytes);
  const std::shared_ptr<GenerateStream> stream =
      GenerateStream::Create(context, context_.connections.BeginCall(context->peer()),
                             absl::Seconds(context_.config.client_timeout()));
  // The request lives until the stream is closed.
  const absl::Status taken = context_.texts.Run(
      bytes, [this, request, stream, arrival] { Begin(*request, stream, arrival); });
  if (!taken.ok()) Reject(*stream, taken);
  return stream.get();
}

void GenerationService::Begin(const v1::GenerateRequest& request,
                              const std::shared_ptr<GenerateStream>& stream, TimePoint arrival) {
  if (const absl::Status left = stream->cancelled(); !left.ok()) return stream->Close(left);
  absl::StatusOr<std::unique_ptr<Request>> accepted = Accept(request, stream, arrival);
  if (!accepted.ok()) return Reject(*stream, accepted.status());
  const SequenceId id = (*accepted)->sequence();
  context_.engine.Submit(*std::move(accepted));
  // After Submit, because the engine ignores cancellations of requests that it does not know.
  stream->set_on_cancel(
      [&engine = context_.engine, id](const absl::Status& why) { engine.Cancel(id, why); });
}

void GenerationService::Reject(GenerateStream& stream, const absl::Status& why) {
  context_.metrics.RequestRejected(why);
  stream.Close(why);
}

absl::StatusOr<std::unique_ptr<Request>> GenerationService::Accept(
    const v1::GenerateRequest& request, const std::shared_ptr<GenerateStream>& stream,
    TimePoint arrival) {
  KVASIR_ASSIGN_OR_RETURN(const GroupInfo group, context_.engine.ServedGroup());
  KVASIR_ASSIGN_OR_RETURN(ParsedRequest parsed,
                          ParseRequest(request,
                                       {.tokenizer = context_.tokenizer,
                                        .policies = context_.policies,
                                        .eos_token_ids = context_.folder.eos_token_ids,
                                        .vocab_size = group.vocab_size,
                                        .max_model_len = group.max_model_len,
                                        .trained_window = group.trained_window},
                                       Random64()));
  if (parsed.request_id.empty()) {
    parsed.request_id = absl::StrCat("req-", absl::Hex(Random64(), absl::kZeroPad16));
  }
  KVASIR_ASSIGN_OR_RETURN(auto id, ids_.Acquire(parsed.request_id));
  return Request::Create(std::move(parsed), {.tokenizer = context_.tokenizer,
                                             .metrics = context_.metrics,
                                             .id = std::move(id),
                                             .sink = stream,
                                             .sequence = context_.engine.NewSequenceId(),
                                             .arrival = arrival});
}

grpc::ServerUnaryReactor* GenerationService::AnswerText(grpc::CallbackServerContext* context,
                                                        size_t bytes,
                                                        std::function<absl::Status()> work) {
  context_.connections.OnMessage(context->peer(), bytes);
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const absl::Status taken = context_.texts.Run(bytes, [context, reactor, work = std::move(work)] {
    const absl::Status done =
        context->IsCancelled() ? absl::CancelledError("the client is gone") : work();
    reactor->Finish(proto::ToGrpcStatus(done));
  });
  if (!taken.ok()) reactor->Finish(proto::ToGrpcStatus(taken));
  return reactor;
}

grpc::ServerUnaryReactor* GenerationService::Tokenize(grpc::CallbackServerContext* context,
                                                      const v1::TokenizeRequest* request,
                                                      v1::TokenizeResponse* response) {
  return AnswerText(context, request->ByteSizeLong(), [this, request, response] {
    return TokenizeText(*request, context_.tokenizer, *response);
  });
}

grpc::ServerUnaryReactor* GenerationService::Detokenize(grpc::CallbackServerContext* context,
                                                        const v1::DetokenizeRequest* request,
                                                        v1::DetokenizeResponse* response) {
  return AnswerText(context, request->ByteSizeLong(), [this, request, response] {
    return DetokenizeIds(*request, context_.tokenizer, *response);
  });
}

grpc::ServerUnaryReactor* GenerationService::GetModelInfo(grpc::CallbackServerContext* context,
                                                          const v1::GetModelInfoRequest* request,
                                                          v1::GetModelInfoResponse* response) {
  context_.connections.OnMessage(context->peer(), request->ByteSizeLong());
  const EngineStatus engine = context_.engine.status();
  if (!engine.group.has_value()) return Answer(context, engine.serving);
  *response = ModelInfo(context_.config, context_.folder, context_.policies, *engine.group);
  return Answer(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* GenerationService::GetServerInfo(grpc::CallbackServerContext* context,
                                                           const v1::GetServerInfoRequest* request,
                                                           v1::GetServerInfoResponse* response) {
  context_.connections.OnMessage(context->peer(), request->ByteSizeLong());
  *response = ServerInfo(context_.config, context_.engine.status(), context_.metrics.totals(),
                         Between(context_.started, context_.clock.Now()));
  return Answer(context, absl::OkStatus());
}

}  // namespace kvasir::coordinator
