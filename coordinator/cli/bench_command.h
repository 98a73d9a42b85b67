// `kvasir bench`: load for a running server, and what it makes of it.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

#include "coordinator/cli/load_client.h"
#include "proto/kvasir/v1/config.pb.h"

namespace kvasir::coordinator {

// FAILED_PRECONDITION when the scenario of --long-prompt-tokens missed its bound.
absl::Status RunBench(const v1::BenchCommandConfig& config);

// The table of a load of `wall` seconds.
std::string BenchTable(const std::vector<TimedStream>& streams, absl::Duration wall);

}  // namespace kvasir::coordinator
