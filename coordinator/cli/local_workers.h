// The worker processes that `kvasir serve` starts on its own machine: one `kvasir-worker` per rank,
// listening on unix sockets in a private folder. A worker that dies is started again: at once, or
// after a back-off (0.1 to 10 s) when it dies again soon. The memory of its host tier belongs to
// this object, so that the next process finds its KV there. All end with this object, and with this
// process whatever kills it. Thread-compatible.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "proto/kvasir/v1/config.pb.h"

namespace kvasir::coordinator {

struct LocalWorkersOptions {
  std::string program;  // path of kvasir-worker
  int64_t count = 1;    // number of ranks
  int64_t threads = 1;  // kernel threads per rank
  std::string device;   // "cpu" or "cuda"
  std::string cpu_isa;  // for CPU kernels: "auto", "avx2", ...
  v1::LogConfig logs = {};
  // GPU of each rank, as CUDA_VISIBLE_DEVICES names it; for device "cuda".
  std::vector<std::string> gpus = {};
  std::string metrics_host;
  int64_t metrics_port = 0;  // of rank 0, the other ranks follow; 0: any free ports
  v1::TlsServerConfig metrics_tls = {};
  std::string peer_listen = {};              // of rank 0, the other ranks follow; empty: no peers
  std::string peer_transports = {};          // UCX's names; used with peer_listen
  std::string peer_secret_file = {};         // empty: none
  absl::Duration grace = absl::Seconds(30);  // time to end after SIGTERM
};

class LocalWorkers {
 public:
  // Starts all ranks. NOT_FOUND without the program, INTERNAL when a process cannot be started.
  static absl::StatusOr<std::unique_ptr<LocalWorkers>> Start(const LocalWorkersOptions& options);
  // Sends SIGTERM, after the grace SIGKILL, and waits 5 s more. A process that waits for a hung
  // disk is left to the system.
  virtual ~LocalWorkers() = default;
  // Returns the file with the random secret of the group, which ends with this object.
  virtual std::string group_secret_file() const = 0;
  // Returns the address of each rank: "unix:/...".
  virtual const std::vector<std::string>& addresses() const = 0;
  // Returns OK while all have run since the start. Otherwise the reason of the first end, although
  // that worker is started again: FAILED_PRECONDITION with its message, exit code or signal.
  virtual absl::Status first_end() const = 0;
};

// Returns the path of kvasir-worker beside the running program.
absl::StatusOr<std::string> FindWorkerProgram();

}  // namespace kvasir::coordinator
