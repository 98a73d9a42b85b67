#include "proto/load_config.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <limits>
#include <unistd.h>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "google/protobuf/descriptor.h"
#include "yaml-cpp/yaml.h"

#include "kernels/base/status_macros.h"
#include "proto/kvasir/v1/config.pb.h"
#include "proto/kvasir/v1/sparsity.pb.h"

namespace kvasir::proto {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// One settable field: the flag's name, its schema and the message that holds it.
struct Flag {
  std::string name;   // "max-model-len"
  std::string group;  // "scheduler"; empty for fields of the top message
  const FieldDescriptor* field = nullptr;
  Message* holder = nullptr;

  const v1::FlagOptions& options() const { return field->options().GetExtension(v1::flag); }
};

void CollectFlags(Message& message, const std::string& group, std::vector<Flag>& flags) {
  const Descriptor& descriptor = *message.GetDescriptor();
  for (int i = 0; i < descriptor.field_count(); ++i) {
    const FieldDescriptor* field = descriptor.field(i);
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      CollectFlags(*message.GetReflection()->MutableMessage(&message, field), field->name(), flags);
    } else {
      flags.push_back({.name = absl::StrReplaceAll(field->name(), {{"_", "-"}}),
                       .group = group,
                       .field = field,
                       .holder = &message});
    }
  }
}

std::vector<Flag> FlagsOf(Message& message) {
  std::vector<Flag> flags;
  CollectFlags(message, "", flags);
  return flags;
}

std::string VariableName(const FieldDescriptor& field) {
  return absl::StrCat("KVASIR_", absl::AsciiStrToUpper(field.name()));
}

bool IsBool(const Flag& flag) { return flag.field->cpp_type() == FieldDescriptor::CPPTYPE_BOOL; }

// Returns the accepted values of a string; empty: any.
std::vector<std::string> Choices(const v1::FlagOptions& options) {
  std::vector<std::string> choices(options.choices().begin(), options.choices().end());
  const auto* methods = v1::AttentionPolicy::descriptor()->FindOneofByName(options.methods());
  for (int i = 0; methods != nullptr && i < methods->field_count(); ++i) {
    choices.push_back(methods->field(i)->name());
  }
  return choices;
}

// Returns "[64, 1048576] tokens"; empty when there is no limit.
std::string RangeText(const v1::FlagOptions& options) {
  std::string text;
  if (options.has_min() || options.has_max()) {
    const std::string low = options.has_min() ? absl::StrCat(options.min()) : "";
    const std::string high =
        options.has_max() ? absl::StrCat(static_cast<int64_t>(options.max())) : "";
    text = absl::StrCat("[", low.empty() ? "0" : low, ", ", high.empty() ? "..." : high, "]");
  }
  const std::vector<std::string> choices = Choices(options);
  if (!choices.empty()) text = absl::StrJoin(choices, "|");
  if (!options.unit().empty()) absl::StrAppend(&text, text.empty() ? "" : " ", options.unit());
  return text;
}

absl::Status BadValue(const Flag& flag, absl::string_view value, absl::string_view expected) {
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag.name, " is '", value, "', expected ", expected));
}

absl::Status CheckRange(const Flag& flag, double number, absl::string_view value) {
  const v1::FlagOptions& options = flag.options();
  const bool in_range = std::isfinite(number) && (!options.has_min() || number >= options.min()) &&
                        (!options.has_max() || number <= options.max());
  return in_range ? absl::OkStatus() : BadValue(flag, value, RangeText(options));
}

absl::Status SetUnsigned(const Flag& flag, absl::string_view value) {
  uint64_t number = 0;
  const bool is_32_bits = flag.field->cpp_type() == FieldDescriptor::CPPTYPE_UINT32;
  const uint64_t limit =
      is_32_bits ? std::numeric_limits<uint32_t>::max() : std::numeric_limits<uint64_t>::max();
  if (!absl::SimpleAtoi(value, &number) || number > limit) {
    return BadValue(flag, value, "a whole number");
  }
  KVASIR_RETURN_IF_ERROR(CheckRange(flag, static_cast<double>(number), value));
  if (is_32_bits) {
    flag.holder->GetReflection()->SetUInt32(flag.holder, flag.field, static_cast<uint32_t>(number));
  } else {
    flag.holder->GetReflection()->SetUInt64(flag.holder, flag.field, number);
  }
  return absl::OkStatus();
}

