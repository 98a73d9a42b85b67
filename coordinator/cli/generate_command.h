// `kvasir generate`: sends one prompt to a running server, shows how far the prompt has been read,
// streams the answer to standard output and prints a summary to standard error at the end.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "proto/kvasir/v1/config.pb.h"
#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::coordinator {

absl::Status RunGenerate(const v1::GenerateCommandConfig& config);

// INVALID_ARGUMENT for texts that are not UTF-8 and lists that cannot be parsed.
absl::StatusOr<v1::GenerateRequest> MakeGenerateRequest(const v1::GenerateCommandConfig& config,
                                                        std::string prompt);

// Returns a line for each token that has log probabilities.
std::string LogprobLines(const v1::Tokens& tokens);
std::string LogprobLines(const v1::PromptLogprobs& prompt);

// Returns the summary that is printed at the end.
std::string FinishSummary(const v1::Finish& finish);

}  // namespace kvasir::coordinator
