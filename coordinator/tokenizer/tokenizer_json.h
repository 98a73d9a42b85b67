// Reads the text of a Hugging Face tokenizer.json into a TokenizerSpec. Everything in the file that
// would change ids or text is either honoured, or refused with a message that says what was found
// and what is supported. The file is untrusted, so sizes, ids and merges are checked. Called by
// Tokenizer only. Pure function.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "coordinator/tokenizer/added_tokens.h"
#include "coordinator/tokenizer/bpe.h"
#include "coordinator/tokenizer/normalizer.h"
#include "coordinator/tokenizer/pipeline_json.h"
#include "coordinator/tokenizer/pre_tokenizer.h"

namespace kvasir::coordinator {

struct TokenizerLimits {
  int64_t max_file_bytes = int64_t{64} << 20;
  int64_t max_tokens = int64_t{1} << 19;  // vocabulary and added tokens; every id is less
  int64_t max_merges = int64_t{1} << 20;
};

struct TokenizerSpec {
  struct Token {
    std::string content;      // as in the file; empty if no token has this id
    std::string bytes;        // decoded form, inside a text
    std::string first_bytes;  // and as the first token of one, if DecoderRules tell them apart
    bool special = false;
  };

  std::vector<Token> tokens;  // by id
  BpeModel::Params bpe;
  Alphabet alphabet = Alphabet::kBytes;
  DecoderRules decoder;
  // A piece of n bytes has at least n / this tokens; unset if there is no such bound.
  std::optional<size_t> max_token_bytes;
  Normalizer normalizer;
  std::vector<AddedToken> raw_added_tokens;         // matched before normalization
  std::vector<AddedToken> normalized_added_tokens;  // and after; contents are normalized
  std::vector<PreTokenizer::Stage> stages;
  // Ids that the post-processor puts before and after those of a text.
  std::vector<int32_t> prefix_ids;
  std::vector<int32_t> suffix_ids;
};

// Errors: INVALID_ARGUMENT.
absl::StatusOr<TokenizerSpec> ReadTokenizerJson(absl::string_view json,
                                                const TokenizerLimits& limits);

}  // namespace kvasir::coordinator
