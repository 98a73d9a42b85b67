#include "proto/completion.h"

#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/substitute.h"

#include "proto/config_flags.h"

namespace kvasir::proto {
namespace {

using google::protobuf::Message;

// $0 program, $1 names of the commands, $2 cases of a command's words, $3 cases of a flag's values.
constexpr char kBash[] = R"(# bash completion of $0
_$0() {
  local current=$${COMP_WORDS[COMP_CWORD]} flag=$${COMP_WORDS[COMP_CWORD-1]} words=
  if [[ $$current == = ]]; then
    current=
  elif [[ $$flag == = ]]; then
    flag=$${COMP_WORDS[COMP_CWORD-2]}
  fi
  if ((COMP_CWORD == 1)); then
    words="$1"
  else
    case "$${COMP_WORDS[1]} $$flag" in
$3    *)
      case $${COMP_WORDS[1]} in
$2      esac ;;
    esac
  fi
  COMPREPLY=($$(compgen -W "$$words" -- "$$current"))
}
complete -o default -F _$0 $0
)";

// $0 program, $1 lines of the commands, $2 cases of a command's arguments.
constexpr char kZsh[] = R"(#compdef $0
_$0() {
  local -a commands
  commands=(
$1  )
  if ((CURRENT == 2)); then
    _describe command commands
    return
  fi
  case $$words[2] in
$2  esac
}
_$0 "$$@"
)";

// The flags that every command has besides those of its schema.
constexpr const char* kSwitches[] = {"--help", "--print-config"};

std::vector<Flag> FlagsOfCommand(const CompletedCommand& command, std::unique_ptr<Message>& copy) {
  if (command.config == nullptr) return {};
  copy.reset(command.config->New());
  return FlagsOf(*copy);
}

std::string Quoted(const std::string& text) {
  return absl::StrCat("'", absl::StrReplaceAll(text, {{"'", "'\\''"}}), "'");
}

// Returns the part of `help` before the first full stop, fit for a zsh argument's explanation.
std::string Explanation(const std::string& help) {
  const std::string sentence = help.substr(0, help.find(". "));
  return absl::StrReplaceAll(sentence, {{"[", "\\["}, {"]", "\\]"}, {":", "\\:"}});
}

std::string ZshFlag(const Flag& flag) {
  const std::string help = absl::StrCat("[", Explanation(flag.options().help()), "]");
  const std::vector<std::string> choices = Choices(flag.options());
  if (IsBool(flag)) return Quoted(absl::StrCat("--", flag.name, help));
  const std::string values =
      choices.empty() ? "_files" : absl::StrCat("(", absl::StrJoin(choices, " "), ")");
  const char* again = flag.field->is_repeated() ? "*" : "";
  return Quoted(absl::StrCat(again, "--", flag.name, "=", help, ":value:", values));
}

}  // namespace

std::string BashCompletion(const std::string& program, const std::vector<CompletedCommand>& all) {
  std::vector<std::string> names;
  std::string words, values;
  for (const CompletedCommand& command : all) {
    names.push_back(command.name);
    std::vector<std::string> arguments = command.words;
    std::unique_ptr<Message> copy;
    for (const Flag& flag : FlagsOfCommand(command, copy)) {
      arguments.push_back(absl::StrCat("--", flag.name));
      const std::vector<std::string> choices = Choices(flag.options());
      if (choices.empty()) continue;
      absl::StrAppend(&values, "    \"", command.name, " --", flag.name, "\") words=\"",
                      absl::StrJoin(choices, " "), "\" ;;\n");
    }
    if (copy != nullptr) {
      arguments.insert(arguments.end(), std::begin(kSwitches), std::end(kSwitches));
    }
    absl::StrAppend(&words, "      ", command.name, ") words=\"", absl::StrJoin(arguments, " "),
                    "\" ;;\n");
  }
  return absl::Substitute(kBash, program, absl::StrJoin(names, " "), words, values);
}

std::string ZshCompletion(const std::string& program, const std::vector<CompletedCommand>& all) {
  std::string names, cases;
  for (const CompletedCommand& command : all) {
    absl::StrAppend(&names, "    ", Quoted(absl::StrCat(command.name, ":", command.summary)), "\n");
    std::unique_ptr<Message> copy;
    std::vector<std::string> arguments = {Quoted("1:command:")};
    for (const Flag& flag : FlagsOfCommand(command, copy)) arguments.push_back(ZshFlag(flag));
    if (copy != nullptr) {
      arguments.insert(arguments.end(), std::begin(kSwitches), std::end(kSwitches));
    }
    if (!command.words.empty()) {
      arguments.push_back(Quoted(absl::StrCat("2:word:(", absl::StrJoin(command.words, " "), ")")));
    }
    absl::StrAppend(&cases, "  ", command.name, ")\n    _arguments ",
                    absl::StrJoin(arguments, " \\\n      "), " ;;\n");
  }
  return absl::Substitute(kZsh, program, names, cases);
}

}  // namespace kvasir::proto
