// `kvasir bench`: puts load on a running server and measures its answers.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

#include "coordinator/cli/calls/load_client.h"
#include "proto/kvasir/v1/config.pb.h"

namespace kvasir::coordinator {

// Runs the command. FAILED_PRECONDITION when the scenario of --long-prompt-tokens missed its bound.
absl::Status RunBench(const v1::BenchCommandConfig& config);

// Returns the table for a load that took `wall`.
std::string BenchTable(const std::vector<TimedStream>& streams, absl::Duration wall);
// Returns the same as one line of JSON.
std::string BenchJson(const std::vector<TimedStream>& streams, absl::Duration wall);

}  // namespace kvasir::coordinator
