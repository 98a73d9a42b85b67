#include "coordinator/cli/serve_command.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <pthread.h>
#include <signal.h>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "spdlog/spdlog.h"

#include "coordinator/cli/local_gpus.h"
#include "coordinator/cli/local_workers.h"
#include "coordinator/files/draft_file.h"
#include "coordinator/group/leader_worker_set.h"
#include "coordinator/server.h"
#include "kernels/base/cpu_isa.h"
#include "kernels/base/status_macros.h"
#include "proto/process.h"
#include "proto/process/logs.h"
#include "proto/sockets.h"

namespace kvasir::coordinator {
namespace {

// Least time for workers to end when nothing runs any more: they write accepted blocks to disk.
constexpr absl::Duration kLeastWorkerGrace = absl::Seconds(2);
constexpr absl::Duration kMostWorkerGrace = absl::Seconds(30);
// Where local workers listen for peers when nothing is said.
constexpr const char* kPeersOnMachine = "127.0.0.1:0";

absl::StatusOr<std::unique_ptr<LocalWorkers>> StartLocalWorkers(const v1::ServeConfig& config) {
  KVASIR_ASSIGN_OR_RETURN(const std::string program, FindWorkerProgram());
  // The workers run on this machine: a worker that refused the flag would only be started again.
  KVASIR_RETURN_IF_ERROR(kernels::LimitCpuIsa(config.cpu_isa()));
  const int64_t count = config.tensor_parallel_size();
  const int64_t cores = std::max<int64_t>(1, std::thread::hardware_concurrency());
  const int64_t port = config.endpoint().metrics_port();
  std::vector<std::string> gpus;
  if (config.device() == "cuda") {
    KVASIR_ASSIGN_OR_RETURN(gpus, ChooseGpus(count, LookForGpus()));
  }
  return LocalWorkers::Start({
      .program = program,
      .count = count,
      .threads = config.threads() != 0 ? config.threads() : std::max<int64_t>(1, cores / count),
      .device = config.device(),
      .cpu_isa = config.cpu_isa(),
      .logs = config.logs(),
      .gpus = std::move(gpus),
      .metrics_host = config.endpoint().host(),
      .metrics_port = port == 0 ? 0 : port + 1,
      .metrics_tls = config.tls(),
      .peer_listen = !config.peer_listen().empty() || config.peers().empty() ? config.peer_listen()
                                                                             : kPeersOnMachine,
      .peer_transports = config.peer_transports(),
      .peer_secret_file = config.peer_secret_file(),
      .grace =
          std::clamp(absl::Seconds(config.shutdown_timeout()), kLeastWorkerGrace, kMostWorkerGrace),
  });
}

// INVALID_ARGUMENT for a server that would answer strangers.
absl::Status CheckDoor(const v1::ServeConfig& config) {
  const std::string& host = config.endpoint().host();
  const bool is_open = proto::IsOpenToOtherMachines(absl::StrCat(host, ":0"));
  if (!is_open || !config.api_keys_file().empty() || config.allow_anonymous()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "--host ", host, " is open to other machines and there is no --api-keys-file; give one ",
      "(docs/operations.md, \"Security\"), listen on 127.0.0.1, or say --allow-anonymous where ",
      "something else keeps strangers out"));
}

// Keys that travel in the clear serve whoever listens.
void WarnOfPlainKeys(const v1::ServeConfig& config) {
  const std::string& host = config.endpoint().host();
  if (config.api_keys_file().empty() || !config.tls().tls_cert_file().empty() ||
      !proto::IsOpenToOtherMachines(absl::StrCat(host, ":0"))) {
    return;
  }
  spdlog::warn(
      "API keys and prompts reach --host {} in the clear; give --tls-cert-file and --tls-key-file, "
      "or let a proxy speak TLS and listen on 127.0.0.1",
      host);
}

absl::StatusOr<std::vector<std::string>> ParseWorkers(const v1::ServeConfig& config) {
  std::vector<std::string> addresses =
      absl::StrSplit(config.workers(), ',', absl::SkipWhitespace());
  if (NamesLeaderWorkerSet(config.workers())) {
    const auto variable = [](const char* name) -> const char* { return std::getenv(name); };
    KVASIR_ASSIGN_OR_RETURN(addresses, LeaderWorkerSetWorkers(config.workers(), variable));
  }
  if (addresses.size() != config.tensor_parallel_size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--workers names ", addresses.size(), " workers, --tensor-parallel-size is ",
                     config.tensor_parallel_size(), "; they must be equal"));
  }
  return addresses;
}

