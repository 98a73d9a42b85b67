#include "coordinator/tokenizer/tokenizer_json.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>
#include <variant>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

#include "coordinator/tokenizer/byte_level.h"
#include "coordinator/tokenizer/json_value.h"
#include "coordinator/tokenizer/pipeline_json.h"
#include "coordinator/tokenizer/unicode/utf8.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using nlohmann::json;

constexpr int64_t kMaxJsonDepth = 64;
// Limits the time for finding added tokens at one place of a text.
constexpr size_t kMaxAddedTokenBytes = 256;
constexpr absl::string_view kSupported =
    "supported are BPE tokenizers: byte-level ones (GPT-2, Llama 3, Qwen2 and their like) and "
    "those "
    "converted from SentencePiece (Llama 2, Mistral, Gemma and their like)";

absl::Status Invalid(absl::string_view a, absl::string_view b = "", absl::string_view c = "",
                     absl::string_view d = "") {
  return absl::InvalidArgumentError(absl::StrCat(a, b, c, d));
}

// Returns the byte 0x41 for "<0x41>".
std::optional<uint8_t> ByteOfFallback(absl::string_view content) {
  if (content.size() != 6 || !absl::StartsWith(content, "<0x") || content[5] != '>' ||
      !absl::ascii_isxdigit(static_cast<unsigned char>(content[3])) ||
      !absl::ascii_isxdigit(static_cast<unsigned char>(content[4]))) {
    return std::nullopt;
  }
  return static_cast<uint8_t>(std::stoi(std::string(content.substr(3, 2)), nullptr, 16));
}

class Reader {
 public:
  Reader(const JsonValue& document, const TokenizerLimits& limits)
      : document_(document), limits_(limits) {}

  absl::StatusOr<TokenizerSpec> Run() {
    KVASIR_ASSIGN_OR_RETURN(const JsonValue version, document_.OptionalMember("version"));
    if (!version.IsNull() && version.value() != "1.0") return version.Error("expected \"1.0\"");
    KVASIR_ASSIGN_OR_RETURN(const JsonValue model, document_.Member("model"));
    KVASIR_RETURN_IF_ERROR(CheckModelKind(model));
    KVASIR_RETURN_IF_ERROR(ReadPipeline());
    KVASIR_RETURN_IF_ERROR(CheckPipeline(model));
    KVASIR_RETURN_IF_ERROR(ReadVocabulary(model));
    KVASIR_RETURN_IF_ERROR(ReadMerges(model));
    KVASIR_RETURN_IF_ERROR(ReadAddedTokens());
    KVASIR_RETURN_IF_ERROR(CheckTemplateIds());
    return std::move(spec_);
  }

 private:
  bool IsTaken(int32_t id) const {
    const auto index = static_cast<size_t>(id);
    return index < taken_.size() && taken_[index];
  }

  absl::Status TakenError(const JsonValue& entry, int32_t id) const {
    return entry.Error(absl::StrCat("\"", ForMessage(spec_.tokens[static_cast<size_t>(id)].content),
                                    "\" has the same id; ids must be unique"));
  }

  // `text` is what decoding starts from.
  void SetToken(int32_t id, const std::string& content, const std::string& text, bool special) {
    const auto index = static_cast<size_t>(id);
    if (index >= taken_.size()) {
      taken_.resize(index + 1, false);
      spec_.tokens.resize(index + 1);
    }
    taken_[index] = true;
    spec_.tokens[index] = Decoded(text);
    spec_.tokens[index].content = content;
    spec_.tokens[index].special = special;
  }

  TokenizerSpec::Token Decoded(const std::string& text) const;
  absl::Status CheckModelKind(const JsonValue& model);
  absl::Status ReadPipeline();
  absl::Status CheckPipeline(const JsonValue& model) const;
  absl::Status ReadVocabulary(const JsonValue& model);
  absl::Status FindByteTokens(const JsonValue& model);
  absl::Status FindCharacters(const JsonValue& model);
  absl::Status ReadMerges(const JsonValue& model);
  absl::StatusOr<BpeModel::Merge> ReadMerge(const json& entry, const std::string& where) const;
  absl::Status ReadAddedTokens();
  absl::StatusOr<AddedToken> ReadAddedToken(const JsonValue& entry) const;
  absl::Status CheckTemplateIds();

