// `kvasir chat`: a conversation with the model of a running server. Called by main.
#pragma once

#include "absl/status/status.h"

#include "proto/kvasir/v1/config.pb.h"

namespace kvasir::coordinator {

// Reads messages and commands from standard input, one a line, until it ends; answers go to
// standard output, everything else to standard error. On a terminal errors of an answer are shown
// and the conversation goes on; otherwise the first one ends it.
absl::Status RunChat(const v1::ChatCommandConfig& config);

}  // namespace kvasir::coordinator
