// Reads the parts of tokenizer.json except model and added tokens: normalizer, pre_tokenizer,
// post_processor and decoder, each of one kind or a Sequence of kinds. Called by tokenizer_json.cc
// only. Pure functions; all errors are INVALID_ARGUMENT.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "coordinator/tokenizer/json_value.h"
#include "coordinator/tokenizer/pre_tokenizer.h"

namespace kvasir::coordinator {

// Returns whether NFC is applied.
absl::StatusOr<bool> ReadNormalizer(const JsonValue& normalizer);

// Returns the stages before the mapping of bytes to symbols, which must come once and last.
absl::StatusOr<std::vector<PreTokenizer::Stage>> ReadPreTokenizer(const JsonValue& pre_tokenizer);

struct Template {
  std::vector<int32_t> prefix_ids;
  std::vector<int32_t> suffix_ids;
};
// Returns ids below `max_tokens`. The caller checks that they exist.
absl::StatusOr<Template> ReadPostProcessor(const JsonValue& post_processor, int64_t max_tokens);

// OK for the byte-level decoder.
absl::Status CheckDecoder(const JsonValue& decoder);

}  // namespace kvasir::coordinator
