#include "coordinator/http/text_calls.h"

#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "coordinator/http/answers/answer.h"
#include "coordinator/http/answers/chat_format.h"
#include "coordinator/http/answers/completion_format.h"
#include "coordinator/http/requests/chat_request.h"
#include "coordinator/http/requests/completion_request.h"
#include "coordinator/http/requests/conversation_fields.h"
#include "coordinator/http/requests/json_body.h"
#include "coordinator/http/requests/json_fields.h"
#include "coordinator/http/transport/error_reply.h"
#include "coordinator/http/transport/json_reply.h"
#include "coordinator/policy/limits.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using nlohmann::json;

constexpr char kMessages[] = "messages";

// Calls `answer` with the parsed body, on a thread that a long one may keep busy. `answer` answers
// the exchange unless it returns an error, which is answered here.
void WithBody(const HttpCallContext& context, const std::shared_ptr<Exchange>& exchange,
              std::function<absl::Status(const JsonBody& body)> answer) {
  const auto work = [&context, exchange, answer = std::move(answer)] {
    const absl::Status done = [&] {
      KVASIR_ASSIGN_OR_RETURN(const JsonBody body, ParseBody(exchange->TakeBody()));
      KVASIR_RETURN_IF_ERROR(CheckModel(context, body.object));
      return answer(body);
    }();
    if (!done.ok()) exchange->Refuse(done);
  };
  const absl::Status taken = context.api.RunText(exchange->request().body.size(), work);
  if (!taken.ok()) exchange->Refuse(taken);
}

absl::StatusOr<std::string> PromptText(GenerationApi& api, const v1::GenerateRequest& request) {
  if (request.has_text()) return request.text();
  v1::DetokenizeRequest ids;
  *ids.mutable_token_ids() = request.token_ids().ids();
  KVASIR_ASSIGN_OR_RETURN(v1::DetokenizeResponse text, api.Detokenize(ids));
  return std::move(*text.mutable_text());
}

AnswerName NameOf(const HttpCallContext& context, std::string id) {
  return {.id = std::move(id), .model = context.model, .created = absl::ToUnixSeconds(absl::Now())};
}

absl::Status Complete(const HttpCallContext& context, const std::shared_ptr<Exchange>& exchange,
                      const JsonBody& body) {
  KVASIR_ASSIGN_OR_RETURN(CompletionRequest completion, ParseCompletion(body.object));
  KVASIR_ASSIGN_OR_RETURN(const EventIds ids, ReadEventIds(exchange->request(), completion.options,
                                                           completion.prompts));
  const std::string& id = exchange->request().request_id;
  CompletionFormatSetup format = {.tokenizer = context.api.tokenizer(),
                                  .name = NameOf(context, absl::StrCat("cmpl-", id)),
                                  .n = static_cast<size_t>(completion.options.n)};
  if (completion.echo) {
    for (const v1::GenerateRequest& prompt : completion.prompts) {
      KVASIR_ASSIGN_OR_RETURN(format.echoes.emplace_back(), PromptText(context.api, prompt));
    }
  }
  Answer::Start(context.api, exchange,
                {.prompts = std::move(completion.prompts),
                 .options = completion.options,
                 .ids = ids,
                 .request_id = id,
                 .format = std::make_unique<CompletionFormat>(std::move(format)),
                 .prompt_field = "prompt"});
  return absl::OkStatus();
}

// Turns the conversation into tokens, whose number tells how long an answer may be.
absl::Status Tokenize(const HttpCallContext& context, const Exchange& exchange,
                      v1::GenerateRequest& request) {
  v1::TokenizeRequest conversation;
  *conversation.mutable_chat() = std::move(*request.mutable_chat());
  absl::StatusOr<v1::TokenizeResponse> tokens = context.api.Tokenize(conversation);
  if (!tokens.ok()) return AboutField(tokens.status(), kMessages);
  *request.mutable_token_ids()->mutable_ids() = std::move(*tokens->mutable_token_ids());
  if (request.sampling().has_max_tokens()) return absl::OkStatus();
  KVASIR_ASSIGN_OR_RETURN(const v1::GetModelInfoResponse model, context.api.ModelInfo());
  int64_t tokens_before = 0;
  if (!request.context().empty()) {
    const ContextCaller by = ContextCallerOf(exchange.caller(), request.tenant_id());
    KVASIR_ASSIGN_OR_RETURN(const std::shared_ptr<const NamedContext> named,
                            context.contexts.Find(by.tenant, request.context()));
    tokens_before = std::ssize(named->tokens);
  }
  request.mutable_sampling()->set_max_tokens(
      LongestAnswer(model, tokens_before + request.token_ids().ids_size()));
  return absl::OkStatus();
}

