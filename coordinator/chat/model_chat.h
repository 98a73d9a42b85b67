// The chat templates of a model's folder: the one that a conversation is rendered with, or the
// reason why there is none. Called by the model folder's reader, then by request parsing.
// Immutable: thread-safe.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "nlohmann/json.hpp"

#include "coordinator/chat/chat_template.h"

namespace kvasir::coordinator {

// Files of the folder that have to do with chat; nullopt for one that is not there.
struct ChatFiles {
  std::optional<nlohmann::json> tokenizer_config = {};  // tokenizer_config.json
  std::optional<std::string> jinja = {};                // chat_template.jinja
  std::optional<nlohmann::json> chat_template = {};     // chat_template.json
};

class ModelChat {
 public:
  // Without any template.
  ModelChat() = default;
  // chat_template.jinja is taken before chat_template.json, and that before tokenizer_config.json,
  // where it is a string or a list of named ones: "default", and "tool_use" for conversations with
  // tools. A template that cannot be used is told to those who send a conversation: text may still
  // be sent.
  explicit ModelChat(const ChatFiles& files);

  // Errors: INVALID_ARGUMENT, also when there is no template.
  absl::StatusOr<MarkedText> Render(const Conversation& conversation, absl::Time now) const;
  // The text of the template that serves conversations without tools; none when there is none.
  const std::optional<std::string>& source() const { return source_; }

 private:
  using Parsed = absl::StatusOr<std::unique_ptr<const ChatTemplate>>;

  Parsed default_ = absl::InvalidArgumentError(
      "the model has no chat template; send text, or put a chat_template.jinja into its folder");
  std::optional<Parsed> tool_use_;
  std::optional<std::string> source_;
};

}  // namespace kvasir::coordinator
