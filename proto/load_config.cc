#include "proto/load_config.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <unistd.h>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "google/protobuf/descriptor.h"
#include "yaml-cpp/yaml.h"

#include "kernels/base/status_macros.h"
#include "proto/config_flags.h"
#include "proto/kvasir/v1/config.pb.h"
#include "proto/text_file.h"

namespace kvasir::proto {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::Message;

// Whether some command of this program has a flag with this variable.
bool IsVariable(const google::protobuf::FileDescriptor& schema, absl::string_view variable) {
  for (int i = 0; i < schema.message_type_count(); ++i) {
    const Descriptor& message = *schema.message_type(i);
    for (int j = 0; j < message.field_count(); ++j) {
      if (VariableName(*message.field(j)) == variable) return true;
    }
  }
  return false;
}

std::vector<std::string> UnreadVariables(const ConfigSources& sources, const Message& config) {
  std::vector<std::string> warnings;
  for (const std::string& name : sources.variables) {
    if (name.rfind("KVASIR_", 0) != 0) continue;
    if (IsVariable(*config.GetDescriptor()->file(), name)) continue;
    warnings.push_back(absl::StrCat("the environment has ", name,
                                    ", which is no flag of any command and is not read; --help "
                                    "lists the flags"));
  }
  return warnings;
}

// Returns the value of the flag's variable, or null. A shared variable that is empty counts as not
// set: so do the programs that share it.
const char* VariableOf(const Flag& flag, const ConfigSources& sources) {
  const char* own = sources.getenv(VariableName(*flag.field).c_str());
  const std::string& name = flag.options().shared_variable();
  if (own != nullptr || name.empty()) return own;
  const char* shared = sources.getenv(name.c_str());
  return shared != nullptr && *shared != '\0' ? shared : nullptr;
}

const Flag* FindFlag(const std::vector<Flag>& flags, absl::string_view name) {
  const std::string normal = absl::StrReplaceAll(name, {{"_", "-"}});
  for (const Flag& flag : flags) {
    const auto& aliases = flag.options().aliases();
    if (flag.name == normal || std::find(aliases.begin(), aliases.end(), normal) != aliases.end()) {
      return &flag;
    }
  }
  return nullptr;
}

size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replace = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replace, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

absl::Status UnknownName(const std::vector<Flag>& flags, absl::string_view source,
                         absl::string_view name) {
  const Flag* nearest = &flags.front();
  for (const Flag& flag : flags) {
    if (EditDistance(name, flag.name) < EditDistance(name, nearest->name)) nearest = &flag;
  }
  return absl::InvalidArgumentError(absl::StrCat(source, " '", name, "' is unknown; did you mean '",
                                                 nearest->name, "'? --help lists them all"));
}

// Applies one value, or a list of them for a flag that may be given several times.
absl::Status ApplyNode(const Flag& flag, const YAML::Node& node) {
  if (node.IsScalar()) return SetValue(flag, node.Scalar());
  if (!flag.field->is_repeated() || !node.IsSequence()) {
    return BadValue(flag, "(not a scalar)", "one value");
  }
  for (const YAML::Node& element : node) {
    if (!element.IsScalar()) return BadValue(flag, "(not a scalar)", "a list of values");
    KVASIR_RETURN_IF_ERROR(SetValue(flag, element.Scalar()));
  }
  return absl::OkStatus();
}

absl::Status ApplyFile(const std::vector<Flag>& flags, const std::string& path,
                       LoadedConfig& loaded) {
  KVASIR_ASSIGN_OR_RETURN(const std::string text, ReadTextFile("--config", path));
  YAML::Node root;
  try {
    root = YAML::Load(text);
  } catch (const YAML::Exception& e) {
    return absl::InvalidArgumentError(absl::StrCat("--config ", path, ": ", e.what()));
  }
  if (root.IsNull()) return absl::OkStatus();
  if (!root.IsMap()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--config ", path, ": expected lines of 'key: value'"));
  }
  for (const auto& entry : root) {
    const Flag* flag = nullptr;
    if (entry.first.IsScalar()) flag = FindFlag(flags, entry.first.Scalar());
    if (flag == nullptr) {
      return UnknownName(flags, absl::StrCat("--config ", path, ": key"),
                         entry.first.IsScalar() ? entry.first.Scalar() : "(not a scalar)");
    }
    KVASIR_RETURN_IF_ERROR(ApplyNode(*flag, entry.second));
    loaded.origins[flag->name] = "file";
  }
  return absl::OkStatus();
}

// Returns the arguments as (name, value) pairs: "--name=value", "--name value", "--switch",
// "--no-switch".
absl::StatusOr<std::vector<std::pair<std::string, std::string>>> ParseArgs(
    const std::vector<Flag>& flags, const std::vector<std::string>& args) {
  std::vector<std::pair<std::string, std::string>> pairs;
  for (size_t i = 0; i < args.size(); ++i) {
    if (args[i] == "-h") {
      pairs.emplace_back("help", "true");
      continue;
    }
    if (args[i].rfind("--", 0) != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", args[i], "' is not a flag; flags are --name=value, see --help"));
    }
    const std::pair<std::string, std::string> halves =
        absl::StrSplit(args[i].substr(2), absl::MaxSplits('=', 1));
    const bool has_value = args[i].find('=') != std::string::npos;
    const std::string& name = halves.first;
    const Flag* flag = FindFlag(flags, name);
    if (name == "help" || name == "print-config") {
      pairs.emplace_back(name, "true");
    } else if (has_value) {
      pairs.emplace_back(halves);
    } else if (flag != nullptr && IsBool(*flag)) {
      pairs.emplace_back(name, "true");
    } else if (const Flag* off =
                   name.rfind("no-", 0) == 0 ? FindFlag(flags, name.substr(3)) : nullptr;
               flag == nullptr && off != nullptr && IsBool(*off)) {
      pairs.emplace_back(off->name, "false");
    } else if (flag != nullptr || name == "config") {
      if (++i == args.size()) {
        return absl::InvalidArgumentError(absl::StrCat("--", name, " needs a value"));
      }
      pairs.emplace_back(name, args[i]);
    } else {
      return UnknownName(flags, "flag", name);
    }
  }
  return pairs;
}

absl::Status CheckRequired(const std::vector<Flag>& flags) {
  for (const Flag& flag : flags) {
    if (flag.options().required() && ValueText(flag).empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--", flag.name, " is required: ", flag.options().help()));
    }
  }
  return absl::OkStatus();
}

// Breaks `text` into lines of at most `width` columns, each indented.
std::string Wrapped(absl::string_view text, size_t indent, size_t width) {
  std::string out;
  std::string line(indent, ' ');
  for (absl::string_view word : absl::StrSplit(text, ' ')) {
    if (line.size() > indent && line.size() + 1 + word.size() > width) {
      absl::StrAppend(&out, line, "\n");
      line.assign(indent, ' ');
    }
    absl::StrAppend(&line, line.size() > indent ? " " : "", word);
  }
  return absl::StrCat(out, line, "\n");
}

}  // namespace

