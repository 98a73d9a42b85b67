// WorkerClient over gRPC, to workers that prove the group secret: before that nothing is told them.
// It waits for a worker that is not up yet. It pings, so that it notices in
// seconds when a worker is dead, stopped or out of reach. Thread-safe.
#pragma once

#include <memory>

#include "coordinator/group/worker_client.h"
#include "proto/security/group_secret.h"
#include "proto/security/tls.h"

namespace kvasir::coordinator {

struct WorkerPings {
  int interval_ms = 1250;
  int timeout_ms = 3750;
};

// Returns a dialer for addresses HOST:PORT and unix:PATH. Each stream has a channel with the
// credentials that `tls` gives at that time.
WorkerDialer GrpcWorkerDialer(std::shared_ptr<const proto::GroupSecret> secret,
                              std::shared_ptr<proto::ChannelTls> tls, WorkerPings pings = {});

}  // namespace kvasir::coordinator
