#include "coordinator/cli/local_workers.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "spdlog/spdlog.h"

#include "coordinator/cli/oom_kills.h"
#include "coordinator/group/peer_list.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "proto/process/named_thread.h"
#include "proto/security/group_secret.h"

namespace kvasir::coordinator {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Pauses before a worker is started again: none after a run of kStableAfter or more, then the
// first, which doubles with every shorter run.
constexpr milliseconds kFirstBackoff(100);
constexpr milliseconds kLongestBackoff(10'000);
constexpr milliseconds kStableAfter(10'000);
constexpr milliseconds kKillGrace(5'000);  // a killed process ends late when its disk hangs
constexpr milliseconds kPoll(10);

struct Process {
  int64_t rank = 0;
  std::string failure_file;  // file that it writes when it ends with an error
  std::vector<std::string> argv;
  std::vector<std::string> environment;
  int kv_memory = -1;  // of the host tier, for one process after another
  pid_t pid = -1;
  Clock::time_point started = {};
  Clock::time_point restart_at = {};
  milliseconds backoff{0};
};

// Returns why a process ended: its own message if it left one.
absl::Status EndOf(const Process& process, int wait_status) {
  std::ifstream file(process.failure_file);
  std::string words((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (words.empty()) {
    words =
        absl::StrCat(WIFSIGNALED(wait_status) ? "signal " : "exit code ",
                     WIFSIGNALED(wait_status) ? WTERMSIG(wait_status) : WEXITSTATUS(wait_status),
                     "; see its log");
  }
  return absl::FailedPreconditionError(absl::StrCat("worker ", process.rank, " ended: ", words));
}

// Returns this process's environment. A `gpu` that is not empty is the only one visible in it.
std::vector<std::string> EnvironmentWith(const std::string& gpu) {
  constexpr absl::string_view kVisible = "CUDA_VISIBLE_DEVICES=";
  std::vector<std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    if (gpu.empty() || !absl::StartsWith(*variable, kVisible)) variables.push_back(*variable);
  }
  if (!gpu.empty()) variables.push_back(absl::StrCat(kVisible, gpu));
  return variables;
}

// Returns `texts` as execve takes them.
std::vector<char*> Pointers(const std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (const std::string& text : texts) pointers.push_back(const_cast<char*>(text.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

absl::StatusOr<pid_t> Spawn(const Process& process) {
  const std::vector<char*> argv = Pointers(process.argv);
  const std::vector<char*> environment = Pointers(process.environment);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) {
    return absl::InternalError(absl::StrCat("cannot start a worker: ", std::strerror(errno)));
  }
  if (pid == 0) {
    // A worker ends with the server, even when the server is killed.
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) _exit(1);
    // The server blocks the signals it waits for; its children must not inherit that.
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    // Ctrl-C goes to the server, which drains before it ends its workers.
    setpgid(0, 0);
    fcntl(process.kv_memory, F_SETFD, 0);  // not closed by execve
    execve(argv[0], argv.data(), environment.data());
    _exit(127);
  }
  return pid;
}

// Makes memory that has no name and ends with this process and its workers.
absl::StatusOr<int> MakeKvMemory() {
  const int memory = memfd_create("kvasir-kv", MFD_CLOEXEC);
  if (memory >= 0) return memory;
  return absl::InternalError(
      absl::StrCat("cannot make the memory of a worker's KV: ", std::strerror(errno)));
}

// Makes a private folder with a path short enough for addresses of unix sockets.
absl::StatusOr<std::string> MakeSocketFolder() {
  constexpr size_t kLongest = sizeof(sockaddr_un::sun_path) - sizeof("/worker-1023.sock");
  std::error_code error;
  const fs::path temporary = fs::temp_directory_path(error);
  std::string pattern = (temporary / "kvasir-XXXXXX").string();
  if (error || pattern.size() > kLongest) {
    const char* variable = getenv("TMPDIR");
    return absl::InvalidArgumentError(absl::StrCat(
        "no folder for the sockets of the workers: TMPDIR is '",
        variable == nullptr ? "" : variable, "', ",
        error ? error.message() : absl::StrCat("too long by ", pattern.size() - kLongest),
        "; set it to a folder with a short path, such as /tmp"));
  }
  if (mkdtemp(pattern.data()) == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        "cannot make ", pattern, " for the sockets of the workers: ", std::strerror(errno),
        "; set TMPDIR to a folder that can be written"));
  }
  return pattern;
}

class LocalWorkerProcesses : public LocalWorkers {
 public:
  ~LocalWorkerProcesses() override {
    {
      kernels::MutexLock lock(mu_);
      stopping_ = true;
    }
    changed_.NotifyAll();
    if (watcher_.joinable()) watcher_.join();
    StopAll();
    for (const Process& process : processes_) close(process.kv_memory);
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }

  absl::Status StartAll(const LocalWorkersOptions& options) {
    KVASIR_ASSIGN_OR_RETURN(folder_, MakeSocketFolder());
    KVASIR_RETURN_IF_ERROR(proto::GroupSecret::Make(group_secret_file()));
    grace_ = absl::ToChronoMilliseconds(options.grace);
    for (int64_t rank = 0; rank < options.count; ++rank) {
      addresses_.push_back(absl::StrCat("unix:", folder_, "/worker-", rank, ".sock"));
      const int64_t port = options.metrics_port == 0 ? 0 : options.metrics_port + rank;
      std::string peer_listen;
      if (!options.peer_listen.empty()) {
        KVASIR_ASSIGN_OR_RETURN(peer_listen, PeerAddressOfRank(options.peer_listen, rank));
      }
      const std::string failure_file = absl::StrCat(folder_, "/worker-", rank, ".failure");
      KVASIR_ASSIGN_OR_RETURN(const int kv_memory, MakeKvMemory());
      processes_.push_back(
          {.rank = rank,
           .failure_file = failure_file,
           .argv = {options.program, absl::StrCat("--listen=", addresses_.back()),
                    absl::StrCat("--threads=", options.threads),
                    absl::StrCat("--device=", options.device),
                    absl::StrCat("--cpu-isa=", options.cpu_isa),
                    absl::StrCat("--log-level=", options.logs.log_level()),
                    absl::StrCat("--log-format=", options.logs.log_format()),
                    absl::StrCat("--metrics-host=", options.metrics_host),
                    absl::StrCat("--metrics-port=", port),
                    absl::StrCat("--tls-cert-file=", options.metrics_tls.tls_cert_file()),
                    absl::StrCat("--tls-key-file=", options.metrics_tls.tls_key_file()),
                    absl::StrCat("--tls-client-ca-file=", options.metrics_tls.tls_client_ca_file()),
                    absl::StrCat("--group-secret-file=", group_secret_file()),
                    absl::StrCat("--peer-listen=", peer_listen),
                    absl::StrCat("--peer-transports=", options.peer_transports),
                    absl::StrCat("--peer-secret-file=", options.peer_secret_file),
                    absl::StrCat("--failure-file=", failure_file),
                    absl::StrCat("--kv-memory-file=/proc/self/fd/", kv_memory)},
           .environment =
               EnvironmentWith(options.gpus.empty() ? "" : options.gpus[static_cast<size_t>(rank)]),
           .kv_memory = kv_memory});
    }
    // PR_SET_PDEATHSIG fires when the *thread* that forked ends, so the watcher starts all
    // workers: it lives as long as this object.
    watcher_ = proto::NamedThread("worker-watch", [this] { Watch(); });
    kernels::MutexLock lock(mu_);
    while (!first_round_done_) changed_.Wait(mu_);
    return start_status_;
  }

  std::string group_secret_file() const override { return absl::StrCat(folder_, "/group-secret"); }
  const std::vector<std::string>& addresses() const override { return addresses_; }
  absl::Status first_end() const override EXCLUDES(mu_) {
    kernels::MutexLock lock(mu_);
    return first_end_;
  }

 private:
  void Watch() {
    absl::Status status;
    for (Process& process : processes_) status.Update(Launch(process));
    kernels::MutexLock lock(mu_);
    start_status_ = status;
    first_round_done_ = true;
    changed_.NotifyAll();
    while (!stopping_) {
      changed_.WaitUntil(mu_, Clock::now() + kPoll);
      for (Process& process : processes_) Revive(process);
    }
  }

  absl::Status Launch(Process& process) {
    std::remove(process.failure_file.c_str());
    KVASIR_ASSIGN_OR_RETURN(process.pid, Spawn(process));
    process.started = Clock::now();
    return absl::OkStatus();
  }

  // Notices when a worker has died, and starts it again when its back-off is over.
  void Revive(Process& process) REQUIRES(mu_) {
    const Clock::time_point now = Clock::now();
    int status = 0;
    if (process.pid > 0 && waitpid(process.pid, &status, WNOHANG) == process.pid) {
      process.pid = -1;
      if (now - process.started > kStableAfter) process.backoff = milliseconds(0);
      process.restart_at = now + process.backoff;
      const absl::Status end = EndOf(process, status);
      first_end_.Update(end);
      spdlog::error("{}; starting it again after {} ms", std::string(end.message()),
                    process.backoff.count());
      if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && oom_kills_.TakeNew()) {
        spdlog::error(
            "the kernel killed it for lack of memory: lower --kv-host-size-gb or "
            "--kv-device-size-gb, or raise the limit of this container");
      }
      process.backoff = std::clamp(process.backoff * 2, kFirstBackoff, kLongestBackoff);
    }
    if (process.pid > 0 || now < process.restart_at) return;
    if (const absl::Status launched = Launch(process); !launched.ok()) {
      spdlog::error("{}", std::string(launched.message()));
      process.restart_at = now + std::max(process.backoff, kFirstBackoff);
    }
  }

  void StopAll() {
    for (const Process& process : processes_) {
      if (process.pid > 0) kill(process.pid, SIGTERM);
    }
    // In this time a worker writes to disk the blocks that it has accepted.
    const Clock::time_point deadline = Clock::now() + grace_;
    for (Process& process : processes_) {
      while (process.pid > 0 && waitpid(process.pid, nullptr, WNOHANG) == 0) {
        if (Clock::now() > deadline) kill(process.pid, SIGKILL);
        if (Clock::now() > deadline + kKillGrace) {
          spdlog::error("worker process {} does not end though it was killed; left to the system",
                        process.pid);
          break;
        }
        std::this_thread::sleep_for(milliseconds(10));
      }
    }
  }

  std::string folder_;
  milliseconds grace_{0};
  std::vector<std::string> addresses_;
  std::vector<Process> processes_;  // the watcher thread owns them while it runs
  OomKills oom_kills_;              // the watcher thread's
  std::thread watcher_;

  mutable kernels::Mutex mu_;
  kernels::CondVar changed_;
  bool stopping_ GUARDED_BY(mu_) = false;
  bool first_round_done_ GUARDED_BY(mu_) = false;
  absl::Status start_status_ GUARDED_BY(mu_);
  absl::Status first_end_ GUARDED_BY(mu_);
};

}  // namespace

absl::StatusOr<std::unique_ptr<LocalWorkers>> LocalWorkers::Start(
    const LocalWorkersOptions& options) {
  auto workers = std::make_unique<LocalWorkerProcesses>();
  KVASIR_RETURN_IF_ERROR(workers->StartAll(options));
  return std::unique_ptr<LocalWorkers>(std::move(workers));
}

absl::StatusOr<std::string> FindWorkerProgram() {
  std::error_code error;
  const fs::path self = fs::read_symlink("/proc/self/exe", error);
  const fs::path beside = self.parent_path() / "kvasir-worker";
  // In the build tree every program is in the folder of its part.
  const fs::path built = self.parent_path().parent_path() / "worker" / "kvasir-worker";
  for (const fs::path& candidate : {beside, built}) {
    if (access(candidate.c_str(), X_OK) == 0) return candidate.string();
  }
  return absl::NotFoundError(
      "kvasir-worker is not beside this program; start workers yourself and name them by "
      "--workers");
}

}  // namespace kvasir::coordinator
