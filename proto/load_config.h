// Configuration from its one schema, proto/kvasir/v1/config.proto: flags, a YAML file and
// environment variables are read into the message by reflection, checked against the ranges and
// choices that stand at each field, and can be explained (--help) and shown with their origin
// (--print-config). Precedence: flag > environment variable > --config file > default. Unknown
// names are errors. Of a flag that is given twice the last value counts, but where the schema says
// that it may be given once. Called by each program's main.
// Thread-compatible.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "google/protobuf/message.h"

namespace kvasir::proto {

// How a program presents itself in --help.
struct CommandInfo {
  std::string name;     // "kvasir serve"
  std::string summary;  // what it does, one paragraph
  std::string example;  // a command line to copy
};

struct ConfigSources {
  std::vector<std::string> args;  // without the program's name
  // Returns the value of an environment variable, or null.
  std::function<const char*(const char*)> getenv;
  std::vector<std::string> variables = {};  // names of all that are set
};

struct LoadedConfig {
  bool help = false;          // --help or -h was given; nothing else was checked
  bool print_config = false;  // --print-config was given
  // Flag name -> "default", "file", "environment" or "flag".
  std::map<std::string, std::string> origins;
  // For people: variables named like ours that no command reads. They may be someone else's, as
  // those that Kubernetes sets for a service of this name, and are no error.
  std::vector<std::string> warnings;
};

// Fills `config`, whose former content is forgotten. INVALID_ARGUMENT with the flag's name, what
// was found and what is accepted.
absl::StatusOr<LoadedConfig> LoadConfig(const ConfigSources& sources,
                                        google::protobuf::Message& config);

// Usage, then every flag by group with unit, range, default and reason.
std::string HelpText(const CommandInfo& info, const google::protobuf::Message& config);

// YAML that --config reads back, each line with its origin as a comment.
std::string ConfigText(const google::protobuf::Message& config, const LoadedConfig& loaded);

enum class NextStep { kRun, kExit };

// What every main does first: loads from argv[first_arg..] and the environment; prints what
// --help or --print-config ask for to standard output (then kExit).
absl::StatusOr<NextStep> Configure(const CommandInfo& info, int argc, const char* const* argv,
                                   int first_arg, google::protobuf::Message& config);

}  // namespace kvasir::proto