absl::Status Chat(const HttpCallContext& context, const std::shared_ptr<Exchange>& exchange,
                  const JsonBody& body) {
  KVASIR_ASSIGN_OR_RETURN(ChatRequest chat, ParseChat(body));
  KVASIR_ASSIGN_OR_RETURN(const EventIds ids, ReadEventIds(exchange->request(), chat.options,
                                                           absl::MakeConstSpan(&chat.request, 1)));
  KVASIR_RETURN_IF_ERROR(Tokenize(context, *exchange, chat.request));
  const std::string& id = exchange->request().request_id;
  auto format = std::make_unique<ChatFormat>(context.api.tokenizer(),
                                             NameOf(context, absl::StrCat("chatcmpl-", id)));
  Answer::Start(context.api, exchange,
                {.prompts = {std::move(chat.request)},
                 .options = chat.options,
                 .ids = ids,
                 .request_id = id,
                 .format = std::move(format),
                 .prompt_field = kMessages});
  return absl::OkStatus();
}

// Reads what is tokenized: a prompt, or a conversation.
absl::StatusOr<v1::TokenizeRequest> ParseTokenize(const JsonBody& body, JsonFields& fields) {
  v1::TokenizeRequest request;
  if (fields.Has(kMessages)) {
    if (fields.Has("prompt")) fields.Refuse("prompt", "expected either prompt or messages");
    *request.mutable_chat() = ReadConversation(body, fields);
    KVASIR_RETURN_IF_ERROR(fields.status());
    return request;
  }
  const std::optional<std::string> prompt = fields.String("prompt");
  if (!prompt.has_value()) fields.Refuse("prompt", "expected a string, or messages");
  if (const auto value = fields.Bool("add_special_tokens")) request.set_add_special_tokens(*value);
  if (const auto value = fields.Bool("parse_special_tokens")) {
    request.set_parse_special_tokens(*value);
  }
  KVASIR_RETURN_IF_ERROR(fields.status());
  request.set_text(*prompt);
  return request;
}

absl::StatusOr<json> Tokens(const HttpCallContext& context, const JsonBody& body) {
  JsonFields fields(body.object);
  const bool strings = fields.Bool("return_token_strs").value_or(false);
  KVASIR_ASSIGN_OR_RETURN(const v1::TokenizeRequest request, ParseTokenize(body, fields));
  KVASIR_ASSIGN_OR_RETURN(const v1::GetModelInfoResponse info, context.api.ModelInfo());
  KVASIR_ASSIGN_OR_RETURN(const v1::TokenizeResponse tokens, context.api.Tokenize(request));
  json answer = {{"count", tokens.token_ids_size()},
                 {"max_model_len", info.max_context_length()},
                 {"tokens", tokens.token_ids()},
                 {"token_strs", nullptr}};
  if (!strings) return answer;
  json texts = json::array();
  for (const uint32_t id : tokens.token_ids()) {
    texts.push_back(std::string(context.api.tokenizer().TokenContent(static_cast<int32_t>(id))));
  }
  answer["token_strs"] = std::move(texts);
  return answer;
}

absl::StatusOr<json> Detokenize(const HttpCallContext& context, const JsonBody& body) {
  JsonFields fields(body.object);
  if (!fields.Has("tokens")) fields.Refuse("tokens", "expected a list of token ids");
  const std::vector<uint32_t> ids = fields.Ids("tokens", static_cast<size_t>(kMaxContextTokens));
  KVASIR_RETURN_IF_ERROR(fields.status());
  v1::DetokenizeRequest request;
  request.mutable_token_ids()->Assign(ids.begin(), ids.end());
  absl::StatusOr<v1::DetokenizeResponse> text = context.api.Detokenize(request);
  if (!text.ok()) return AboutField(text.status(), "tokens");
  return json{{"prompt", text->text()}};
}

// Answers with the JSON that `call` makes of the body.
void ReplyOf(const HttpCallContext& context, const std::shared_ptr<Exchange>& exchange,
             absl::StatusOr<json> (*call)(const HttpCallContext&, const JsonBody&)) {
  WithBody(context, exchange, [&context, exchange, call](const JsonBody& body) {
    KVASIR_ASSIGN_OR_RETURN(json answer, call(context, body));
    ReplyJson(*exchange, std::move(answer));
    return absl::OkStatus();
  });
}

}  // namespace

void PostChatCompletions(const HttpCallContext& context, std::shared_ptr<Exchange> exchange) {
  WithBody(context, exchange,
           [&context, exchange](const JsonBody& body) { return Chat(context, exchange, body); });
}

void PostCompletions(const HttpCallContext& context, std::shared_ptr<Exchange> exchange) {
  WithBody(context, exchange, [&context, exchange](const JsonBody& body) {
    return Complete(context, exchange, body);
  });
}

void PostTokenize(const HttpCallContext& context, std::shared_ptr<Exchange> exchange) {
  ReplyOf(context, exchange, Tokens);
}

void PostDetokenize(const HttpCallContext& context, std::shared_ptr<Exchange> exchange) {
  ReplyOf(context, exchange, Detokenize);
}

}  // namespace kvasir::coordinator
