#include "coordinator/vllm/vllm_service.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"

#include "coordinator/request/grpc_call.h"
#include "coordinator/vllm/vllm_answer.h"
#include "coordinator/vllm/vllm_request.h"
#include "kvstore/format/block.h"
#include "proto/finish_numbers.h"

namespace kvasir::coordinator {
namespace {

namespace engine = ::vllm::grpc::engine;

}  // namespace

grpc::ServerWriteReactor<engine::GenerateResponse>* VllmService::Generate(
    grpc::CallbackServerContext* context, const engine::GenerateRequest* request) {
  v1::GenerateRequest named;
  named.set_request_id(request->request_id());
  const absl::StatusOr<std::shared_ptr<const Caller>> caller = CallerOf(*context, api_);
  const RequestOrigin origin = OriginOfCall(*context, named, caller.value_or(nullptr), api_);
  received_at_ns_ = absl::GetCurrentTimeNanos();
  const size_t bytes = request->ByteSizeLong();
  connections_.OnMessage(context->peer(), bytes);
  const auto answer = std::make_shared<VllmAnswer>(request->stream() ? VllmAnswer::Form::kChunks
                                                                     : VllmAnswer::Form::kWhole);
  const std::shared_ptr<Stream> stream = Stream::Create(
      context, connections_.BeginCall(context->peer()), client_timeout_,
      [answer](const v1::GenerateResponse& response) { return answer->Take(response); });
  if (!caller.ok()) {
    api_.Refuse(origin, *stream, caller.status());
    return stream.get();
  }
  // Gateways take a call for accepted when its headers come.
  stream->StartSendInitialMetadata();
  // The request lives until the stream is closed.
  const absl::Status taken =
      api_.RunText(bytes, [this, request, origin, stream] { Begin(*request, origin, stream); });
  if (!taken.ok()) api_.Refuse(origin, *stream, taken);
  return stream.get();
}

void VllmService::Begin(const engine::GenerateRequest& request, const RequestOrigin& origin,
                        const std::shared_ptr<Stream>& stream) {
  const absl::StatusOr<v1::GenerateRequest> ours = FromVllm(request, api_);
  if (!ours.ok()) return api_.Refuse(origin, *stream, ours.status());
  Remember(origin.request_id, stream);
  api_.Generate(*ours, origin, stream);
}

void VllmService::Remember(const std::string& id, const std::shared_ptr<Stream>& stream) {
  kernels::MutexLock lock(mu_);
  if (streams_.size() >= sweep_at_) {
    absl::erase_if(streams_, [](const auto& entry) { return entry.second.expired(); });
    sweep_at_ = std::max<size_t>(64, 2 * streams_.size());
  }
  std::weak_ptr<Stream>& known = streams_[id];
  if (known.expired()) known = stream;
}

grpc::ServerUnaryReactor* VllmService::Embed(grpc::CallbackServerContext* context,
                                             const engine::EmbedRequest* request,
                                             engine::EmbedResponse*) {
  connections_.OnMessage(context->peer(), request->ByteSizeLong());
  const UnaryCall call(*context, api_);
  return call.End(
      call.known().ok()
          ? absl::UnimplementedError("Embed: this server generates text and computes no embeddings")
          : call.known());
}

grpc::ServerUnaryReactor* VllmService::HealthCheck(grpc::CallbackServerContext* context,
                                                   const engine::HealthCheckRequest* request,
                                                   engine::HealthCheckResponse* response) {
  connections_.OnMessage(context->peer(), request->ByteSizeLong());
  const UnaryCall call(*context, api_);  // probes need no key
  const v1::GetServerInfoResponse info = api_.ServerInfo({});
  response->set_healthy(info.state() == v1::SERVER_STATE_SERVING);
  response->set_message(info.state_reason());
  return call.End(absl::OkStatus());
}

grpc::ServerUnaryReactor* VllmService::Abort(grpc::CallbackServerContext* context,
                                             const engine::AbortRequest* request,
                                             engine::AbortResponse*) {
  connections_.OnMessage(context->peer(), request->ByteSizeLong());
  const UnaryCall call(*context, api_);
  if (!call.known().ok()) return call.End(call.known());
  std::vector<std::shared_ptr<Stream>> aborted;
  {
    kernels::MutexLock lock(mu_);
    for (const std::string& id : request->request_ids()) {
      const auto it = streams_.find(id);
      if (it == streams_.end()) continue;
      if (std::shared_ptr<Stream> stream = it->second.lock()) aborted.push_back(std::move(stream));
      streams_.erase(it);
    }
  }
  for (const std::shared_ptr<Stream>& stream : aborted) {
    stream->Abort(absl::CancelledError("the request was ended by Abort"));
  }
  return call.End(absl::OkStatus());
}

grpc::ServerUnaryReactor* VllmService::GetModelInfo(grpc::CallbackServerContext* context,
                                                    const engine::GetModelInfoRequest* request,
                                                    engine::GetModelInfoResponse* response) {
  connections_.OnMessage(context->peer(), request->ByteSizeLong());
  const UnaryCall call(*context, api_);
  if (!call.known().ok()) return call.End(call.known());
  const absl::StatusOr<v1::GetModelInfoResponse> info = api_.ModelInfo();
  if (!info.ok()) return call.End(info.status());
  response->set_model_path(info->model_path());
  response->set_is_generation(true);
  response->set_max_context_length(info->max_context_length());
  response->set_vocab_size(info->vocab_size());
  response->set_served_model_name(info->served_model_name());
  response->set_tokenizer_path(info->model_path());
  response->set_model_type(info->model_type());
  *response->mutable_architectures() = info->architectures();
  for (const uint32_t id : info->eos_token_ids()) {
    response->add_eos_token_ids(static_cast<int32_t>(id));
  }
  response->set_max_req_input_len(static_cast<int32_t>(info->max_context_length()) - 1);
  return call.End(absl::OkStatus());
}

grpc::ServerUnaryReactor* VllmService::GetServerInfo(grpc::CallbackServerContext* context,
                                                     const engine::GetServerInfoRequest* request,
                                                     engine::GetServerInfoResponse* response) {
  connections_.OnMessage(context->peer(), request->ByteSizeLong());
  const UnaryCall call(*context, api_);
  if (!call.known().ok()) return call.End(call.known());
  const v1::GetServerInfoResponse info = api_.ServerInfo({});
  response->set_active_requests(info.requests_running() + info.requests_waiting());
  response->set_is_paused(info.state() == v1::SERVER_STATE_DRAINING);
  response->set_last_receive_timestamp(1e-9 * static_cast<double>(received_at_ns_.load()));
  response->set_uptime_seconds(proto::ToSeconds(info.uptime()));
  response->set_server_type("vllm-grpc");
  response->set_data_parallel_size(1);
  response->set_block_size(static_cast<int32_t>(kvstore::kBlockTokens));
  response->set_max_num_seqs(static_cast<int32_t>(info.max_num_seqs()));
  return call.End(absl::OkStatus());
}

}  // namespace kvasir::coordinator
