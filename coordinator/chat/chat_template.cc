#include "coordinator/chat/chat_template.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

#include "coordinator/chat/parsing/template_parser.h"
#include "coordinator/chat/renderer.h"
#include "coordinator/chat/values/text_operations.h"
#include "coordinator/chat/values/value_json.h"
#include "coordinator/tokenizer/unicode/utf8.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using Entries = std::vector<std::pair<Value, Value>>;

constexpr size_t kMaxTemplateBytes = size_t{1} << 20;
// Templates write special tokens with a role inside, "<|" + role + "|>". These roles are words of
// the API and not a client's text.
constexpr absl::string_view kRoles[] = {"system", "developer", "user",    "assistant",
                                        "tool",   "function",  "ipython", "environment"};
// Put after the message that an answer continues, and searched in the text, as in `transformers`.
constexpr absl::string_view kContinuation = "CONTINUE_FINAL_MESSAGE_TAG ";

absl::StatusOr<Value> Read(absl::string_view field, absl::string_view json) {
  absl::StatusOr<Value> value = ReadJsonValue(json);
  if (value.ok()) return value;
  return absl::InvalidArgumentError(absl::StrCat(field, ": ", value.status().message()));
}

Value* Find(Entries& entries, absl::string_view name) {
  for (auto& [key, value] : entries) {
    if (key.text()->bytes() == name) return &value;
  }
  return nullptr;
}

// Reasoning has several names; templates read the first. As in `transformers`, all get its text.
void NameReasoning(Entries& message) {
  for (const absl::string_view name : {"reasoning_content", "thinking", "reasoning"}) {
    if (const Value* found = Find(message, name)) {
      const Value reasoning = *found;
      if (Value* standard = Find(message, "reasoning_content")) {
        *standard = reasoning;
      } else {
        message.emplace_back(Value::Text("reasoning_content"), reasoning);
      }
      if (Find(message, "thinking") == nullptr) {
        message.insert(message.begin(), {Value::Text("thinking"), reasoning});
      }
      return;
    }
  }
}

Value Continued(const Value& text) {
  MarkedText continued = *text.text();
  continued.Append(kContinuation, MarkedText::Source::kClient);
  return Value(std::move(continued));
}

// Puts the tag after the text of the message, or after its last part of text.
absl::Status TagForContinuation(Entries& message) {
  Value* content = Find(message, "content");
  if (content != nullptr && content->text() != nullptr) {
    *content = Continued(*content);
    return absl::OkStatus();
  }
  if (content != nullptr && content->list() != nullptr) {
    std::vector<Value> parts = content->list()->elements;
    for (auto part = parts.rbegin(); part != parts.rend(); ++part) {
      if (part->dict() == nullptr) continue;
      Entries entries = part->dict()->entries;
      Value* text = Find(entries, "text");
      if (text == nullptr || text->text() == nullptr) continue;
      *text = Continued(*text);
      *part = Value(Dict{.entries = std::move(entries)});
      *content = Value(List{.elements = std::move(parts)});
      return absl::OkStatus();
    }
  }
  return absl::InvalidArgumentError(
      "the last message has no text in its content that an answer could continue");
}

// Returns the text of a part {"type": "text", "text": ...}; null for another.
const MarkedText* TextOfPart(const Value& part) {
  if (part.dict() == nullptr) return nullptr;
  Entries entries = part.dict()->entries;
  const Value* type = Find(entries, "type");
  const Value* text = Find(entries, "text");
  const bool is_text = type != nullptr && type->text() != nullptr &&
                       type->text()->bytes() == "text" && text != nullptr;
  return is_text ? text->text() : nullptr;
}

// Joins the parts of the message's content, if it has some and all are text.
void JoinParts(Entries& message) {
  Value* content = Find(message, "content");
  if (content == nullptr || content->list() == nullptr) return;
  if (content->list()->elements.empty()) return;
  MarkedText joined;
  bool first = true;
  for (const Value& part : content->list()->elements) {
    const MarkedText* text = TextOfPart(part);
    if (text == nullptr) return;
    if (!std::exchange(first, false)) joined.Append("\n", MarkedText::Source::kClient);
    joined.Append(*text);
  }
  *content = Value(std::move(joined));
}

// Returns the message as templates expect it: without null members, with the names of reasoning.
absl::StatusOr<Value> Prepared(const Value& message, size_t index, bool continues, bool joins) {
  const std::string where = absl::StrCat("messages[", index, "]");
  if (message.dict() == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, " is a ", message.TypeName(), "; it must be an object"));
  }
  Entries entries;
  for (const auto& entry : message.dict()->entries) {
    if (!entry.second.IsNone()) entries.push_back(entry);
  }
  Value* role = Find(entries, "role");
  if (role == nullptr || role->text() == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(where, " has no role, which must be a string"));
  }
  const absl::string_view name = role->text()->bytes();
  if (std::find(std::begin(kRoles), std::end(kRoles), name) != std::end(kRoles)) {
    *role = Value::Text(std::string(name));
  }
  NameReasoning(entries);
  if (joins) JoinParts(entries);
  if (continues) KVASIR_RETURN_IF_ERROR(TagForContinuation(entries));
  return Value(Dict{.entries = std::move(entries)});
}

