// The chat template of a model: turns a conversation into the text that the model was trained on,
// as `transformers`' apply_chat_template does, and marks which parts the client wrote, so that
// special tokens in them stay text. Hides the language, a subset of Jinja, and its limits. Made by
// the server at start, called for every chat request. Immutable: thread-safe.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "coordinator/chat/parsing/syntax.h"
#include "coordinator/chat/values/budget.h"
#include "coordinator/chat/values/marked_text.h"

namespace kvasir::coordinator {

struct Conversation {
  // JSON, as in OpenAI's API: an array of objects with a role; an array of tools or empty; an
  // object of further variables or empty, whose names win over all others.
  absl::string_view messages;
  absl::string_view tools = {};
  absl::string_view variables = {};
  enum class End {
    kGenerationPrompt,      // the beginning of an answer follows
    kLastMessage,           // nothing follows
    kContinuesLastMessage,  // the text ends within the last message, which the answer continues
  };
  End end = End::kGenerationPrompt;
};

class ChatTemplate {
 public:
  // Names and texts of special tokens, e.g. ("bos_token", "<s>"), which the template may use.
  using TokenTexts = std::vector<std::pair<std::string, std::string>>;

  // Errors: INVALID_ARGUMENT with the line, for a template outside of the subset.
  static absl::StatusOr<std::unique_ptr<const ChatTemplate>> Parse(absl::string_view source,
                                                                   TokenTexts tokens);

  // `now` is the time that templates tell. Errors: INVALID_ARGUMENT for a conversation that is not
  // valid or that the template refuses, in its own words, and for one that costs more than
  // `limits`.
  absl::StatusOr<MarkedText> Render(const Conversation& conversation, absl::Time now,
                                    const RenderLimits& limits = {}) const;

 private:
  // How the template takes the content of a message: text only, or also a list of parts.
  enum class Content { kText, kTextOrParts };

  ChatTemplate(Statements statements, TokenTexts tokens)
      : statements_(std::move(statements)), tokens_(std::move(tokens)) {}

  // Returns what the template makes of a message in parts that tells.
  Content FindContent() const;

  const Statements statements_;
  const TokenTexts tokens_;
  // Where it takes text, parts that are all text are joined by line feeds before.
  Content content_ = Content::kTextOrParts;
};

}  // namespace kvasir::coordinator
