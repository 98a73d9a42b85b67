// Configuration from its one schema, proto/kvasir/v1/config.proto. Flags, a YAML file and
// environment variables are read into the message by reflection and checked against the ranges and
// choices given at each field. They can be explained (--help) and shown with their origin
// (--print-config). Precedence: flag > environment variable > --config file > default. Unknown
// names are errors. If a flag is given twice the last value counts, unless the schema says that it
// may be given only once. Called by each program's main. Thread-compatible.
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
  std::string summary;  // what the program does, one paragraph
  std::string example;  // a command line to copy
};

struct ConfigSources {
  std::vector<std::string> args;  // without the program's name
  // Returns the value of an environment variable, or null.
  std::function<const char*(const char*)> getenv;
  std::vector<std::string> variables = {};  // names of all variables that are set
};

struct LoadedConfig {
  bool help = false;          // --help or -h was given; nothing else was checked
  bool print_config = false;  // --print-config was given
  // Flag name -> "default", "file", "environment" or "flag".
  std::map<std::string, std::string> origins;
  // Warnings for people: variables named like ours that no command reads. They are no error,
  // because they may belong to something else, like those that Kubernetes sets for a service of
  // this name.
  std::vector<std::string> warnings;
};

// Replaces the contents of `config`. INVALID_ARGUMENT with the flag's name, the value found and the
// values accepted.
absl::StatusOr<LoadedConfig> LoadConfig(const ConfigSources& sources,
                                        google::protobuf::Message& config);

// Returns usage, then every flag by group with unit, range, default and reason.
std::string HelpText(const CommandInfo& info, const google::protobuf::Message& config);

// Returns YAML that --config reads back, each line with its origin as a comment.
std::string ConfigText(const google::protobuf::Message& config, const LoadedConfig& loaded);

enum class NextStep { kRun, kExit };

// The first call of every main: loads from argv[first_arg..] and the environment. Prints the text
// of --help or --print-config to standard output if requested (then kExit).
absl::StatusOr<NextStep> Configure(const CommandInfo& info, int argc, const char* const* argv,
                                   int first_arg, google::protobuf::Message& config);

}  // namespace kvasir::proto