absl::StatusOr<LoadedConfig> LoadConfig(const ConfigSources& sources, Message& config) {
  config.Clear();
  const std::vector<Flag> flags = FlagsOf(config);
  KVASIR_ASSIGN_OR_RETURN(const auto pairs, ParseArgs(flags, sources.args));
  LoadedConfig loaded;
  std::string file;
  for (const auto& [name, value] : pairs) {
    if (name == "help") loaded.help = true;
    if (name == "print-config") loaded.print_config = true;
    if (name == "config") file = value;
  }
  if (loaded.help) return loaded;
  for (const Flag& flag : flags) {
    loaded.origins[flag.name] = "default";
    if (!flag.options().default_value().empty()) {
      KVASIR_RETURN_IF_ERROR(SetValue(flag, flag.options().default_value()));
    }
  }
  loaded.warnings = UnreadVariables(sources, config);
  if (!file.empty()) KVASIR_RETURN_IF_ERROR(ApplyFile(flags, file, loaded));
  for (const Flag& flag : flags) {
    if (const char* value = VariableOf(flag, sources); value != nullptr) {
      flag.holder->GetReflection()->ClearField(flag.holder, flag.field);  // overrides the file
      KVASIR_RETURN_IF_ERROR(SetValue(flag, value));
      loaded.origins[flag.name] = "environment";
    }
  }
  for (const auto& [name, value] : pairs) {
    if (name == "help" || name == "print-config" || name == "config") continue;
    const Flag* flag = FindFlag(flags, name);
    if (flag == nullptr) return UnknownName(flags, "flag", name);
    std::string& origin = loaded.origins[flag->name];
    if (origin != "flag") {
      flag->holder->GetReflection()->ClearField(flag->holder, flag->field);  // flags override the
                                                                             // rest
    } else if (flag->options().once()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--", flag->name, " is given twice, the second time as '", value, "'; give it once"));
    }
    KVASIR_RETURN_IF_ERROR(SetValue(*flag, value));
    origin = "flag";
  }
  if (!loaded.print_config) KVASIR_RETURN_IF_ERROR(CheckRequired(flags));
  return loaded;
}