absl::StatusOr<Value> ReadMessages(absl::string_view json, bool continues, bool joins) {
  KVASIR_ASSIGN_OR_RETURN(const Value value, Read("messages", json));
  if (value.list() == nullptr || value.list()->elements.empty()) {
    return absl::InvalidArgumentError("messages is not an array with at least one message");
  }
  const std::vector<Value>& sent = value.list()->elements;
  std::vector<Value> messages;
  for (size_t i = 0; i < sent.size(); ++i) {
    KVASIR_ASSIGN_OR_RETURN(messages.emplace_back(),
                            Prepared(sent[i], i, continues && i + 1 == sent.size(), joins));
  }
  return Value(List{.elements = std::move(messages)});
}

// Cuts the text where the last message ends.
absl::StatusOr<MarkedText> CutAtContinuation(MarkedText text) {
  const absl::string_view tag = kContinuation.substr(0, kContinuation.size() - 1);
  const size_t found = text.bytes().rfind(tag);
  if (found == absl::string_view::npos) {
    return absl::InvalidArgumentError(
        "the chat template leaves out the end of the last message, so no answer can continue it");
  }
  const bool whole = text.bytes().substr(found, kContinuation.size()) == kContinuation;
  text.Truncate(found);
  return whole ? text : Strip(text, std::nullopt, Side::kRight);
}

}  // namespace

absl::StatusOr<std::unique_ptr<const ChatTemplate>> ChatTemplate::Parse(absl::string_view source,
                                                                        TokenTexts tokens) {
  if (source.size() > kMaxTemplateBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("it has ", source.size(), " bytes; the limit is ", kMaxTemplateBytes));
  }
  if (FindInvalidUtf8(source).has_value()) {
    return absl::InvalidArgumentError("it is not UTF-8");
  }
  KVASIR_ASSIGN_OR_RETURN(Statements statements, ParseTemplate(source));
  std::unique_ptr<ChatTemplate> parsed(new ChatTemplate(std::move(statements), std::move(tokens)));
  parsed->content_ = parsed->FindContent();
  return std::unique_ptr<const ChatTemplate>(std::move(parsed));
}

ChatTemplate::Content ChatTemplate::FindContent() const {
  constexpr absl::string_view kText = "KVASIR_PART";
  const std::string messages = absl::StrCat(
      R"([{"role": "user", "content": [{"type": "text", "text": ")", kText, R"("}]}])");
  const absl::StatusOr<MarkedText> text = Render({.messages = messages}, absl::UnixEpoch());
  if (!text.ok()) return Content::kText;
  // A template that expects text writes the list as Python or JSON does.
  const absl::string_view bytes = text->bytes();
  const bool wrote_list =
      absl::StrContains(bytes, "'type'") || absl::StrContains(bytes, "\"type\"");
  return absl::StrContains(bytes, kText) && !wrote_list ? Content::kTextOrParts : Content::kText;
}

absl::StatusOr<MarkedText> ChatTemplate::Render(const Conversation& conversation, absl::Time now,
                                                const RenderLimits& limits) const {
  const bool continues = conversation.end == Conversation::End::kContinuesLastMessage;
  std::vector<std::pair<std::string, Value>> variables;
  for (const auto& [name, text] : tokens_) variables.emplace_back(name, Value::Text(text));
  KVASIR_ASSIGN_OR_RETURN(
      Value messages, ReadMessages(conversation.messages, continues, content_ == Content::kText));
  variables.emplace_back("messages", std::move(messages));
  Value tools;
  if (!conversation.tools.empty()) {
    KVASIR_ASSIGN_OR_RETURN(tools, Read("tools", conversation.tools));
    if (tools.list() == nullptr) return absl::InvalidArgumentError("tools is not an array");
  }
  variables.emplace_back("tools", std::move(tools));
  variables.emplace_back("documents", Value());
  variables.emplace_back("add_generation_prompt",
                         conversation.end == Conversation::End::kGenerationPrompt);
  if (!conversation.variables.empty()) {
    KVASIR_ASSIGN_OR_RETURN(const Value more, Read("template_kwargs", conversation.variables));
    if (more.dict() == nullptr) {
      return absl::InvalidArgumentError("template_kwargs is not an object");
    }
    for (const auto& [name, value] : more.dict()->entries) {
      variables.emplace_back(name.text()->bytes(), value);
    }
  }
  Budget budget(limits, conversation.messages.size() + conversation.tools.size() +
                            conversation.variables.size());
  KVASIR_ASSIGN_OR_RETURN(MarkedText text,
                          RenderStatements(statements_, std::move(variables), now, &budget));
  return continues ? CutAtContinuation(std::move(text)) : std::move(text);
}

}  // namespace kvasir::coordinator
