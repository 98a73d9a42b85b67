// kvasir-worker: one tensor-parallel rank. Waits for a coordinator, loads the part of the model
// that it is given, and carries out its plans until SIGTERM.
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <initializer_list>
#include <memory>
#include <pthread.h>
#include <signal.h>
#include <string>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/health_check_service_interface.h"
#include "prometheus/registry.h"
#include "spdlog/spdlog.h"

#include "kernels/base/cpu_isa.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "kernels/plans/plan_log.h"
#include "kvstore/host/host_memory.h"
#include "proto/grpc_listener.h"
#include "proto/kvasir/v1/config.pb.h"
#include "proto/load_config.h"
#include "proto/metrics_endpoint.h"
#include "proto/process.h"
#include "proto/process/logs.h"
#include "proto/process/process_registry.h"
#include "proto/process/version.h"
#include "proto/security/group_secret.h"
#include "proto/security/tls.h"
#include "proto/sockets.h"
#include "proto/worker_protocol.h"
#include "worker/group_member.h"
#include "worker/make_backend.h"
#include "worker/metrics.h"
#include "worker/service.h"
#include "worker/thread_pool.h"

namespace kvasir::worker {
namespace {

const proto::CommandInfo kCommand = {
    .name = "kvasir-worker",
    .summary =
        "Computes one tensor-parallel rank of a model for a Kvasir coordinator. It listens, "
        "and the coordinator says which model, which rank and how much memory.",
    .example = "kvasir-worker --listen 127.0.0.1:50061 --threads 8"};

// Whether this worker can carry out plans, reported by gRPC health and /health. Thread-safe.
class Readiness {
 public:
  void Set(bool ready) {
    kernels::MutexLock lock(mu_);
    ready_ = ready;
    Publish();
  }
  // Reports changes to gRPC's health service from now on; null: no longer.
  void Attach(grpc::HealthCheckServiceInterface* health) {
    kernels::MutexLock lock(mu_);
    health_ = health;
    Publish();
  }
  void SetAccepting(const absl::Status& accepting) {
    kernels::MutexLock lock(mu_);
    accepting_ = accepting;
    Publish();
  }
  absl::Status status() {
    kernels::MutexLock lock(mu_);
    return ready_ ? accepting_ : absl::UnavailableError("in no group");
  }

 private:
  void Publish() REQUIRES(mu_) {
    if (health_ == nullptr) return;
    health_->SetServingStatus(proto::kWorkerServiceName, ready_ && accepting_.ok());
  }

  kernels::Mutex mu_;
  bool ready_ GUARDED_BY(mu_) = false;
  absl::Status accepting_ GUARDED_BY(mu_);  // status of new connections
  grpc::HealthCheckServiceInterface* health_ GUARDED_BY(mu_) = nullptr;
};

// Time for which the server waits, once the engine has stopped, for clients to close their
// connections. Health watchers never do.
constexpr std::chrono::milliseconds kShutdownGrace{500};

// A shutdown that takes longer is ended by the system.
constexpr unsigned kLongestEndSeconds = 60;

// Ends the process where it cannot leave a group (WorkerServiceOptions::on_stuck), so that it is
// started again. Logs are written beside the work, and a line of them would be lost.
void EndStuckProcess() {
  std::fputs(
      "kvasir-worker: a group ended minutes ago and the next one waits, but this worker cannot "
      "leave it: a device or a disk does not answer. The process ends; start it again\n",
      stderr);
  std::abort();
}

// Blocks the signals that end the process in all threads; main waits for them.
sigset_t BlockEndSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal_number : {SIGTERM, SIGINT, SIGHUP}) sigaddset(&signals, signal_number);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  return signals;
}

// Returns HOST:PORT with the bound port; unix: addresses unchanged.
std::string BoundAddress(const std::string& listen, int port) {
  if (proto::IsUnixAddress(listen)) return listen;
  return absl::StrCat(listen.substr(0, listen.rfind(':')), ":", port);
}

absl::StatusOr<std::unique_ptr<grpc::Server>> StartServer(const std::string& listen,
                                                          proto::GrpcListener& listener,
                                                          WorkerService& service) {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  listener.AddTo(builder);
  builder.SetMaxReceiveMessageSize(proto::kMaxWorkerMessageBytes);
  builder.SetMaxSendMessageSize(proto::kMaxWorkerMessageBytes);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                             proto::kWorkerMinPingIntervalMs);
  builder.RegisterService(&service);
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) return absl::InternalError("gRPC cannot start its server");
  listener.Start();
  spdlog::info("listening on {}", BoundAddress(listen, listener.port()));
  return server;
}