absl::Status SetDouble(const Flag& flag, absl::string_view value) {
  double number = 0;
  if (!absl::SimpleAtod(value, &number)) return BadValue(flag, value, "a number");
  KVASIR_RETURN_IF_ERROR(CheckRange(flag, number, value));
  flag.holder->GetReflection()->SetDouble(flag.holder, flag.field, number);
  return absl::OkStatus();
}

absl::Status SetBool(const Flag& flag, absl::string_view value) {
  bool on = false;
  if (!absl::SimpleAtob(value, &on)) return BadValue(flag, value, "true or false");
  flag.holder->GetReflection()->SetBool(flag.holder, flag.field, on);
  return absl::OkStatus();
}

// A repeated flag takes one value each time it is given.
absl::Status SetString(const Flag& flag, absl::string_view value) {
  const std::vector<std::string> choices = Choices(flag.options());
  const std::string text(value);
  if (!choices.empty() && std::find(choices.begin(), choices.end(), text) == choices.end()) {
    return BadValue(flag, value, absl::StrCat("one of ", absl::StrJoin(choices, ", ")));
  }
  const auto* reflection = flag.holder->GetReflection();
  if (flag.field->is_repeated()) {
    reflection->AddString(flag.holder, flag.field, text);
  } else {
    reflection->SetString(flag.holder, flag.field, text);
  }
  return absl::OkStatus();
}

absl::Status SetValue(const Flag& flag, absl::string_view value) {
  switch (flag.field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_UINT32:
    case FieldDescriptor::CPPTYPE_UINT64:
      return SetUnsigned(flag, value);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return SetDouble(flag, value);
    case FieldDescriptor::CPPTYPE_BOOL:
      return SetBool(flag, value);
    case FieldDescriptor::CPPTYPE_STRING:
      return SetString(flag, value);
    default:
      return absl::InternalError(absl::StrCat("config.proto: field ", flag.field->full_name(),
                                              " has a type that flags cannot set"));
  }
}

// A flag that is not set and has no default has no text.
bool HasText(const Flag& flag) {
  const auto* reflection = flag.holder->GetReflection();
  if (flag.field->is_repeated()) return reflection->FieldSize(*flag.holder, flag.field) > 0;
  return !flag.field->has_presence() || reflection->HasField(*flag.holder, flag.field);
}

std::vector<std::string> RepeatedStrings(const Flag& flag) {
  const auto* reflection = flag.holder->GetReflection();
  std::vector<std::string> values;
  for (int i = 0; i < reflection->FieldSize(*flag.holder, flag.field); ++i) {
    values.push_back(reflection->GetRepeatedString(*flag.holder, flag.field, i));
  }
  return values;
}

// REQUIRES: HasText, and the flag is not repeated.
std::string ValueText(const Flag& flag) {
  const auto* reflection = flag.holder->GetReflection();
  switch (flag.field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_UINT32:
      return absl::StrCat(reflection->GetUInt32(*flag.holder, flag.field));
    case FieldDescriptor::CPPTYPE_UINT64:
      return absl::StrCat(reflection->GetUInt64(*flag.holder, flag.field));
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return absl::StrCat(reflection->GetDouble(*flag.holder, flag.field));
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection->GetBool(*flag.holder, flag.field) ? "true" : "false";
    default:
      return reflection->GetString(*flag.holder, flag.field);
  }
}

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
  YAML::Node root;
  try {
    root = YAML::LoadFile(path);
  } catch (const std::exception& e) {  // thrown by YAML, or by the stream for something that is no
                                       // file
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
    if (const char* value = sources.getenv(VariableName(*flag.field).c_str()); value != nullptr) {
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