std::string GrpcAddress(const v1::ServeConfig& config, const Server& server) {
  return absl::StrCat(config.endpoint().host(), ":", server.port());
}

std::string HttpAddress(const v1::ServeConfig& config, const Server& server) {
  return absl::StrCat(config.endpoint().host(), ":", server.http_port());
}

std::string MetricsAddress(const v1::ServeConfig& config, const Server& server) {
  return absl::StrCat(config.endpoint().host(), ":", server.metrics_port());
}

absl::Status WriteReadyFile(const v1::ServeConfig& config, const Server& server) {
  if (config.ready_file().empty()) return absl::OkStatus();
  std::string text = absl::StrCat("grpc: ", GrpcAddress(config, server), "\n",
                                  "http: ", HttpAddress(config, server), "\n",
                                  "metrics: ", MetricsAddress(config, server), "\n");
  const std::vector<std::string> workers = server.worker_metrics_addresses();
  for (size_t rank = 0; rank < workers.size(); ++rank) {
    absl::StrAppend(&text, "worker-", rank, ": ", workers[rank], "\n");
  }
  const auto write = [&]() -> absl::Status {
    KVASIR_ASSIGN_OR_RETURN(DraftFile file,
                            DraftFile::Create(config.ready_file(), DraftFile::Readers::kAll));
    KVASIR_RETURN_IF_ERROR(file.Write(text));
    return file.MoveToPlace();
  };
  const absl::Status written = write();
  if (written.ok()) return written;
  return absl::InvalidArgumentError(absl::StrCat("--ready-file ", written.message()));
}

// Removes the ready file: that of a server that has ended, or is not ready yet, misleads its
// readers.
class ReadyFile {
 public:
  explicit ReadyFile(std::string path) : path_(std::move(path)) { Remove(); }
  ~ReadyFile() { Remove(); }
  ReadyFile(const ReadyFile&) = delete;
  ReadyFile& operator=(const ReadyFile&) = delete;

 private:
  void Remove() {
    if (!path_.empty()) std::remove(path_.c_str());
  }
  const std::string path_;
};

// Returns the signals that drain the server. SIGHUP, of a closed terminal, is one.
sigset_t ShutdownSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal_number : {SIGTERM, SIGINT, SIGHUP}) sigaddset(&signals, signal_number);
  return signals;
}

// Waits for the server or for a signal. Returns the signal's number, 0 when the server is ready.
// Fails when a local worker ends before that: it would not do better when started again.
absl::StatusOr<int> WaitUntilReady(Server& server, const LocalWorkers* workers,
                                   const sigset_t& signals) {
  constexpr timespec kNoWait = {};
  while (true) {
    if (workers != nullptr) KVASIR_RETURN_IF_ERROR(workers->first_end());
    const absl::Status ready = server.WaitUntilReady(absl::Milliseconds(100));
    if (ready.ok()) return 0;
    if (!absl::IsDeadlineExceeded(ready)) return ready;
    const int signal_number = sigtimedwait(&signals, nullptr, &kNoWait);
    if (signal_number > 0) return signal_number;
  }
}

