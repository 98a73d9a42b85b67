// The `kvasir` command: picks the sub-command, turns its flags into a config message and reports
// errors.
#include <algorithm>
#include <cstring>
#include <functional>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"

#include "coordinator/cli/bench_command.h"
#include "coordinator/cli/chat_command.h"
#include "coordinator/cli/context_command.h"
#include "coordinator/cli/generate_command.h"
#include "coordinator/cli/serve_command.h"
#include "coordinator/cli/status_command.h"
#include "proto/completion.h"
#include "proto/kvasir/v1/config.pb.h"
#include "proto/load_config.h"
#include "proto/process/version.h"

namespace kvasir::coordinator {
namespace {

constexpr int kUsageError = 2;

int Report(const absl::Status& status, int exit_code) {
  if (status.ok()) return 0;
  // One write: workers share the stream.
  std::cerr << absl::StrCat("kvasir: ", absl::StatusCodeToString(status.code()), ": ",
                            status.message(), "\n");
  return exit_code;
}

struct Command {
  proto::CommandInfo info;
  std::string brief;  // in the list of commands
  const google::protobuf::Message* config = nullptr;
  std::vector<std::string> words = {};  // that it takes before its flags
  std::function<int(const proto::CommandInfo& info, int argc, const char* const* argv)> run;

