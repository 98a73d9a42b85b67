// The parts of tokenizer.json beside model and added tokens: normalizer, pre_tokenizer,
// post_processor and decoder, each of them one kind or a Sequence of kinds. Called by
// tokenizer_json.cc only. Pure functions; all errors are INVALID_ARGUMENT.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "coordinator/tokenizer/json_value.h"
#include "coordinator/tokenizer/pre_tokenizer.h"

namespace kvasir::coordinator {

// Is NFC applied?
absl::StatusOr<bool> ReadNormalizer(const JsonValue& normalizer);

// The stages up to the mapping of bytes to symbols, which must come once and last.
absl::StatusOr<std::vector<PreTokenizer::Stage>> ReadPreTokenizer(const JsonValue& pre_tokenizer);

struct Template {
  std::vector<int32_t> prefix_ids;
  std::vector<int32_t> suffix_ids;
};
// Ids are below `max_tokens`; whether they exist is for the caller to check.
absl::StatusOr<Template> ReadPostProcessor(const JsonValue& post_processor, int64_t max_tokens);

// OK when it is the byte-level decoder.
absl::Status CheckDecoder(const JsonValue& decoder);

}  // namespace kvasir::coordinator
