// `kvasir serve`: starts the local workers (or joins those named by --workers), then the
// coordinator, and drains both on SIGTERM or SIGINT.
#pragma once

#include "absl/status/status.h"

#include "proto/kvasir/v1/config.pb.h"

namespace kvasir::coordinator {

// Serves, and returns when the server has shut down. OK after a clean drain.
absl::Status RunServe(const v1::ServeConfig& config);

}  // namespace kvasir::coordinator