absl::StatusOr<std::unique_ptr<proto::GrpcListener>> Listen(
    const std::string& address, const std::shared_ptr<proto::ServerTls>& tls,
    prometheus::Registry& registry, Readiness& readiness) {
  absl::StatusOr<std::unique_ptr<proto::GrpcListener>> listener = proto::GrpcListener::Listen(
      {.address = address,
       .tls = tls,
       .registry = &registry,
       .on_status = [&readiness](const absl::Status& status) { readiness.SetAccepting(status); }});
  if (listener.ok()) return listener;
  return absl::UnavailableError(
      absl::StrCat(listener.status().message(), "; choose another --listen"));
}

absl::StatusOr<std::unique_ptr<proto::MetricsEndpoint>> StartMetrics(
    const v1::WorkerConfig& config, const std::shared_ptr<proto::ServerTls>& tls,
    prometheus::Registry& registry, Readiness& readiness) {
  return proto::MetricsEndpoint::Start({.host = config.metrics_host(),
                                        .port = static_cast<int>(config.metrics_port()),
                                        .registry = &registry,
                                        .health = [&readiness] { return readiness.status(); },
                                        .tls = tls});
}

// Logs which kernels of the GPU serve which shapes.
void LogPlans() {
  if (!spdlog::should_log(spdlog::level::debug)) return;
  kernels::SetPlanSink([](absl::string_view op, absl::string_view plan) {
    spdlog::debug("{}: {}", std::string(op), std::string(plan));
  });
}

// Returns the group secret. INVALID_ARGUMENT without one where other machines reach the worker:
// whoever takes it is told the prompts that its disk tier stores.
absl::StatusOr<std::shared_ptr<const proto::GroupSecret>> ReadSecret(
    const v1::WorkerConfig& config) {
  if (config.group_secret_file().empty() && proto::IsOpenToOtherMachines(config.listen())) {
    return absl::InvalidArgumentError(
        absl::StrCat("--listen ", config.listen(), " is open to other machines and there is no ",
                     "--group-secret-file; give worker and coordinator the same file, which ",
                     "'(umask 077; openssl rand -hex 32 > FILE)' makes, or listen on 127.0.0.1"));
  }
  return proto::GroupSecret::Read(config.group_secret_file());
}

// Sets what the worker has to do with peers. INVALID_ARGUMENT without a secret where other machines
// reach it: whoever asks is given the KV of prompts.
absl::Status SetPeers(const v1::WorkerConfig& config, GroupMemberOptions& options) {
  if (config.peer_listen().empty()) return absl::OkStatus();
  if (config.peer_secret_file().empty() && proto::IsOpenToOtherMachines(config.peer_listen())) {
    return absl::InvalidArgumentError(
        absl::StrCat("--peer-listen ", config.peer_listen(),
                     " is open to other machines and there is no --peer-secret-file; give all ",
                     "replicas the same file, which '(umask 077; openssl rand -hex 32 > FILE)' ",
                     "makes, or listen on 127.0.0.1"));
  }
  options.peer_listen = config.peer_listen();
  options.peer_transports = config.peer_transports();
  KVASIR_ASSIGN_OR_RETURN(options.peer_secret, proto::GroupSecret::Read(config.peer_secret_file(),
                                                                        "--peer-secret-file"));
  return absl::OkStatus();
}