  const JsonValue& document_;
  const TokenizerLimits& limits_;
  TokenizerSpec spec_;
  size_t longest_piece_ = 1;                         // bytes of text that one token stands for
  std::vector<bool> taken_;                          // by id
  absl::flat_hash_map<std::string, int32_t> vocab_;  // of the model: id by content
};

// Hugging Face reads an added token's content as symbols if it can, like a token of the vocabulary.
TokenizerSpec::Token Reader::Decoded(const std::string& text) const {
  TokenizerSpec::Token token;
  if (spec_.alphabet == Alphabet::kBytes) {
    token.bytes = BytesOfSymbols(text).value_or(text);
    return token;
  }
  token.bytes = text;
  const std::string& dropped = spec_.decoder.dropped_in_first_token;
  if (!dropped.empty()) token.first_bytes = absl::StrReplaceAll(text, {{dropped, ""}});
  for (const Normalizer::Replace& replace : spec_.decoder.replacements) {
    token.bytes = absl::StrReplaceAll(token.bytes, {{replace.pattern, replace.content}});
  }
  const std::optional<uint8_t> byte = ByteOfFallback(token.bytes);
  if (spec_.decoder.byte_fallback && byte.has_value()) {
    token.bytes = token.first_bytes = std::string(1, static_cast<char>(*byte));
  }
  return token;
}

absl::Status Reader::CheckModelKind(const JsonValue& model) {
  // Files from before 2021 have no type.
  KVASIR_ASSIGN_OR_RETURN(const JsonValue type, model.OptionalMember("type"));
  if (!type.IsNull() && type.value() != "BPE") return type.Error(kSupported);
  KVASIR_ASSIGN_OR_RETURN(const JsonValue dropout, model.OptionalMember("dropout"));
  if (!dropout.IsNull() && dropout.value() != 0.0) return dropout.Error("expected null or 0");
  for (const absl::string_view key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    KVASIR_ASSIGN_OR_RETURN(const JsonValue affix, model.OptionalMember(key));
    if (!affix.IsNull() && affix.value() != "") return affix.Error("expected null or \"\"");
  }
  return absl::OkStatus();
}

// Does not read the sections "truncation" and "padding": in Hugging Face's libraries they are set
// per call too, and the values in a file are left over from training.
absl::Status Reader::ReadPipeline() {
  KVASIR_ASSIGN_OR_RETURN(const JsonValue normalizer, document_.OptionalMember("normalizer"));
  KVASIR_ASSIGN_OR_RETURN(spec_.normalizer, ReadNormalizer(normalizer));
  KVASIR_ASSIGN_OR_RETURN(const JsonValue pre_tokenizer, document_.OptionalMember("pre_tokenizer"));
  KVASIR_ASSIGN_OR_RETURN(PreTokenizerParts parts, ReadPreTokenizer(pre_tokenizer));
  spec_.stages = std::move(parts.stages);
  spec_.alphabet = parts.alphabet;
  KVASIR_ASSIGN_OR_RETURN(const JsonValue processor, document_.OptionalMember("post_processor"));
  KVASIR_ASSIGN_OR_RETURN(Template ids, ReadPostProcessor(processor, limits_.max_tokens));
  spec_.prefix_ids = std::move(ids.prefix_ids);
  spec_.suffix_ids = std::move(ids.suffix_ids);
  KVASIR_ASSIGN_OR_RETURN(const JsonValue decoder, document_.OptionalMember("decoder"));
  KVASIR_ASSIGN_OR_RETURN(spec_.decoder, ReadDecoder(decoder, spec_.alphabet));
  return absl::OkStatus();
}

