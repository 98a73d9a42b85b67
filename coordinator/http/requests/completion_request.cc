#include "coordinator/http/requests/completion_request.h"

#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace kvasir::coordinator {
namespace {

using nlohmann::json;

constexpr char kPromptForms[] =
    "expected a string, a list of strings, a list of token ids, or a list of such lists";

// Returns false when the value is no prompt.
bool AddPrompt(const json& value, std::vector<v1::GenerateRequest>& prompts) {
  v1::GenerateRequest& request = prompts.emplace_back();
  if (value.is_string()) {
    request.set_text(value.get_ref<const std::string&>());
    return true;
  }
  const std::optional<std::vector<uint32_t>> ids = AsIds(value);
  if (!ids.has_value()) return false;
  request.mutable_token_ids()->mutable_ids()->Assign(ids->begin(), ids->end());
  return true;
}

void ReadPrompts(JsonFields& fields, std::vector<v1::GenerateRequest>& prompts) {
  const json* prompt = fields.Find("prompt");
  if (prompt == nullptr) return fields.Refuse("prompt", kPromptForms);
  const bool several = prompt->is_array() && !prompt->empty() && !(*prompt)[0].is_number();
  if (!several) {
    if (!AddPrompt(*prompt, prompts)) fields.Refuse("prompt", kPromptForms);
    return;
  }
  if (prompt->size() > static_cast<size_t>(kMostChoices)) {
    return fields.Refuse("prompt", absl::StrCat("expected at most ", kMostChoices, " prompts"));
  }
  for (const json& element : *prompt) {
    if (!AddPrompt(element, prompts)) return fields.Refuse("prompt", kPromptForms);
  }
}

}  // namespace

absl::StatusOr<CompletionRequest> ParseCompletion(const json& body) {
  JsonFields fields(body);
  CompletionRequest completion;
  v1::GenerateRequest shared;
  ReadGenerateFields(fields, shared);
  completion.options = ReadAnswerOptions(fields);
  completion.echo = fields.Bool("echo").value_or(false);
  if (const auto value = fields.Count("max_tokens")) {
    shared.mutable_sampling()->set_max_tokens(*value);
  }
  if (const auto value = fields.Count("logprobs")) shared.mutable_sampling()->set_logprobs(*value);
  if (!fields.String("suffix").value_or("").empty()) {
    fields.Refuse("suffix", "text is not inserted before a suffix; drop it");
  }
  if (completion.echo && shared.sampling().has_logprobs()) {
    shared.mutable_sampling()->set_prompt_logprobs(shared.sampling().logprobs());
  }
  ReadPrompts(fields, completion.prompts);
  const std::optional<bool> adds = fields.Bool("add_special_tokens");
  const std::optional<bool> parses = fields.Bool("parse_special_tokens");
  if (static_cast<int64_t>(completion.prompts.size()) * completion.options.n > kMostChoices) {
    fields.Refuse("n", absl::StrCat("prompts times n is at most ", kMostChoices));
  }
  if (!fields.status().ok()) return fields.status();
  for (v1::GenerateRequest& request : completion.prompts) {
    if (request.has_text()) {
      if (adds.has_value()) request.set_add_special_tokens(*adds);
      if (parses.has_value()) request.set_parse_special_tokens(*parses);
    }
    request.MergeFrom(shared);
  }
  return completion;
}

}  // namespace kvasir::coordinator
