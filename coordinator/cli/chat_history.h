// The conversation of `kvasir chat`: who said what, as the JSON of a ChatInput. A value.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace kvasir::coordinator {

class ChatHistory {
 public:
  // The system message, which goes first; an empty one is left out.
  void SetSystem(std::string text) { system_ = std::move(text); }
  void AddUser(absl::string_view text) { Add("user", text); }
  void AddAssistant(absl::string_view text) { Add("assistant", text); }
  // Takes back the last message.
  void RemoveLast() { messages_.pop_back(); }
  // Forgets all messages except the system's.
  void Clear() { messages_.clear(); }
  // REQUIRES: all texts are UTF-8.
  std::string Json() const;

 private:
  void Add(absl::string_view role, absl::string_view text);

  std::string system_;
  std::vector<nlohmann::ordered_json> messages_;
};

}  // namespace kvasir::coordinator