// Refuses combinations that no tokenizer is known to have.
absl::Status Reader::CheckPipeline(const JsonValue& model) const {
  KVASIR_ASSIGN_OR_RETURN(const bool byte_fallback, model.BoolMember("byte_fallback", false));
  if (byte_fallback && spec_.alphabet == Alphabet::kBytes) {
    return Invalid("model.byte_fallback is true beside a ByteLevel pre-tokenizer; ", kSupported);
  }
  const auto& steps = spec_.normalizer.steps();
  const bool prepends = std::any_of(steps.begin(), steps.end(), [](const Normalizer::Step& step) {
    return std::holds_alternative<Normalizer::Prepend>(step);
  });
  const bool marks_first =
      std::any_of(spec_.stages.begin(), spec_.stages.end(), [](const PreTokenizer::Stage& stage) {
        const auto* marks = std::get_if<PreTokenizer::MarkSpaces>(&stage);
        return marks != nullptr && marks->prepend == PreTokenizer::MarkSpaces::Prepend::kFirst;
      });
  if (!prepends || !marks_first) return absl::OkStatus();
  return Invalid(
      "normalizer has Prepend and pre_tokenizer a Metaspace that prepends to the first; ",
      "expected one of them");
}

absl::Status Reader::ReadVocabulary(const JsonValue& model) {
  KVASIR_ASSIGN_OR_RETURN(const JsonValue vocab, model.Member("vocab"));
  if (!vocab.value().is_object()) return vocab.Error("expected an object of tokens and ids");
  KVASIR_ASSIGN_OR_RETURN(const bool ignore_merges, model.BoolMember("ignore_merges", false));
  vocab_.reserve(vocab.value().size());
  for (const auto& [content, value] : vocab.value().items()) {
    const absl::StatusOr<int32_t> index = JsonValue(value, "").Index(limits_.max_tokens);
    if (!index.ok() || IsTaken(*index)) {  // make the path only when it is needed
      const JsonValue entry(value, absl::StrCat("model.vocab[\"", ForMessage(content), "\"]"));
      return index.ok() ? TakenError(entry, *index) : entry.Index(limits_.max_tokens).status();
    }
    const int32_t id = *index;
    SetToken(id, content, content, false);
    // A piece of text has bytes in the first alphabet, and characters in the second.
    std::optional<std::string> piece =
        spec_.alphabet == Alphabet::kBytes ? BytesOfSymbols(content) : content;
    longest_piece_ = std::max(longest_piece_, piece.value_or(content).size());
    if (ignore_merges && piece.has_value()) {
      spec_.bpe.whole_tokens.emplace_back(*std::move(piece), id);
    }
    vocab_.try_emplace(content, id);
  }
  return spec_.alphabet == Alphabet::kBytes ? FindByteTokens(model) : FindCharacters(model);
}

// A byte that the tokenizer's training text never had may lack a token and is left out of texts
// (SmolLM2 has none for some control characters), unless the model names a token for unknown bytes.
// A printable ASCII character without a token means another kind of vocabulary.
absl::Status Reader::FindByteTokens(const JsonValue& model) {
  KVASIR_ASSIGN_OR_RETURN(const JsonValue unknown, model.OptionalMember("unk_token"));
  const auto is_needed = [&](int byte) {
    const bool in_utf8 = byte != 0xC0 && byte != 0xC1 && byte < 0xF5;
    return in_utf8 && (!unknown.IsNull() || (byte >= 0x20 && byte < 0x7F));
  };
  spec_.max_token_bytes = longest_piece_;
  spec_.bpe.byte_ids.fill(-1);
  for (int byte = 0; byte < 256; ++byte) {
    std::string symbol;
    AppendUtf8(SymbolOfByte(static_cast<uint8_t>(byte)), &symbol);
    const auto it = vocab_.find(symbol);
    if (it != vocab_.end()) {
      spec_.bpe.byte_ids[static_cast<size_t>(byte)] = it->second;
    } else if (is_needed(byte)) {
      return Invalid(
          absl::StrCat("model.vocab has no token \"", symbol, "\" for byte ", byte, "; "),
          kSupported);
    }
  }
  return absl::OkStatus();
}