absl::Status RunWorker(const v1::WorkerConfig& config, StartTimes::Clock::time_point started) {
  StartTimes times(started);
  times.Enter("starting the process", started);
  umask(S_IRWXG | S_IRWXO);  // files of the disk tier hold prompts
  KVASIR_ASSIGN_OR_RETURN(std::shared_ptr<const proto::GroupSecret> secret, ReadSecret(config));
  GroupMemberOptions options;
  KVASIR_RETURN_IF_ERROR(SetPeers(config, options));
  const sigset_t end_signals = BlockEndSignals();
  std::signal(SIGPIPE, SIG_IGN);  // writing to a rank that was killed is an error of that write
  KVASIR_ASSIGN_OR_RETURN(const std::unique_ptr<proto::Logs> logs,
                          proto::Logs::Start("worker", config.logs()));
  LogPlans();
  KVASIR_RETURN_IF_ERROR(kernels::LimitCpuIsa(config.cpu_isa()));
  proto::IgnoreStraySignals();
  proto::RaiseDescriptorLimit();
  proto::ProcessRegistry registry;
  KVASIR_ASSIGN_OR_RETURN(const std::shared_ptr<proto::ServerTls> tls,
                          proto::ServerTls::Load(config.tls()));
  if (tls != nullptr) tls->ExportTo(registry);
  WorkerMetrics metrics(registry);
  ThreadPool executor(static_cast<int>(config.threads()));
  times.Enter("starting the device");
  KVASIR_ASSIGN_OR_RETURN(const std::unique_ptr<Backend> backend,
                          MakeBackend(config.device(), executor));
  times.Enter("listening");
  Readiness readiness;
  KVASIR_ASSIGN_OR_RETURN(const std::unique_ptr<proto::MetricsEndpoint> endpoint,
                          StartMetrics(config, tls, registry, readiness));
  options.metrics_address = absl::StrCat(config.metrics_host(), ":", endpoint->port());
  spdlog::info("metrics on {}", options.metrics_address);
  KVASIR_ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::HostMemory> memory,
                          kvstore::HostMemory::Open(config.kv_memory_file()));
  options.collective_host = config.collective_host();
  options.process_times = times;
  options.memory = memory.get();
  options.on_rank = [&logs](int64_t rank) { logs->set_rank(rank); };
  options.on_ready = [&readiness](bool ready) { readiness.Set(ready); };
  GroupMember member(std::move(options), *backend, metrics);
  KVASIR_ASSIGN_OR_RETURN(const std::unique_ptr<proto::GrpcListener> listener,
                          Listen(config.listen(), tls, registry, readiness));
  WorkerService service(
      {.secret = std::move(secret), .on_stuck = EndStuckProcess},
      [&member](CoordinatorStream& stream) { return member.Serve(stream); }, *listener);
  absl::StatusOr<std::unique_ptr<grpc::Server>> server =
      StartServer(config.listen(), *listener, service);
  if (server.ok()) {
    readiness.Attach((*server)->GetHealthCheckService());
    int signal = 0;
    sigwait(&end_signals, &signal);
    spdlog::info("signal {}: finishing the step in flight", signal);
    // A hanging disk may keep threads for ever.
    std::signal(SIGALRM, SIG_DFL);
    alarm(kLongestEndSeconds);
    service.Shutdown();
    readiness.Attach(nullptr);
    listener->Stop();
    (*server)->Shutdown(std::chrono::system_clock::now() + kShutdownGrace);
    (*server)->Wait();
    memory->Erase();  // the prompts in it are for a successor of a worker that was killed only
  } else {
    service.Shutdown();
  }
  return server.status();
}

// Tells whoever started this process. If the file cannot be written, nobody can be told.
void WriteFailure(const std::string& path, const absl::Status& status) {
  if (path.empty() || status.ok()) return;
  std::ofstream(path) << absl::StatusCodeToString(status.code()) << ": " << status.message();
}

absl::Status Main(int argc, char** argv) {
  const StartTimes::Clock::time_point started = StartTimes::Clock::now();
  if (argc > 1 && absl::string_view(argv[1]) == "--version") {
    std::printf("kvasir-worker %s\n", proto::Version().c_str());
    return absl::OkStatus();
  }
  v1::WorkerConfig config;
  KVASIR_ASSIGN_OR_RETURN(const proto::NextStep next,
                          proto::Configure(kCommand, argc, argv, 1, config));
  if (next == proto::NextStep::kExit) return absl::OkStatus();
  const absl::Status status = RunWorker(config, started);
  WriteFailure(config.failure_file(), status);
  return status;
}

}  // namespace
}  // namespace kvasir::worker

int main(int argc, char** argv) {
  const absl::Status status = kvasir::worker::Main(argc, argv);
  if (status.ok()) return EXIT_SUCCESS;
  std::fprintf(stderr, "kvasir-worker: %s\n", std::string(status.message()).c_str());
  return absl::IsInvalidArgument(status) ? 2 : EXIT_FAILURE;
}
