#include "coordinator/tokenizer/tokenizer.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "coordinator/tokenizer/incremental_decoder.h"
#include "coordinator/tokenizer/unicode/utf8.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

// BPE has positions of 32 bits, and normalization may lengthen a text threefold.
constexpr size_t kMaxTextBytes = size_t{512} << 20;
// Merging takes about 40 bytes of memory per byte of a pre-token. Pre-tokens of text are words;
// only a run of one kind of character gets this long.
constexpr size_t kMaxPieceBytes = size_t{8} << 20;

absl::StatusOr<std::string> ReadFile(const std::filesystem::path& path, int64_t max_bytes) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) {
    if (std::filesystem::exists(path.parent_path() / "tokenizer.model", error)) {
      return absl::InvalidArgumentError(
          absl::StrCat(path.parent_path().string(), " has a SentencePiece tokenizer.model and no ",
                       "tokenizer.json; make one with "
                       "AutoTokenizer.from_pretrained(...).save_pretrained(...) of "
                       "the Python package transformers"));
    }
    return absl::NotFoundError(absl::StrCat("tokenizer file ", path.string(), " does not exist"));
  }
  if (!std::filesystem::is_regular_file(path, error)) {
    return absl::InvalidArgumentError(absl::StrCat(path.string(), " is not a regular file"));
  }
  std::ifstream file(path, std::ios::binary);
  // One byte more than the limit shows that a file is too long, whatever size it claims to have.
  std::string text(static_cast<size_t>(std::min<uintmax_t>(std::filesystem::file_size(path, error),
                                                           static_cast<uintmax_t>(max_bytes))) +
                       1,
                   '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!file.is_open() || file.bad()) {
    return absl::UnavailableError(absl::StrCat("cannot read ", path.string()));
  }
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.size() > static_cast<size_t>(max_bytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path.string(), " has more than the allowed ", max_bytes, " bytes"));
  }
  return text;
}

}  // namespace

absl::StatusOr<std::unique_ptr<const Tokenizer>> Tokenizer::Load(const std::string& path,
                                                                 const TokenizerLimits& limits) {
  std::filesystem::path file = path;
  std::error_code error;
  if (std::filesystem::is_directory(file, error)) file /= "tokenizer.json";
  KVASIR_ASSIGN_OR_RETURN(const std::string text, ReadFile(file, limits.max_file_bytes));
  auto tokenizer = Parse(text, limits);
  if (tokenizer.ok()) return tokenizer;
  return absl::Status(tokenizer.status().code(),
                      absl::StrCat(file.string(), ": ", tokenizer.status().message()));
}

absl::StatusOr<std::unique_ptr<const Tokenizer>> Tokenizer::Parse(absl::string_view json,
                                                                  const TokenizerLimits& limits) {
  KVASIR_ASSIGN_OR_RETURN(TokenizerSpec spec, ReadTokenizerJson(json, limits));
  return std::unique_ptr<const Tokenizer>(new Tokenizer(std::move(spec)));
}

Tokenizer::Tokenizer(TokenizerSpec spec)
    : tokens_(std::move(spec.tokens)),
      alphabet_(spec.alphabet),
      decoder_(std::move(spec.decoder)),
      max_token_bytes_(spec.max_token_bytes),
      normalizer_(std::move(spec.normalizer)),
      raw_added_tokens_(std::move(spec.raw_added_tokens)),
      normalized_added_tokens_(std::move(spec.normalized_added_tokens)),
      pre_tokenizer_(std::move(spec.stages)),
      bpe_(std::move(spec.bpe)),
      prefix_ids_(std::move(spec.prefix_ids)),
      suffix_ids_(std::move(spec.suffix_ids)) {
  for (size_t id = 0; id < tokens_.size(); ++id) {
    if (!tokens_[id].content.empty()) {
      ids_.try_emplace(tokens_[id].content, static_cast<int32_t>(id));
    }
  }
}

class Tokenizer::Encoding {
 public:
  Encoding(const Tokenizer& tokenizer, const EncodeOptions& options, size_t text_bytes)
      : tokenizer_(tokenizer), options_(options), text_bytes_(text_bytes) {}

  absl::StatusOr<std::vector<int32_t>> Run(absl::string_view text) {
    const auto add_around = [this](const std::vector<int32_t>& ids) {
      if (options_.add_special_tokens) ids_.insert(ids_.end(), ids.begin(), ids.end());
      return CheckSize(0);
    };
    KVASIR_RETURN_IF_ERROR(add_around(tokenizer_.prefix_ids_));
    KVASIR_RETURN_IF_ERROR(tokenizer_.raw_added_tokens_.Split(
        text, options_.special_token_text, options_.plain_spans,
        [this, text](absl::string_view part, std::optional<int32_t> id) {
          const auto offset = static_cast<size_t>(part.data() - text.data());
          return id.has_value() ? AddToken(*id) : AddNormalized(part, offset);
        }));
    KVASIR_RETURN_IF_ERROR(add_around(tokenizer_.suffix_ids_));
    return std::move(ids_);
  }

 private:
  absl::Status AddToken(int32_t id) {
    ids_.push_back(id);
    return CheckSize(0);
  }

