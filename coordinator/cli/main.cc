// The `kvasir` command: picks the sub-command, turns its flags into a config message and reports
// errors.
#include <cstring>
#include <iostream>

#include "absl/strings/str_cat.h"

#include "coordinator/cli/bench_command.h"
#include "coordinator/cli/chat_command.h"
#include "coordinator/cli/generate_command.h"
#include "coordinator/cli/serve_command.h"
#include "coordinator/cli/status_command.h"
#include "proto/kvasir/v1/config.pb.h"
#include "proto/load_config.h"

namespace kvasir::coordinator {
namespace {

constexpr char kUsage[] =
    "Kvasir: generation over long contexts, with sparse attention over a tiered KV store.\n"
    "\n"
    "Usage: kvasir COMMAND [--flag=value ...]\n"
    "\n"
    "  serve      run a server: coordinator and, unless told otherwise, its workers\n"
    "  generate   send a prompt to a running server and stream the answer\n"
    "  chat       talk with a running server's model\n"
    "  status     how a running server is: workers, tiers, requests, cache\n"
    "  bench      load for a running server: latencies and throughput\n"
    "\n"
    "Try:\n"
    "  kvasir serve --model tests/model/needle-8k --tensor-parallel-size 2\n"
    "  kvasir generate --prompt-file document.txt\n"
    "  kvasir serve --help\n";

constexpr int kUsageError = 2;

int Report(const absl::Status& status, int exit_code) {
  if (status.ok()) return 0;
  // One write: workers share the stream.
  std::cerr << absl::StrCat("kvasir: ", absl::StatusCodeToString(status.code()), ": ",
                            status.message(), "\n");
  return exit_code;
}

// Loads the command's flags, then runs it.
template <typename Config>
int RunCommand(const proto::CommandInfo& info, int argc, char** argv,
               absl::Status (*run)(const Config&)) {
  Config config;
  const absl::StatusOr<proto::NextStep> next = proto::Configure(info, argc, argv, 2, config);
  if (!next.ok()) return Report(next.status(), kUsageError);
  if (*next == proto::NextStep::kExit) return 0;
  return Report(run(config), 1);
}

int Main(int argc, char** argv) {
  const char* command = argc > 1 ? argv[1] : "--help";
  if (std::strcmp(command, "serve") == 0) {
    return RunCommand<v1::ServeConfig>(
        {.name = "kvasir serve",
         .summary = "Serves a model over gRPC. Without --workers it starts one worker process per "
                    "tensor-parallel rank on this machine; with it, the named workers are joined. "
                    "SIGTERM and SIGHUP drain: running requests may finish, new ones are refused; "
                    "a second one "
                    "stops at once.",
         .example = "kvasir serve --model tests/model/needle-8k --tensor-parallel-size 2"},
        argc, argv, RunServe);
  }
  if (std::strcmp(command, "generate") == 0) {
    return RunCommand<v1::GenerateCommandConfig>(
        {.name = "kvasir generate",
         .summary = "Sends one prompt and streams the answer to standard output; progress and a "
                    "summary go to standard error.",
         .example = "kvasir generate --prompt-file document.txt --max-tokens 64"},
        argc, argv, RunGenerate);
  }
  if (std::strcmp(command, "chat") == 0) {
    return RunCommand<v1::ChatCommandConfig>(
        {.name = "kvasir chat",
         .summary =
             "Talks with the model: each line is a message, and the conversation so far goes "
             "with it, of which the server has most in its cache. Ctrl-C stops an answer, "
             "/help lists the commands. From a pipe each line is a message too.",
         .example = "kvasir chat --system 'Answer in one sentence.'"},
        argc, argv, RunChat);
  }
  if (std::strcmp(command, "status") == 0) {
    return RunCommand<v1::StatusCommandConfig>(
        {.name = "kvasir status",
         .summary = "Asks a running server how it is: whether it serves, its workers by rank, how "
                    "full the KV tiers are (summed over the workers, after the last step), what "
                    "runs and waits, and how much of the prompts the caches saved. Exit code 1 "
                    "when there is no server. What changes over time is better read from "
                    "/metrics.",
         .example = "kvasir status --server=127.0.0.1:50051"},
        argc, argv, RunStatus);
  }
  if (std::strcmp(command, "bench") == 0) {
    return RunCommand<v1::BenchCommandConfig>(
        {.name = "kvasir bench",
         .summary =
             "Sends requests to a running server and prints time to first token, inter-token "
             "latency and throughput as a client sees them. Closed loop by default; --rate "
             "makes it open. With --long-prompt-tokens it measures how much a long prompt "
             "that arrives disturbs running streams. Use a server without other load; each "
             "run has a tenant of its own, so that it finds no prefix of an earlier run.",
         .example = "kvasir bench --streams=8 --requests=64 --prompt-tokens=2000"},
        argc, argv, RunBench);
  }
  if (std::strcmp(command, "--help") == 0 || std::strcmp(command, "-h") == 0) {
    std::cout << kUsage;
    return 0;
  }
  std::cerr << "kvasir: there is no command '" << command << "'\n\n" << kUsage;
  return kUsageError;
}

}  // namespace
}  // namespace kvasir::coordinator

int main(int argc, char** argv) { return kvasir::coordinator::Main(argc, argv); }