// Waits until `is_over`, which waits for a short time itself. Returns false at the deadline or when
// another signal comes.
bool AwaitEnd(absl::FunctionRef<bool()> is_over, TimePoint deadline, const sigset_t& signals) {
  constexpr timespec kNoWait = {};
  const SteadyClock clock;
  while (!is_over()) {
    if (sigtimedwait(&signals, nullptr, &kNoWait) > 0) {
      spdlog::warn("a second signal: requests that still run end with UNAVAILABLE");
      return false;
    }
    if (clock.Now() >= deadline) {
      spdlog::warn(
          "requests still run at the end of --shutdown-timeout; they end with UNAVAILABLE");
      return false;
    }
  }
  return true;
}

// Lets running requests end or move, for at most `longest` or until another signal. Ends the
// workers when none runs here.
void Drain(Server& server, std::unique_ptr<LocalWorkers>& workers, absl::Duration longest,
           const sigset_t& signals) {
  const TimePoint deadline = After(SteadyClock().Now(), longest);
  const absl::Duration step = std::min(absl::Milliseconds(100), longest);
  server.Drain();
  if (!AwaitEnd([&] { return server.WaitUntilIdle(step); }, deadline, signals)) return;
  if (server.num_moved() == 0) return;
  server.EndGroup();
  workers.reset();
  spdlog::info("the workers are free; {} answers come from other servers", server.num_moved());
  AwaitEnd([&] { return server.WaitUntilMovedEnd(step); }, deadline, signals);
}

}  // namespace

absl::Status RunServe(const v1::ServeConfig& config) {
  KVASIR_RETURN_IF_ERROR(CheckDoor(config));
  // Block the signals before any thread starts, so that only the wait below receives them.
  const sigset_t signals = ShutdownSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  proto::IgnoreStraySignals();
  proto::RaiseDescriptorLimit();
  KVASIR_ASSIGN_OR_RETURN(const std::unique_ptr<proto::Logs> logs,
                          proto::Logs::Start("coordinator", config.logs()));

  WarnOfPlainKeys(config);
  const ReadyFile ready_file(config.ready_file());
  std::unique_ptr<LocalWorkers> local_workers;
  std::vector<std::string> addresses;
  v1::ServeConfig server_config = config;
  if (config.workers().empty()) {
    if (!config.group_secret_file().empty()) {
      return absl::InvalidArgumentError(
          "--group-secret-file is for --workers; workers that serve starts get a random secret");
    }
    if (!config.tls_ca_file().empty() && config.otlp().otlp_endpoint().empty() &&
        config.replica_servers().empty() && config.prefill_servers().empty()) {
      return absl::InvalidArgumentError(
          "--tls-ca-file is for --workers, other servers and --otlp-endpoint; workers that serve "
          "starts speak over unix sockets");
    }
    KVASIR_ASSIGN_OR_RETURN(local_workers, StartLocalWorkers(config));
    addresses = local_workers->addresses();
    server_config.set_group_secret_file(local_workers->group_secret_file());
  } else {
    if (!config.peer_listen().empty() || !config.peer_secret_file().empty()) {
      return absl::InvalidArgumentError(
          "--peer-listen and --peer-secret-file are for workers that serve starts; give them to "
          "each kvasir-worker of --workers");
    }
    KVASIR_ASSIGN_OR_RETURN(addresses, ParseWorkers(config));
  }
  KVASIR_ASSIGN_OR_RETURN(const std::unique_ptr<Server> server,
                          Server::Start(server_config, addresses));
  KVASIR_ASSIGN_OR_RETURN(int signal_number, WaitUntilReady(*server, local_workers.get(), signals));
  if (signal_number == 0) {
    KVASIR_RETURN_IF_ERROR(WriteReadyFile(config, *server));
    spdlog::info("serving {} on {}, HTTP on {}, metrics on {}", config.model().model(),
                 GrpcAddress(config, *server), HttpAddress(config, *server),
                 MetricsAddress(config, *server));
    sigwait(&signals, &signal_number);
  }
  spdlog::info("signal {}: draining for at most {} s; a second one stops at once", signal_number,
               config.shutdown_timeout());
  Drain(*server, local_workers, absl::Seconds(config.shutdown_timeout()), signals);
  server->Shutdown();
  return absl::OkStatus();
}

}  // namespace kvasir::coordinator