std::string HelpText(const CommandInfo& info, const Message& config) {
  const std::unique_ptr<Message> copy(config.New());
  std::string text =
      absl::StrCat("Usage: ", info.name, " [--flag=value ...]\n\n", Wrapped(info.summary, 0, 96),
                   "\nExample:\n  ", info.example, "\n");
  std::string group = "-";
  const std::vector<Flag> flags = FlagsOf(*copy);
  for (const Flag& flag : flags) {
    if (flag.group != group) {
      group = flag.group;
      absl::StrAppend(&text, "\n", group.empty() ? "general" : group, ":\n");
    }
    const v1::FlagOptions& options = flag.options();
    const std::string range = RangeText(options);
    absl::StrAppend(&text, "  --", flag.name, range.empty() ? "" : absl::StrCat("  ", range),
                    options.default_value().empty()
                        ? (options.required() ? "  (required)" : "")
                        : absl::StrCat("  (default ", options.default_value(), ")"),
                    "\n", Wrapped(options.help(), 6, 96));
    if (options.aliases_size() > 0) {
      absl::StrAppend(&text, "      also: --", absl::StrJoin(options.aliases(), ", --"), "\n");
    }
    if (!options.shared_variable().empty()) {
      absl::StrAppend(&text, "      also: the variable ", options.shared_variable(), "\n");
    }
  }
  // Picks a flag that shows how dashes are written.
  const auto dashed = std::find_if(flags.begin(), flags.end(), [](const Flag& flag) {
    return flag.name.find('-') != std::string::npos;
  });
  const Flag& example = dashed == flags.end() ? flags.front() : *dashed;
  absl::StrAppend(&text,
                  "\n  --config FILE   YAML with flag names as keys\n"
                  "  --print-config  show the effective configuration with origins, and exit\n"
                  "\nEvery flag is also an environment variable: --",
                  example.name, " is ", VariableName(*example.field),
                  ".\nFlags win over variables, variables over the file.\n");
  return text;
}

std::string ConfigText(const Message& config, const LoadedConfig& loaded) {
  const std::unique_ptr<Message> copy(config.New());
  copy->CopyFrom(config);
  std::string text;
  for (const Flag& flag : FlagsOf(*copy)) {
    if (!HasText(flag)) continue;
    YAML::Emitter value;
    if (flag.field->is_repeated()) {
      value << YAML::Flow << RepeatedStrings(flag);
    } else {
      value << ValueText(flag);
    }
    const auto origin = loaded.origins.find(flag.name);
    absl::StrAppend(&text, flag.name, ": ", value.c_str(), "  # ",
                    origin == loaded.origins.end() ? "default" : origin->second, "\n");
  }
  return text;
}

absl::StatusOr<NextStep> Configure(const CommandInfo& info, int argc, const char* const* argv,
                                   int first_arg, Message& config) {
  ConfigSources sources;
  for (int i = first_arg; i < argc; ++i) sources.args.emplace_back(argv[i]);
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const absl::string_view entry = *variable;
    sources.variables.emplace_back(entry.substr(0, entry.find('=')));
  }
  sources.getenv = [](const char* name) -> const char* { return std::getenv(name); };
  KVASIR_ASSIGN_OR_RETURN(const LoadedConfig loaded, LoadConfig(sources, config));
  for (const std::string& warning : loaded.warnings) {
    // One write a line: workers share the stream.
    std::cerr << absl::StrCat(info.name, ": ", warning, "\n");
  }
  if (loaded.help) std::cout << HelpText(info, config);
  if (loaded.print_config) std::cout << ConfigText(config, loaded);
  return loaded.help || loaded.print_config ? NextStep::kExit : NextStep::kRun;
}

}  // namespace kvasir::proto
