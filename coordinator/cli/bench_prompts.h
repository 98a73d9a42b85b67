// Prompts for `kvasir bench`: generated text of an exact number of tokens, or documents with their
// questions. Pure functions but for the server's tokenizer. Thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "proto/kvasir/v1/generation.grpc.pb.h"

namespace kvasir::coordinator {

// Words of a few syllables, at least `bytes` long; another seed gives another text from its first
// word on, so that no prefix is shared.
std::string RandomText(int64_t bytes, uint64_t seed);

// Exactly `num_tokens` tokens of random text, by the server's tokenizer.
absl::StatusOr<std::vector<uint32_t>> RandomTokens(v1::Generation::Stub& stub, int64_t num_tokens,
                                                   uint64_t seed, absl::Duration timeout);

// Each document with each of its questions behind it. `path` holds what tests/model/documents.py
// writes: one JSON object {"text", "questions": [{"prompt"}]} or a list of them. NOT_FOUND,
// INVALID_ARGUMENT.
absl::StatusOr<std::vector<std::string>> DocumentPrompts(const std::string& path);

}  // namespace kvasir::coordinator
