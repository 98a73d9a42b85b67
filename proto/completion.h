// Scripts that complete commands, flags and their accepted values in a shell, made from the same
// schema as the flags themselves. Called by `kvasir completion`. Pure functions: thread-safe.
#pragma once

#include <string>
#include <vector>

#include "google/protobuf/message.h"

namespace kvasir::proto {

struct CompletedCommand {
  std::string name;                                   // "serve"
  std::string summary;                                // a few words
  const google::protobuf::Message* config = nullptr;  // its flags; null: it has none
  std::vector<std::string> words = {};                // other arguments that it takes
};

// For `source <(kvasir completion bash)`.
std::string BashCompletion(const std::string& program, const std::vector<CompletedCommand>& all);
// For a file _kvasir in a folder of $fpath.
std::string ZshCompletion(const std::string& program, const std::vector<CompletedCommand>& all);

}  // namespace kvasir::proto
