#include "coordinator/http/server_calls.h"

#include "coordinator/http/transport/error_reply.h"
#include "coordinator/http/transport/json_reply.h"

namespace kvasir::coordinator {
namespace {

using nlohmann::json;

json ModelJson(const HttpCallContext& context, const v1::GetModelInfoResponse& info) {
  return {{"id", context.model},
          {"object", "model"},
          {"created", absl::ToUnixSeconds(context.started)},
          {"owned_by", "kvasir"},
          {"root", info.model_path()},  // where clients find the tokenizer
          {"parent", nullptr},
          {"max_model_len", info.max_context_length()},
          {"permission", json::array()}};
}

}  // namespace

void GetHealth(const HttpCallContext& context, std::shared_ptr<Exchange> exchange) {
  const absl::Status health = context.health();
  if (!health.ok()) return exchange->Reply(ErrorReply(health));
  ReplyJson(*exchange, json{{"status", "ok"}});
}

void GetVersion(const HttpCallContext& context, std::shared_ptr<Exchange> exchange) {
  ReplyJson(*exchange, json{{"version", context.api.ServerInfo({}).version()}});
}

void GetLoad(const HttpCallContext& context, std::shared_ptr<Exchange> exchange) {
  const v1::GetServerInfoResponse info = context.api.ServerInfo({});
  ReplyJson(*exchange, json{{"server_load", info.requests_running() + info.requests_waiting()},
                            {"requests_running", info.requests_running()},
                            {"requests_waiting", info.requests_waiting()},
                            {"waiting_prompt_tokens", info.waiting_prompt_tokens()}});
}

void GetTokenizerInfo(const HttpCallContext& context, std::shared_ptr<Exchange> exchange) {
  ReplyJson(*exchange, context.tokenizer_info);
}

void GetModels(const HttpCallContext& context, std::shared_ptr<Exchange> exchange) {
  const absl::StatusOr<v1::GetModelInfoResponse> info = context.api.ModelInfo();
  if (!info.ok()) return exchange->Refuse(info.status());
  ReplyJson(*exchange,
            json{{"object", "list"}, {"data", json::array({ModelJson(context, *info)})}});
}

void GetModel(const HttpCallContext& context, const std::string& id,
              std::shared_ptr<Exchange> exchange) {
  const absl::StatusOr<v1::GetModelInfoResponse> info = context.api.ModelInfo();
  if (!info.ok()) return exchange->Refuse(info.status());
  if (const absl::Status known = CheckModel(context, json{{"model", id}}); !known.ok()) {
    return exchange->Refuse(known);
  }
  ReplyJson(*exchange, ModelJson(context, *info));
}

}  // namespace kvasir::coordinator