absl::Status Reader::FindCharacters(const JsonValue& model) {
  BpeModel::Characters characters;
  for (const auto& [content, id] : vocab_) {
    if (content.empty()) continue;
    const Utf8Unit unit = CodePointAt(content, 0);
    if (unit.length == content.size()) characters.ids.try_emplace(unit.value, id);
  }
  KVASIR_ASSIGN_OR_RETURN(const bool byte_fallback, model.BoolMember("byte_fallback", false));
  spec_.bpe.byte_ids.fill(-1);
  bool has_all_bytes = byte_fallback;
  for (int byte = 0; byte_fallback && byte < 256; ++byte) {
    const auto it = vocab_.find(absl::StrFormat("<0x%02X>", byte));
    if (it != vocab_.end()) spec_.bpe.byte_ids[static_cast<size_t>(byte)] = it->second;
    has_all_bytes &= it != vocab_.end();
  }
  KVASIR_ASSIGN_OR_RETURN(characters.fuses_unknown, model.BoolMember("fuse_unk", false));
  KVASIR_ASSIGN_OR_RETURN(const JsonValue unknown, model.OptionalMember("unk_token"));
  if (!unknown.IsNull()) {
    KVASIR_ASSIGN_OR_RETURN(const std::string content, unknown.String());
    const auto it = vocab_.find(content);
    if (it != vocab_.end()) characters.unknown = it->second;
    if (it == vocab_.end() && !has_all_bytes) {
      return unknown.Error("but model.vocab has no such token");
    }
  }
  // Without bytes for them, any number of characters may be one unknown token or none.
  if (has_all_bytes) spec_.max_token_bytes = longest_piece_;
  spec_.bpe.characters = std::move(characters);
  return absl::OkStatus();
}

absl::Status Reader::ReadMerges(const JsonValue& model) {
  KVASIR_ASSIGN_OR_RETURN(const JsonValue merges, model.Member("merges"));
  if (!merges.value().is_array()) return merges.Error("expected an array of pairs");
  if (merges.value().size() > static_cast<size_t>(limits_.max_merges)) {
    return Invalid(absl::StrCat("model.merges has ", merges.value().size(), " pairs; the limit is ",
                                limits_.max_merges));
  }
  absl::flat_hash_set<std::pair<int32_t, int32_t>> seen;
  seen.reserve(merges.value().size());
  for (const json& entry : merges.value()) {
    const std::string where = absl::StrCat("model.merges[", spec_.bpe.merges.size(), "]");
    KVASIR_ASSIGN_OR_RETURN(const BpeModel::Merge merge, ReadMerge(entry, where));
    if (!seen.emplace(merge.left, merge.right).second) {
      return JsonValue(entry, where).Error("the same pair came before");
    }
    spec_.bpe.merges.push_back(merge);
  }
  return absl::OkStatus();
}

// Reads "a b" (older files) or ["a", "b"] (newer files). Both sides are not empty and the result is
// their concatenation, so tokens only grow and merges cannot form a cycle.
absl::StatusOr<BpeModel::Merge> Reader::ReadMerge(const json& entry,
                                                  const std::string& where) const {
  std::string left;
  std::string right;
  if (entry.is_array() && entry.size() == 2 && entry[0].is_string() && entry[1].is_string()) {
    left = entry[0].get<std::string>();
    right = entry[1].get<std::string>();
  } else if (entry.is_string()) {
    const auto text = entry.get<std::string>();
    const size_t space = std::min(text.find(' '), text.size());
    left = text.substr(0, space);
    right = text.substr(std::min(space + 1, text.size()));
  }
  if (left.empty() || right.empty() || (entry.is_string() && right.find(' ') != right.npos)) {
    return JsonValue(entry, where).Error("expected \"left right\" or [\"left\", \"right\"]");
  }
  const auto id_of = [&](const std::string& content) -> absl::StatusOr<int32_t> {
    const auto it = vocab_.find(content);
    if (it != vocab_.end()) return it->second;
    return Invalid(where, " needs the token \"", ForMessage(content),
                   "\", which model.vocab does not have");
  };
  BpeModel::Merge merge{};
  KVASIR_ASSIGN_OR_RETURN(merge.left, id_of(left));
  KVASIR_ASSIGN_OR_RETURN(merge.right, id_of(right));
  KVASIR_ASSIGN_OR_RETURN(merge.result, id_of(left + right));
  return merge;
}

