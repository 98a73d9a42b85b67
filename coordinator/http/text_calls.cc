#include "coordinator/http/text_calls.h"

#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "coordinator/http/answer.h"
#include "coordinator/http/completion_format.h"
#include "coordinator/http/completion_request.h"
#include "coordinator/http/json_fields.h"
#include "coordinator/http/transport/error_reply.h"
#include "coordinator/policy/limits.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using nlohmann::json;

// Calls `answer` with the parsed body, on a thread that a long one may keep busy. `answer` answers
// the exchange unless it returns an error, which is answered here.
void WithBody(const HttpCallContext& context, const std::shared_ptr<Exchange>& exchange,
              std::function<absl::Status(const json& body)> answer) {
  const auto work = [&context, exchange, answer = std::move(answer)] {
    const absl::Status done = [&] {
      KVASIR_ASSIGN_OR_RETURN(const json body, ParseBody(exchange->TakeBody()));
      KVASIR_RETURN_IF_ERROR(CheckModel(context, body));
      return answer(body);
    }();
    if (!done.ok()) exchange->Reply(ErrorReply(done));
  };
  const absl::Status taken = context.api.RunText(exchange->request().body.size(), work);
  if (!taken.ok()) exchange->Reply(ErrorReply(taken));
}

absl::StatusOr<std::string> PromptText(GenerationApi& api, const v1::GenerateRequest& request) {
  if (request.has_text()) return request.text();
  v1::DetokenizeRequest ids;
  *ids.mutable_token_ids() = request.token_ids().ids();
  KVASIR_ASSIGN_OR_RETURN(v1::DetokenizeResponse text, api.Detokenize(ids));
  return std::move(*text.mutable_text());
}

absl::Status Complete(const HttpCallContext& context, const std::shared_ptr<Exchange>& exchange,
                      const json& body) {
  KVASIR_ASSIGN_OR_RETURN(CompletionRequest completion, ParseCompletion(body));
  std::string id = exchange->request().request_id;
  if (id.empty()) id = context.api.NewRequestId();
  CompletionFormatSetup format = {.tokenizer = context.api.tokenizer(),
                                  .id = absl::StrCat("cmpl-", id),
                                  .model = context.model,
                                  .created = absl::ToUnixSeconds(absl::Now()),
                                  .n = static_cast<size_t>(completion.options.n)};
  if (completion.echo) {
    for (const v1::GenerateRequest& prompt : completion.prompts) {
      KVASIR_ASSIGN_OR_RETURN(format.echoes.emplace_back(), PromptText(context.api, prompt));
    }
  }
  Answer::Start(context.api, exchange,
                {.prompts = std::move(completion.prompts),
                 .options = completion.options,
                 .request_id = std::move(id),
                 .format = std::make_unique<CompletionFormat>(std::move(format)),
                 .prompt_field = "prompt"});
  return absl::OkStatus();
}

absl::StatusOr<json> Tokenize(const HttpCallContext& context, const json& body) {
  JsonFields fields(body);
  v1::TokenizeRequest request;
  const std::optional<std::string> prompt = fields.String("prompt");
  if (!prompt.has_value()) fields.Refuse("prompt", "expected a string");
  if (const auto value = fields.Bool("add_special_tokens")) request.set_add_special_tokens(*value);
  if (const auto value = fields.Bool("parse_special_tokens")) {
    request.set_parse_special_tokens(*value);
  }
  const bool strings = fields.Bool("return_token_strs").value_or(false);
  KVASIR_RETURN_IF_ERROR(fields.status());
  request.set_text(*prompt);
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

absl::StatusOr<json> Detokenize(const HttpCallContext& context, const json& body) {
  JsonFields fields(body);
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
             absl::StatusOr<json> (*call)(const HttpCallContext&, const json&)) {
  WithBody(context, exchange, [&context, exchange, call](const json& body) {
    KVASIR_ASSIGN_OR_RETURN(json answer, call(context, body));
    ReplyJson(*exchange, std::move(answer));
    return absl::OkStatus();
  });
}

}  // namespace

void PostCompletions(const HttpCallContext& context, std::shared_ptr<Exchange> exchange) {
  WithBody(context, exchange,
           [&context, exchange](const json& body) { return Complete(context, exchange, body); });
}

void PostTokenize(const HttpCallContext& context, std::shared_ptr<Exchange> exchange) {
  ReplyOf(context, exchange, Tokenize);
}

void PostDetokenize(const HttpCallContext& context, std::shared_ptr<Exchange> exchange) {
  ReplyOf(context, exchange, Detokenize);
}

}  // namespace kvasir::coordinator
