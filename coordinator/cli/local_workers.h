// The worker processes that `kvasir serve` starts on its own machine: one `kvasir-worker` a rank,
// listening on unix sockets in a private folder. A worker that dies is started again after a
// back-off (0.1 to 10 s); all end with this object, and with this process whatever kills it.
// Thread-compatible.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace kvasir::coordinator {

struct LocalWorkersOptions {
  std::string program;  // path of kvasir-worker
  int64_t count = 1;    // ranks
  int64_t threads = 1;  // kernel threads of each
  std::string device;   // that they compute on: "cpu", "cuda"
  std::string cpu_isa;  // of their CPU kernels: "auto", "avx2", ...
  // Of "cuda": the GPU of each, as CUDA_VISIBLE_DEVICES names it.
  std::vector<std::string> gpus = {};
  std::string metrics_host;
  int64_t metrics_port = 0;                  // of the first, the others follow; 0: any free ones
  absl::Duration grace = absl::Seconds(30);  // to end after SIGTERM
};

class LocalWorkers {
 public:
  // NOT_FOUND without the program, INTERNAL when a process cannot be started.
  static absl::StatusOr<std::unique_ptr<LocalWorkers>> Start(const LocalWorkersOptions& options);
  virtual ~LocalWorkers() = default;  // SIGTERM, then SIGKILL after the grace
  // and 5 s for that: one that waits for a hung disk is left to the system
  // "unix:/..." of each rank.
  virtual const std::vector<std::string>& addresses() const = 0;
  // OK as long as all have run since the start; then why the first one ended, which is started
  // again all the same: FAILED_PRECONDITION with what it said, or with its exit code or signal.
  virtual absl::Status first_end() const = 0;
};

// Path of kvasir-worker beside the running program.
absl::StatusOr<std::string> FindWorkerProgram();

}  // namespace kvasir::coordinator