absl::StatusOr<AddedToken> Reader::ReadAddedToken(const JsonValue& entry) const {
  AddedToken token{};
  KVASIR_ASSIGN_OR_RETURN(const JsonValue id, entry.Member("id"));
  KVASIR_ASSIGN_OR_RETURN(token.id, id.Index(limits_.max_tokens));
  KVASIR_ASSIGN_OR_RETURN(const JsonValue content, entry.Member("content"));
  KVASIR_ASSIGN_OR_RETURN(token.content, content.String());
  const std::pair<absl::string_view, bool*> flags[] = {{"single_word", &token.single_word},
                                                       {"lstrip", &token.lstrip},
                                                       {"rstrip", &token.rstrip},
                                                       {"normalized", &token.normalized},
                                                       {"special", &token.special}};
  for (const auto& [key, flag] : flags) {
    KVASIR_ASSIGN_OR_RETURN(const JsonValue value, entry.Member(key));
    KVASIR_ASSIGN_OR_RETURN(*flag, value.Bool());
  }
  if (token.content.empty() || token.content.size() > kMaxAddedTokenBytes) {
    return content.Error(absl::StrCat("expected 1 to ", kMaxAddedTokenBytes, " bytes"));
  }
  const auto known = vocab_.find(token.content);
  if (known != vocab_.end() && known->second != token.id) {
    return id.Error(absl::StrCat("\"", ForMessage(token.content), "\" has the id ", known->second,
                                 " in model.vocab"));
  }
  if (known == vocab_.end() && IsTaken(token.id)) {
    return TakenError(id, token.id);
  }
  return token;
}

absl::Status Reader::ReadAddedTokens() {
  KVASIR_ASSIGN_OR_RETURN(const JsonValue list, document_.OptionalMember("added_tokens"));
  if (list.IsNull()) return absl::OkStatus();
  KVASIR_ASSIGN_OR_RETURN(const std::vector<JsonValue> entries, list.Elements());
  absl::flat_hash_set<std::string> contents[2];  // not normalized, normalized
  bool rstrip[2] = {false, false};
  bool begins_with_space[2] = {false, false};
  for (const JsonValue& entry : entries) {
    KVASIR_ASSIGN_OR_RETURN(AddedToken token, ReadAddedToken(entry));
    const std::string content = token.content;
    if (token.normalized) token.content = spec_.normalizer.Run(token.content);
    const size_t kind = token.normalized ? 1 : 0;
    if (!contents[kind].insert(token.content).second || contents[1 - kind].contains(content)) {
      return Invalid(entry.path(), ".content is the same as that of another added token");
    }
    rstrip[kind] |= token.rstrip;
    begins_with_space[kind] |= IsWhiteSpace(CodePointAt(token.content, 0).value);
    if (rstrip[kind] && begins_with_space[kind]) {
      return Invalid(entry.path(),
                     ": white space would belong to two added tokens, one that begins "
                     "with it and one that has rstrip; not supported");
    }
    SetToken(token.id, content, token.content, token.special);
    (token.normalized ? spec_.normalized_added_tokens : spec_.raw_added_tokens)
        .push_back(std::move(token));
  }
  return absl::OkStatus();
}

absl::Status Reader::CheckTemplateIds() {
  for (const std::vector<int32_t>* ids : {&spec_.prefix_ids, &spec_.suffix_ids}) {
    for (const int32_t id : *ids) {
      if (!IsTaken(id)) {
        return Invalid(absl::StrCat("post_processor names the id ", id, ", which no token has"));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TokenizerSpec> ReadTokenizerJson(absl::string_view text,
                                                const TokenizerLimits& limits) {
  // A token takes one value and a merge at most three. Added tokens take eight, but are few.
  constexpr int64_t kOtherValues = 500'000;
  const JsonLimits json_limits = {
      .max_values = limits.max_tokens + limits.max_merges * 3 + kOtherValues,
      .max_keys = limits.max_tokens,
      .max_depth = kMaxJsonDepth};
  KVASIR_ASSIGN_OR_RETURN(const json document, ParseJson(text, json_limits));
  const JsonValue root(document, "");
  return Reader(root, limits).Run();
}

}  // namespace kvasir::coordinator
