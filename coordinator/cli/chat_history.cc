#include "coordinator/cli/chat_history.h"

namespace kvasir::coordinator {
namespace {

nlohmann::ordered_json Message(absl::string_view role, absl::string_view text) {
  return {{"role", std::string(role)}, {"content", std::string(text)}};
}

}  // namespace

void ChatHistory::Add(absl::string_view role, absl::string_view text) {
  messages_.push_back(Message(role, text));
}

std::string ChatHistory::Json() const {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  if (!system_.empty()) all.push_back(Message("system", system_));
  for (const nlohmann::ordered_json& message : messages_) all.push_back(message);
  return all.dump();
}

}  // namespace kvasir::coordinator
