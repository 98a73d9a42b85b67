// Sends what UCX logs to this process's log, of which it would else print on standard output.
#pragma once

namespace kvasir::kvstore {

// From the first call on. Thread-safe.
void RouteUcxLogs();

}  // namespace kvasir::kvstore
