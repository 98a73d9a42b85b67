// Reads the parts of tokenizer.json except model and added tokens: normalizer, pre_tokenizer,
// post_processor and decoder, each of one kind or a Sequence of kinds. Called by tokenizer_json.cc
// only. Pure functions; all errors are INVALID_ARGUMENT.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "coordinator/tokenizer/json_value.h"
#include "coordinator/tokenizer/normalizer.h"
#include "coordinator/tokenizer/pre_tokenizer.h"

namespace kvasir::coordinator {

absl::StatusOr<Normalizer> ReadNormalizer(const JsonValue& normalizer);

// Symbols of a vocabulary.
enum class Alphabet {
  kBytes,       // every byte is written as one character (ByteLevel)
  kCharacters,  // characters, as SentencePiece makes them
};

struct PreTokenizerParts {
  std::vector<PreTokenizer::Stage> stages;
  Alphabet alphabet = Alphabet::kCharacters;  // kBytes: ByteLevel came, once and last
};
absl::StatusOr<PreTokenizerParts> ReadPreTokenizer(const JsonValue& pre_tokenizer);

struct Template {
  std::vector<int32_t> prefix_ids;
  std::vector<int32_t> suffix_ids;
};
// Returns ids below `max_tokens`. The caller checks that they exist.
absl::StatusOr<Template> ReadPostProcessor(const JsonValue& post_processor, int64_t max_tokens);

// How tokens become text, unless they are symbols of bytes.
struct DecoderRules {
  std::vector<Normalizer::Replace> replacements;  // in each token, in order
  // A character that stands for nothing in the first token of a text, whatever `replacements` say;
  // empty if there is none.
  std::string dropped_in_first_token;
  bool byte_fallback = false;  // "<0x41>" is the byte 0x41
  std::string stripped;        // a character that is taken off the begin of a text
  int64_t max_stripped = 0;    // as often as this
};
// Returns empty rules for the byte-level decoder, which goes with Alphabet::kBytes only.
absl::StatusOr<DecoderRules> ReadDecoder(const JsonValue& decoder, Alphabet alphabet);

}  // namespace kvasir::coordinator
