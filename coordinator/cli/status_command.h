// `kvasir status`: asks a running server for its state and prints a table.
#pragma once

#include <string>

#include "absl/status/status.h"

#include "proto/kvasir/v1/config.pb.h"
#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::coordinator {

absl::Status RunStatus(const v1::StatusCommandConfig& config);

// Returns the table to print. `model` is null while no worker group is formed.
std::string StatusTable(const v1::GetServerInfoResponse& server,
                        const v1::GetModelInfoResponse* model);

}  // namespace kvasir::coordinator
