#include "coordinator/http/requests/chat_request.h"

#include <optional>

#include "coordinator/http/requests/conversation_fields.h"

namespace kvasir::coordinator {
namespace {

using nlohmann::json;

void ReadLength(JsonFields& fields, v1::SamplingParams& sampling) {
  const std::optional<uint32_t> older = fields.Count("max_tokens");
  const std::optional<uint32_t> newer = fields.Count("max_completion_tokens");
  if (newer.has_value() || older.has_value()) {
    sampling.set_max_tokens(newer.has_value() ? *newer : *older);
  }
}

void ReadLogprobs(JsonFields& fields, v1::SamplingParams& sampling) {
  const bool wanted = fields.Bool("logprobs").value_or(false);
  const std::optional<uint32_t> top = fields.Count("top_logprobs");
  if (wanted) {
    sampling.set_logprobs(top.value_or(0));
  } else if (top.value_or(0) > 0) {
    fields.Refuse("top_logprobs", "it needs \"logprobs\": true");
  }
}

void CheckFormat(JsonFields& fields) {
  const json* format = fields.Find("response_format");
  if (format == nullptr) return;
  if (format->is_object() && format->value("type", json()) == "text") return;
  fields.Refuse("response_format",
                "expected {\"type\": \"text\"}: answers are not constrained to a format");
}

}  // namespace

absl::StatusOr<ChatRequest> ParseChat(const JsonBody& body) {
  JsonFields fields(body.object);
  ChatRequest chat;
  ReadGenerateFields(fields, chat.request);
  chat.options = ReadAnswerOptions(fields);
  ReadLength(fields, *chat.request.mutable_sampling());
  ReadLogprobs(fields, *chat.request.mutable_sampling());
  CheckFormat(fields);
  *chat.request.mutable_chat() = ReadConversation(body, fields);
  if (!fields.status().ok()) return fields.status();
  return chat;
}

}  // namespace kvasir::coordinator