  std::string name() const { return info.name.substr(std::strlen("kvasir ")); }
};

// Makes a command that loads its flags from what follows its name, then runs.
template <typename Config>
Command MakeCommand(proto::CommandInfo info, std::string brief,
                    absl::Status (*run)(const Config&)) {
  const auto load_and_run = [run](const proto::CommandInfo& own, int argc,
                                  const char* const* argv) {
    Config config;
    const absl::StatusOr<proto::NextStep> next = proto::Configure(own, argc, argv, 2, config);
    if (!next.ok()) return Report(next.status(), kUsageError);
    if (*next == proto::NextStep::kExit) return 0;
    return Report(run(config), 1);
  };
  return {.info = std::move(info),
          .brief = std::move(brief),
          .config = &Config::default_instance(),
          .run = load_and_run};
}

Command Serve() {
  return MakeCommand<v1::ServeConfig>(
      {.name = "kvasir serve",
       .summary = "Serves a model over gRPC. Without --workers it starts one worker process per "
                  "tensor-parallel rank on this machine; with it, the named workers are joined. "
                  "SIGTERM and SIGHUP drain: running requests may finish, new ones are refused; "
                  "a second one "
                  "stops at once.",
       .example = "kvasir serve --model tests/model/needle-8k --tensor-parallel-size 2"},
      "run a server: coordinator and, unless told otherwise, its workers", RunServe);
}

Command Generate() {
  return MakeCommand<v1::GenerateCommandConfig>(
      {.name = "kvasir generate",
       .summary = "Sends one prompt and streams the answer to standard output; progress and a "
                  "summary go to standard error.",
       .example = "kvasir generate --prompt-file document.txt --max-tokens 64"},
      "send a prompt to a running server and stream the answer", RunGenerate);
}

Command Chat() {
  return MakeCommand<v1::ChatCommandConfig>(
      {.name = "kvasir chat",
       .summary = "Talks with the model: each line is a message, and the conversation so far goes "
                  "with it, of which the server has most in its cache. Ctrl-C stops an answer, "
                  "/help lists the commands. From a pipe each line is a message too.",
       .example = "kvasir chat --system 'Answer in one sentence.'"},
      "talk with a running server's model", RunChat);
}

// Its first argument says what to do.
int RunContextAction(const proto::CommandInfo& own, int argc, const char* const* argv) {
  const bool has_action = argc > 2 && argv[2][0] != '-';
  v1::ContextCommandConfig config;
  const absl::StatusOr<proto::NextStep> next =
      proto::Configure(own, argc, argv, has_action ? 3 : 2, config);
  if (!next.ok()) return Report(next.status(), kUsageError);
  if (*next == proto::NextStep::kExit) return 0;
  const absl::Status done = RunContext(has_action ? argv[2] : "", config);
  return Report(done, has_action ? 1 : kUsageError);
}

Command Context() {
  return {
      .info = {.name = "kvasir context",
               .summary = absl::StrCat(
                   "Names documents, which the server reads once and in the background; "
                   "generate --context then sends the question alone. The first argument is "
                   "one of: ",
                   absl::StrJoin(ContextActions(), ", "), "."),
               .example = "kvasir context create --name=contract-2026 --file=contract.txt --wait"},
      .brief = "documents that a running server reads once, by name",
      .config = &v1::ContextCommandConfig::default_instance(),
      .words = ContextActions(),
      .run = RunContextAction};
}

Command Status() {
  return MakeCommand<v1::StatusCommandConfig>(
      {.name = "kvasir status",
       .summary = "Asks a running server how it is: whether it serves, its workers by rank, how "
                  "full the KV tiers are (summed over the workers, after the last step), what "
                  "runs and waits, and how much of the prompts the caches saved. Exit code 1 "
                  "when there is no server. What changes over time is better read from "
                  "/metrics.",
       .example = "kvasir status --server=127.0.0.1:50051"},
      "how a running server is: workers, tiers, requests, cache", RunStatus);
}

Command Bench() {
  return MakeCommand<v1::BenchCommandConfig>(
      {.name = "kvasir bench",
       .summary = "Sends requests to a running server and prints time to first token, inter-token "
                  "latency and throughput as a client sees them. Closed loop by default; --rate "
                  "makes it open. With --long-prompt-tokens it measures how much a long prompt "
                  "that arrives disturbs running streams. Use a server without other load; each "
                  "run has a tenant of its own, so that it finds no prefix of an earlier run.",
       .example = "kvasir bench --streams=8 --requests=64 --prompt-tokens=2000"},
      "load for a running server: latencies and throughput", RunBench);
}

std::vector<Command> Commands() {
  return {Serve(), Generate(), Chat(), Context(), Status(), Bench()};
}

const Command* Find(const std::vector<Command>& commands, absl::string_view name) {
  const auto found = std::find_if(commands.begin(), commands.end(),
                                  [&](const Command& command) { return command.name() == name; });
  return found == commands.end() ? nullptr : &*found;
}

std::string Usage(const std::vector<Command>& commands) {
  std::string text =
      "Kvasir: generation over long contexts, with sparse attention over a tiered KV store.\n\n"
      "Usage: kvasir COMMAND [--flag=value ...]\n\n";
  for (const Command& command : commands) {
    absl::StrAppendFormat(&text, "  %-10s %s\n", command.name(), command.brief);
  }
  absl::StrAppend(&text,
                  "  help       the flags of a command: kvasir help serve\n"
                  "  completion a script that completes commands and flags: bash or zsh\n"
                  "  --version  the release\n"
                  "\nTry:\n"
                  "  kvasir serve --model tests/model/needle-8k --tensor-parallel-size 2\n"
                  "  kvasir generate --prompt-file document.txt\n"
                  "  source <(kvasir completion bash)\n");
  return text;
}

int Help(const std::vector<Command>& commands, absl::string_view name) {
  const Command* command = Find(commands, name);
  if (command == nullptr) {
    std::cerr << "kvasir: there is no command '" << name << "'\n\n" << Usage(commands);
    return kUsageError;
  }
  std::cout << proto::HelpText(command->info, *command->config);
  return 0;
}

int Completion(const std::vector<Command>& commands, absl::string_view shell) {
  std::vector<proto::CompletedCommand> all;
  std::vector<std::string> names;
  for (const Command& command : commands) {
    names.push_back(command.name());
    all.push_back({.name = command.name(),
                   .summary = command.brief,
                   .config = command.config,
                   .words = command.words});
  }
  all.push_back({.name = "help", .summary = "the flags of a command", .words = names});
  all.push_back({.name = "completion",
                 .summary = "a script that completes commands and flags",
                 .words = {"bash", "zsh"}});
  if (shell == "bash") {
    std::cout << proto::BashCompletion("kvasir", all);
  } else if (shell == "zsh") {
    std::cout << proto::ZshCompletion("kvasir", all);
  } else {
    std::cerr << "kvasir: completion for '" << shell << "' is not made; name bash or zsh\n";
    return kUsageError;
  }
  return 0;
}

int Main(int argc, char** argv) {
  const std::vector<Command> commands = Commands();
  const absl::string_view name = argc > 1 ? argv[1] : "help";
  const absl::string_view word = argc > 2 ? argv[2] : "";
  if (const Command* command = Find(commands, name)) return command->run(command->info, argc, argv);
  if (name == "--version") {
    std::cout << "kvasir " << proto::Version() << "\n";
    return 0;
  }
  if (name == "completion") return Completion(commands, word);
  if (name == "--help" || name == "-h" || name == "help") {
    if (!word.empty()) return Help(commands, word);
    std::cout << Usage(commands);
    return 0;
  }
  return Help(commands, name);
}

}  // namespace
}  // namespace kvasir::coordinator

int main(int argc, char** argv) { return kvasir::coordinator::Main(argc, argv); }
