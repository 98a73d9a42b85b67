#include "coordinator/http/requests/conversation_fields.h"

#include <string>

#include "absl/strings/str_cat.h"

#include "coordinator/http/transport/error_reply.h"
#include "coordinator/tokenizer/unicode/utf8.h"

namespace kvasir::coordinator {
namespace {

using nlohmann::json;

// Images and sounds are named with their place, before a template makes something else of them.
absl::Status CheckContent(const json& content, size_t message) {
  if (!content.is_array()) return absl::OkStatus();
  for (size_t part = 0; part < content.size(); ++part) {
    if (!content[part].is_object()) continue;
    const json type = content[part].value("type", json("text"));
    if (type == "text" || type == "refusal") continue;
    return AboutField(
        absl::InvalidArgumentError(absl::StrCat(
            "messages[", message, "].content[", part, "] has type ",
            type.is_string()
                ? absl::StrCat("\"", ForMessage(type.get_ref<const std::string&>()), "\"")
                : type.type_name(),
            "; the model reads text: send parts of type \"text\"")),
        "messages");
  }
  return absl::OkStatus();
}

void ReadMessages(const JsonBody& body, JsonFields& fields, v1::ChatInput& chat) {
  const json* messages = fields.Find("messages");
  if (messages == nullptr || !messages->is_array() || messages->empty()) {
    return fields.Refuse("messages", "expected a list with at least one message");
  }
  for (size_t i = 0; i < messages->size(); ++i) {
    const json& message = (*messages)[i];
    if (!message.is_object() || !message.contains("content")) continue;
    fields.Keep(CheckContent(message["content"], i));
  }
  chat.set_messages(std::string(body.MemberText("messages")));
}

void ReadTools(const JsonBody& body, JsonFields& fields, v1::ChatInput& chat) {
  if (fields.Has("functions")) fields.Refuse("functions", "expected none: send tools instead");
  const json* tools = fields.Find("tools");
  if (tools != nullptr && !tools->is_array()) return fields.Refuse("tools", "expected a list");
  const json* choice = fields.Find("tool_choice");
  const bool none = choice != nullptr && *choice == "none";
  if (choice != nullptr && !none && *choice != "auto") {
    return fields.Refuse("tool_choice",
                         "expected \"auto\" or \"none\": answers are not constrained to a tool");
  }
  if (tools != nullptr && !tools->empty() && !none) {
    chat.set_tools(std::string(body.MemberText("tools")));
  }
}

}  // namespace

v1::ChatInput ReadConversation(const JsonBody& body, JsonFields& fields) {
  v1::ChatInput chat;
  ReadMessages(body, fields, chat);
  ReadTools(body, fields, chat);
  if (const json* variables = fields.Find("chat_template_kwargs"); variables != nullptr) {
    if (!variables->is_object()) fields.Refuse("chat_template_kwargs", "expected an object");
    chat.set_template_kwargs(std::string(body.MemberText("chat_template_kwargs")));
  }
  const bool continues = fields.Bool("continue_final_message").value_or(false);
  chat.set_continue_final_message(continues);
  // Clients that continue a message often send the default of the other field too.
  if (const auto adds = fields.Bool("add_generation_prompt"); adds.has_value() && !continues) {
    chat.set_add_generation_prompt(*adds);
  }
  return chat;
}

}  // namespace kvasir::coordinator
