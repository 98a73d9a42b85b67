// Prompts for `kvasir bench`: generated text of an exact number of tokens, or documents with their
// questions. Pure functions, except that they ask the server to tokenize. Thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "proto/kvasir/v1/generation.grpc.pb.h"

namespace kvasir::coordinator {

// Returns at least `bytes` of words of a few syllables. Texts of different seeds differ from the
// first word on, so that no prefix is shared.
std::string RandomText(int64_t bytes, uint64_t seed);

// Returns exactly `num_tokens` tokens of random text, tokenized by the server.
absl::StatusOr<std::vector<uint32_t>> RandomTokens(v1::Generation::Stub& stub, int64_t num_tokens,
                                                   uint64_t seed, absl::Duration timeout);

// Returns a prompt for each question: its document, then the question. `path` is a file of
// tests/model/documents.py: one JSON object {"text", "questions": [{"prompt"}]} or a list of them.
// NOT_FOUND without the file, INVALID_ARGUMENT for other content.
absl::StatusOr<std::vector<std::string>> DocumentPrompts(const std::string& path);

}  // namespace kvasir::coordinator
