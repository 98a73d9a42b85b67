// WorkerClient over gRPC: waits for a worker that is not up yet, and pings, so that one that is
// dead, stopped or out of reach is noticed in seconds. Thread-safe.
#pragma once

#include "coordinator/worker_client.h"

namespace kvasir::coordinator {

struct WorkerPings {
  int interval_ms = 1250;
  int timeout_ms = 3750;
};

// Addresses are HOST:PORT or unix:PATH.
WorkerDialer GrpcWorkerDialer(WorkerPings pings = {});

}  // namespace kvasir::coordinator
