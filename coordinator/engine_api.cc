#include "coordinator/engine_api.h"

#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "coordinator/policy/limits.h"
#include "coordinator/request/chat_prompt.h"
#include "coordinator/request/parse_request.h"
#include "coordinator/request/request_log.h"
#include "coordinator/server_info.h"
#include "kernels/base/status_macros.h"
#include "kvstore/format/block.h"

namespace kvasir::coordinator {
namespace {

static_assert(kFileWorkBytes > TextPool::kShortBytes);

uint64_t Random64() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

// The last token of an answer needs no KV.
CallerNeeds NeedsOf(const ParsedRequest& request, const GroupInfo& group) {
  const int64_t tokens = std::ssize(request.prompt) + request.max_tokens - 1;
  const int64_t blocks = (tokens + kvstore::kBlockTokens - 1) / kvstore::kBlockTokens;
  // A resumed answer is read like a prompt.
  return {.prompt_tokens = std::ssize(request.prompt) + std::ssize(request.told),
          .max_tokens = request.max_tokens,
          .kv_bytes = blocks * BlockBytesOf(group)};
}

// Returns the request as another server is asked, which must understand it as this one did.
ElsewhereRequest Elsewhere(const v1::GenerateRequest& request, const RequestOrigin& origin,
                           const ParsedRequest& parsed) {
  ElsewhereRequest moved = {.request = request, .authorization = origin.authorization};
  moved.request.set_request_id(origin.request_id);
  moved.request.clear_add_special_tokens();
  moved.request.clear_parse_special_tokens();
  moved.request.mutable_token_ids()->mutable_ids()->Assign(parsed.prompt.begin(),
                                                           parsed.prompt.end());
  moved.request.mutable_sampling()->set_seed(parsed.sampling.seed());
  return moved;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const Caller>> EngineApi::Authenticate(
    absl::string_view authorization) {
  if (context_.keys == nullptr) return std::shared_ptr<const Caller>();
  return context_.keys->Authenticate(authorization);
}

void EngineApi::Generate(const v1::GenerateRequest& request, const RequestOrigin& origin,
                         const std::shared_ptr<ClientSink>& sink) {
  if (const absl::Status left = sink->cancelled(); !left.ok()) return Refuse(origin, *sink, left);
  // Contexts, their tokens and their policies, are this server's alone.
  const bool may_go = request.context().empty();
  std::shared_ptr<MovableAnswer> movable;
  if (context_.mover != nullptr && may_go) movable = context_.mover->MakeAnswer(sink);
  std::shared_ptr<ResponseSink> answer = sink;
  if (movable != nullptr) answer = movable;
  std::shared_ptr<AnswerReadElsewhere> read_elsewhere;
  ElsewhereRequest elsewhere;
  absl::StatusOr<std::unique_ptr<Request>> accepted =
      [&]() -> absl::StatusOr<std::unique_ptr<Request>> {
    KVASIR_ASSIGN_OR_RETURN(const GroupInfo group, context_.engine.ServedGroup());
    KVASIR_ASSIGN_OR_RETURN(ParsedRequest parsed, Parse(request, origin, group));
    if (movable != nullptr || context_.prefill != nullptr) {
      elsewhere = Elsewhere(request, origin, parsed);
    }
    if (context_.prefill != nullptr && may_go &&
        context_.prefill->Takes(request, std::ssize(parsed.prompt) + std::ssize(parsed.told))) {
      answer = read_elsewhere = std::make_shared<AnswerReadElsewhere>(std::move(answer));
      return Accept(std::move(parsed), group, origin, answer, PromptIs::kReadElsewhere);
    }
    return Accept(std::move(parsed), group, origin, answer);
  }();
  if (!accepted.ok()) return Refuse(origin, *sink, accepted.status());
  if (movable != nullptr) {
    movable->Begin(elsewhere, [&engine = context_.engine, id = (*accepted)->sequence()](
                                  const absl::Status& why) { engine.Cancel(id, why); });
  }
  const SequenceId id = (*accepted)->sequence();
  Submit(*std::move(accepted), *sink, movable);
  if (read_elsewhere != nullptr) ReadElsewhere(id, std::move(elsewhere), read_elsewhere);
}

// After Submit, so that the scheduler knows the sequence of which it is told. Without a scheduler
// the group was lost, and no sequence counts as read elsewhere any more.
void EngineApi::ReadElsewhere(SequenceId id, ElsewhereRequest request,
                              const std::shared_ptr<AnswerReadElsewhere>& answer) {
  context_.prefill->Read(std::move(request), answer,
                         {.on_sealed =
                              [this, id](int64_t sealed_tokens) {
                                context_.engine.Call([id, sealed_tokens](Scheduler* scheduler) {
                                  if (scheduler != nullptr)
                                    scheduler->ReadElsewhere(id, sealed_tokens);
                                });
                              },
                          .on_end =
                              [this, id](const absl::Status& status) {
                                const auto how = status.ok() ? Scheduler::Elsewhere::kRead
                                                             : Scheduler::Elsewhere::kFailed;
                                context_.engine.Call([this, id, how](Scheduler* scheduler) {
                                  if (scheduler != nullptr)
                                    scheduler->EndReadElsewhere(id, how, Now());
                                });
                              }});
}

void EngineApi::Read(const v1::GenerateRequest& request, const RequestOrigin& origin,
                     const std::shared_ptr<ClientSink>& sink) {
  absl::StatusOr<std::unique_ptr<Request>> accepted =
      [&]() -> absl::StatusOr<std::unique_ptr<Request>> {
    KVASIR_ASSIGN_OR_RETURN(const GroupInfo group, context_.engine.ServedGroup());
    KVASIR_ASSIGN_OR_RETURN(ParsedRequest parsed, Parse(request, origin, group));
    parsed.policy.tail_tokens = 0;
    return Accept(std::move(parsed), group, origin, sink);
  }();
  if (!accepted.ok()) return Refuse(origin, *sink, accepted.status());
  Submit(*std::move(accepted), *sink, {});
}

void EngineApi::Submit(std::unique_ptr<Request> request, ClientSink& sink,
                       const std::weak_ptr<MovableAnswer>& movable) {
  const SequenceId id = request->sequence();
  context_.engine.Submit(std::move(request));
  // After Submit, because the engine ignores cancellations of requests that it does not know.
  sink.set_on_cancel([&engine = context_.engine, id, movable](const absl::Status& why) {
    if (const std::shared_ptr<MovableAnswer> answer = movable.lock()) answer->Abandon(why);
    engine.Cancel(id, why);
  });
}

void EngineApi::Refuse(const RequestOrigin& origin, ClientSink& sink, const absl::Status& why) {
  context_.metrics.RequestRejected(why);
  LogRefusal(origin, why);
  if (context_.tracer != nullptr) {
    context_.tracer->OnRefusal(origin, why, Between(origin.arrived, Now()));
  }
  sink.Close(why);
}

std::string EngineApi::NewRequestId() {
  return absl::StrCat("req-", absl::Hex(Random64(), absl::kZeroPad16));
}

ServedModel EngineApi::ModelOf(const GroupInfo& group) const {
  return {.tokenizer = context_.tokenizer,
          .chat = context_.folder.chat,
          .policies = context_.policies,
          .eos_token_ids = context_.folder.eos_token_ids,
          .vocab_size = group.vocab_size,
          .max_model_len = group.max_model_len,
          .trained_window = group.trained_window};
}

absl::StatusOr<ParsedRequest> EngineApi::Parse(const v1::GenerateRequest& request,
                                               const RequestOrigin& origin,
                                               const GroupInfo& group) const {
  if (request.context().empty()) return ParseRequest(request, ModelOf(group), Random64());
  KVASIR_ASSIGN_OR_RETURN(const std::shared_ptr<const NamedContext> named,
                          context_.contexts.Use(origin.tenant, request.context()));
  return ParseRequest(request, ModelOf(group), Random64(),
                      {.tokens = named->tokens, .policy = &named->policy});
}

absl::StatusOr<std::vector<int32_t>> EngineApi::PromptOf(const v1::GenerateRequest& request,
                                                         int64_t before) {
  KVASIR_RETURN_IF_ERROR(CheckLimits("", request));
  KVASIR_ASSIGN_OR_RETURN(const GroupInfo group, context_.engine.ServedGroup());
  KVASIR_RETURN_IF_ERROR(context_.policies.Resolve(request.policy()).status());
  return ParsePrompt(request, ModelOf(group), /*max_tokens=*/1, before);
}

absl::StatusOr<std::unique_ptr<Request>> EngineApi::Accept(
    ParsedRequest parsed, const GroupInfo& group, const RequestOrigin& origin,
    const std::shared_ptr<ResponseSink>& sink, PromptIs prompt_is) {
  const std::string& policy = context_.policies.declared()[parsed.policy.index].name();
  const SequenceId sequence = context_.engine.NewSequenceId();
  KVASIR_ASSIGN_OR_RETURN(
      auto id, running_.Acquire({.id = origin.request_id,
                                 .sequence = sequence,
                                 .policy = policy,
                                 .prompt_tokens = static_cast<int64_t>(parsed.prompt.size()),
                                 .max_tokens = parsed.max_tokens,
                                 .arrived = origin.arrived}));
  std::unique_ptr<Caller::Use> use;
  if (origin.caller != nullptr) {
    KVASIR_ASSIGN_OR_RETURN(use, Caller::Begin(origin.caller, NeedsOf(parsed, group), Now()));
  }
  return Request::Create(std::move(parsed),
                         {.tokenizer = context_.tokenizer,
                          .metrics = context_.metrics,
                          .id = std::move(id),
                          .use = std::move(use),
                          .sink = sink,
                          .sequence = sequence,
                          .origin = origin,
                          .policy = policy,
                          .is_read_elsewhere = prompt_is == PromptIs::kReadElsewhere,
                          .tracer = context_.tracer});
}

absl::StatusOr<v1::TokenizeResponse> EngineApi::Tokenize(const v1::TokenizeRequest& request) {
  KVASIR_RETURN_IF_ERROR(CheckLimits("", request));
  if (request.has_chat() && (!request.text().empty() || request.has_add_special_tokens() ||
                             request.has_parse_special_tokens())) {
    return absl::InvalidArgumentError("chat is set beside text or its options; send one of them");
  }
  KVASIR_ASSIGN_OR_RETURN(
      const std::vector<int32_t> ids,
      request.has_chat()
          ? EncodeChat(request.chat(), context_.folder.chat, context_.tokenizer, kMaxContextTokens)
          : context_.tokenizer.Encode(request.text(), EncodingOf(request, kMaxContextTokens)));
  v1::TokenizeResponse response;
  response.mutable_token_ids()->Assign(ids.begin(), ids.end());
  return response;
}

absl::StatusOr<v1::DetokenizeResponse> EngineApi::Detokenize(const v1::DetokenizeRequest& request) {
  KVASIR_RETURN_IF_ERROR(CheckLimits("", request));
  const std::vector<int32_t> ids(request.token_ids().begin(), request.token_ids().end());
  v1::DetokenizeResponse response;
  KVASIR_ASSIGN_OR_RETURN(
      *response.mutable_text(),
      context_.tokenizer.Decode(
          ids, request.skip_special_tokens() ? SpecialTokens::kSkip : SpecialTokens::kKeep));
  return response;
}

absl::StatusOr<v1::GetModelInfoResponse> EngineApi::ModelInfo() {
  const EngineStatus engine = context_.engine.status();
  if (!engine.group.has_value()) return engine.serving;
  return coordinator::ModelInfo(context_.config, context_.folder, context_.policies, *engine.group);
}

absl::StatusOr<GenerationApi::Selections> EngineApi::Observe(const std::string& request_id) {
  KVASIR_ASSIGN_OR_RETURN(const RunningRequest request, running_.Find(request_id));
  context_.engine.Observe(request.sequence);
  if (request.selections == nullptr) return Selections{};
  return Selections{.is_observed = true,
                    .age = Between(request.selections->at, Now()),
                    .map = request.selections->map};
}

v1::GetServerInfoResponse EngineApi::ServerInfo(const v1::GetServerInfoRequest& request) {
  const TimePoint now = context_.clock.Now();
  v1::GetServerInfoResponse info =
      coordinator::ServerInfo(context_.config, context_.engine.status(), context_.metrics.totals(),
                              Between(context_.started, now));
  for (v1::RequestInfo& running : running_.List(request.max_requests(), now)) {
    *info.add_requests() = std::move(running);
  }
  return info;
}

}  // namespace kvasir::coordinator