  // `raw` begins at byte `offset` of the text.
  absl::Status AddNormalized(absl::string_view raw, size_t offset) {
    std::string normalized;
    if (!tokenizer_.normalizer_.empty()) normalized = tokenizer_.normalizer_.Run(raw);
    std::vector<TextSpan> plain = PlainSpansIn(offset, offset + raw.size());
    const bool moved = !tokenizer_.normalizer_.empty() && normalized != raw;
    // Where bytes have moved all of this part is plain, so that no special token is made by it.
    if (moved && !plain.empty()) plain = {{0, normalized.size()}};
    const absl::string_view text = moved ? absl::string_view(normalized) : raw;
    return tokenizer_.normalized_added_tokens_.Split(
        text, options_.special_token_text, plain,
        [&](absl::string_view part, std::optional<int32_t> id) {
          if (id.has_value()) return AddToken(*id);
          const bool begins = offset == 0 && part.data() == text.data();
          return AddText(part, begins ? TextPosition::kBegin : TextPosition::kInside);
        });
  }

  // Returns the plain spans within [begin, end), counted from `begin`.
  std::vector<TextSpan> PlainSpansIn(size_t begin, size_t end) const {
    std::vector<TextSpan> spans;
    const auto* span =
        std::partition_point(options_.plain_spans.begin(), options_.plain_spans.end(),
                             [begin](const TextSpan& plain) { return plain.end <= begin; });
    for (; span != options_.plain_spans.end() && span->begin < end; ++span) {
      spans.push_back({std::max(span->begin, begin) - begin, std::min(span->end, end) - begin});
    }
    return spans;
  }

  absl::Status AddText(absl::string_view text, TextPosition position) {
    return tokenizer_.pre_tokenizer_.Run(
        text, position, &scratch_, [this](absl::string_view piece) {
          // Refuses a piece that is too long before merging.
          const std::optional<size_t> max_token_bytes = tokenizer_.max_token_bytes_;
          const size_t at_least =
              max_token_bytes.has_value() ? (piece.size() - 1) / *max_token_bytes + 1 : 0;
          KVASIR_RETURN_IF_ERROR(CheckSize(at_least));
          if (piece.size() > kMaxPieceBytes) {
            return absl::InvalidArgumentError(
                absl::StrCat("text has a run of ", piece.size(),
                             " bytes that cannot be split; the limit is ", kMaxPieceBytes));
          }
          tokenizer_.bpe_.Encode(piece, &workspace_, &ids_);
          return CheckSize(0);
        });
  }

  absl::Status CheckSize(size_t num_more) const {
    if (static_cast<int64_t>(ids_.size() + num_more) <= options_.max_tokens) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrCat("text of ", text_bytes_, " bytes has more than ",
                                                   options_.max_tokens,
                                                   " tokens, which is the limit; shorten it"));
  }

  const Tokenizer& tokenizer_;
  const EncodeOptions& options_;
  size_t text_bytes_;
  std::vector<int32_t> ids_;
  BpeModel::Workspace workspace_;
  SplitRegex::Scratch scratch_;
};

absl::StatusOr<std::vector<int32_t>> Tokenizer::Encode(absl::string_view text,
                                                       const EncodeOptions& options) const {
  if (text.size() > kMaxTextBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("text has ", text.size(), " bytes; the limit is ", kMaxTextBytes));
  }
  if (const std::optional<size_t> offset = FindInvalidUtf8(text); offset.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("text is not valid UTF-8 at byte ", *offset, " of ", text.size(), " (0x",
                     absl::Hex(static_cast<uint8_t>(text[*offset]), absl::kZeroPad2), ")"));
  }
  return Encoding(*this, options, text.size()).Run(text);
}

absl::StatusOr<std::string> Tokenizer::Decode(absl::Span<const int32_t> ids,
                                              SpecialTokens special_tokens) const {
  std::string text;
  IncrementalDecoder decoder(*this, special_tokens, TextPosition::kBegin);
  for (const int32_t id : ids) {
    if (!HasToken(id)) {
      return absl::InvalidArgumentError(
          absl::StrCat("token id ", id, " has no token; ids are in [0, ", vocab_size(), ")"));
    }
    text += decoder.Push(id);
  }
  text += decoder.Flush();
  return text;
}

const TokenizerSpec::Token* Tokenizer::Find(int32_t id) const {
  if (id < 0 || id >= vocab_size()) return nullptr;
  const TokenizerSpec::Token& token = tokens_[static_cast<size_t>(id)];
  return token.content.empty() ? nullptr : &token;
}

bool Tokenizer::IsSpecial(int32_t id) const {
  const TokenizerSpec::Token* token = Find(id);
  return token != nullptr && token->special;
}

absl::string_view Tokenizer::TokenBytes(int32_t id) const {
  const TokenizerSpec::Token* token = Find(id);
  return token == nullptr ? absl::string_view() : absl::string_view(token->bytes);
}

absl::string_view Tokenizer::FirstTokenBytes(int32_t id) const {
  const TokenizerSpec::Token* token = Find(id);
  if (token == nullptr) return "";
  return decoder_.dropped_in_first_token.empty() ? token->bytes : token->first_bytes;
}

absl::string_view Tokenizer::TokenContent(int32_t id) const {
  const TokenizerSpec::Token* token = Find(id);
  return token == nullptr ? absl::string_view() : absl::string_view(token->content);
}

std::optional<int32_t> Tokenizer::TokenId(absl::string_view content) const {
  const auto it = ids_.find(content);
  if (it == ids_.end()) return std::nullopt;
  return it->second;
}

}  // namespace kvasir::coordinator
