// Converts text to token ids and back, by a Hugging Face tokenizer.json with a BPE model: of bytes
// (e.g. GPT-2, Llama 3, Qwen2), or of characters as converted from SentencePiece (e.g. Llama 2,
// Mistral, Gemma). Gives the same ids as the `tokenizers` library. Hides the file
// format, normalization, added tokens, splitting and merging. Called by the coordinator's service.
// Immutable after loading, so one Tokenizer serves all threads. Time is linear in the text, n log n
// within one pre-token.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "coordinator/tokenizer/added_tokens.h"
#include "coordinator/tokenizer/bpe.h"
#include "coordinator/tokenizer/normalizer.h"
#include "coordinator/tokenizer/pipeline_json.h"
#include "coordinator/tokenizer/pre_tokenizer.h"
#include "coordinator/tokenizer/tokenizer_json.h"
#include "coordinator/tokenizer/unicode/utf8.h"

namespace kvasir::coordinator {

// Whether decoding keeps special tokens.
enum class SpecialTokens { kKeep, kSkip };

struct EncodeOptions {
  // Whether the post-processor puts its tokens (usually a begin of text) around the ids.
  bool add_special_tokens = true;
  // Whether the text of a special token becomes that token; by default it does, as in Hugging
  // Face's library. Added tokens that are not special are always found.
  SpecialTokenText special_token_text = SpecialTokenText::kParse;
  // Bytes of the text in which special tokens stay text all the same: in order, disjoint. Borrowed
  // for the call.
  absl::Span<const TextSpan> plain_spans = {};
  // More ids than this, including those of the post-processor, are an error.
  int64_t max_tokens = std::numeric_limits<int64_t>::max();
};

class Tokenizer {
 public:
  // `path` is a tokenizer.json or the folder of a model that has one. Errors: NOT_FOUND,
  // INVALID_ARGUMENT for a file that is not supported or exceeds `limits`.
  static absl::StatusOr<std::unique_ptr<const Tokenizer>> Load(const std::string& path,
                                                               const TokenizerLimits& limits = {});
  static absl::StatusOr<std::unique_ptr<const Tokenizer>> Parse(absl::string_view json,
                                                                const TokenizerLimits& limits = {});

  // Errors: INVALID_ARGUMENT for invalid UTF-8 (with the byte offset) and for more than
  // options.max_tokens ids, after which little more is read; RESOURCE_EXHAUSTED when the splitting
  // pattern reaches its limits.
  absl::StatusOr<std::vector<int32_t>> Encode(absl::string_view text,
                                              const EncodeOptions& options = {}) const;

  // Bytes that are not UTF-8 become U+FFFD. (In a run of byte-fallback tokens that is not UTF-8
  // Hugging Face's library replaces all bytes, here well-formed characters stay, so that they can
  // be streamed.) Errors: INVALID_ARGUMENT for an id without a token.
  absl::StatusOr<std::string> Decode(absl::Span<const int32_t> ids,
                                     SpecialTokens special_tokens) const;

  // Returns the largest id plus one. A model may have more rows (padding); their ids have no token.
  int64_t vocab_size() const { return static_cast<int64_t>(tokens_.size()); }
  // The functions below take any id. An id without a token has no bytes and is not special.
  bool HasToken(int32_t id) const { return !TokenContent(id).empty(); }
  bool IsSpecial(int32_t id) const;
  // Return the bytes that the token decodes to inside a text, and its form in tokenizer.json.
  absl::string_view TokenBytes(int32_t id) const;
  absl::string_view TokenContent(int32_t id) const;
  // Returns the bytes that the token decodes to as the first one of a text, before
  // decoder_rules().stripped is taken off.
  absl::string_view FirstTokenBytes(int32_t id) const;
  // Returns how bytes that are no UTF-8 are replaced.
  Replacement replacement() const {
    return alphabet_ == Alphabet::kBytes ? Replacement::kSubpart : Replacement::kByte;
  }
  const DecoderRules& decoder_rules() const { return decoder_; }
  // Returns the id of a token in the form of tokenizer.json, e.g. "<|end_of_text|>".
  std::optional<int32_t> TokenId(absl::string_view content) const;

 private:
  class Encoding;  // one call of Encode

  explicit Tokenizer(TokenizerSpec spec);
  const TokenizerSpec::Token* Find(int32_t id) const;

  std::vector<TokenizerSpec::Token> tokens_;  // by id
  absl::flat_hash_map<std::string, int32_t> ids_;
  Alphabet alphabet_;
  DecoderRules decoder_;
  std::optional<size_t> max_token_bytes_;
  Normalizer normalizer_;
  AddedTokens raw_added_tokens_;
  AddedTokens normalized_added_tokens_;
  PreTokenizer pre_tokenizer_;
  BpeModel bpe_;
  std::vector<int32_t> prefix_ids_;
  std::vector<int32_t> suffix_ids_;
};

}  // namespace kvasir::coordinator
