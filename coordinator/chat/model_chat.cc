#include "coordinator/chat/model_chat.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using nlohmann::json;

constexpr char kKey[] = "chat_template";

// Returns the special tokens of tokenizer_config.json, each a string or an object with its content.
ChatTemplate::TokenTexts TokenTexts(const std::optional<json>& config) {
  ChatTemplate::TokenTexts texts;
  if (!config.has_value()) return texts;
  for (const auto& [name, value] : config->items()) {
    if (!absl::EndsWith(name, "_token")) continue;
    const json& text = value.is_object() ? value.value("content", json()) : value;
    if (text.is_string()) texts.emplace_back(name, text.get<std::string>());
  }
  return texts;
}

absl::StatusOr<std::unique_ptr<const ChatTemplate>> ParseNamed(
    const std::string& file, const std::string& source, const ChatTemplate::TokenTexts& tokens) {
  auto parsed = ChatTemplate::Parse(source, tokens);
  if (parsed.ok()) return parsed;
  return absl::InvalidArgumentError(absl::StrCat("the model's chat template in ", file,
                                                 " cannot be used: ", parsed.status().message()));
}

// Returns the template of this name in a list of them; null when there is none.
const std::string* FindNamed(const json& list, absl::string_view name) {
  for (const json& element : list) {
    if (!element.is_object() || element.value("name", json()) != std::string(name)) continue;
    const auto source = element.find("template");
    if (source != element.end()) return source->get_ptr<const std::string*>();
  }
  return nullptr;
}

}  // namespace

ModelChat::ModelChat(const ChatFiles& files) {
  const ChatTemplate::TokenTexts tokens = TokenTexts(files.tokenizer_config);
  const auto serve = [&](const std::string& file, const std::string& source) {
    default_ = ParseNamed(file, source, tokens);
    source_ = source;
  };
  if (files.jinja.has_value()) {
    serve("chat_template.jinja", *files.jinja);
    return;
  }
  for (const auto& [file, document] :
       {std::pair("chat_template.json", &files.chat_template),
        std::pair("tokenizer_config.json", &files.tokenizer_config)}) {
    if (!document->has_value() || !(*document)->contains(kKey)) continue;
    const json& value = (**document)[kKey];
    if (const auto* source = value.get_ptr<const std::string*>()) {
      serve(file, *source);
      return;
    }
    if (const std::string* source = FindNamed(value, "default")) serve(file, *source);
    if (const std::string* source = FindNamed(value, "tool_use")) {
      tool_use_ = ParseNamed(file, *source, tokens);
    }
    return;
  }
}

absl::StatusOr<MarkedText> ModelChat::Render(const Conversation& conversation,
                                             absl::Time now) const {
  const Parsed& parsed =
      tool_use_.has_value() && !conversation.tools.empty() ? *tool_use_ : default_;
  if (!parsed.ok()) return parsed.status();
  return (*parsed)->Render(conversation, now);
}

}  // namespace kvasir::coordinator
