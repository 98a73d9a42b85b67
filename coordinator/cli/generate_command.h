// `kvasir generate`: sends one prompt to a running server, shows how far the prompt has been read,
// streams the answer to standard output and sums up at the end on standard error.
#pragma once

#include "absl/status/status.h"

#include "proto/kvasir/v1/config.pb.h"

namespace kvasir::coordinator {

absl::Status RunGenerate(const v1::GenerateCommandConfig& config);

}  // namespace kvasir::coordinator
