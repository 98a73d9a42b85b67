#include "coordinator/tokenizer/pipeline_json.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"

#include "coordinator/tokenizer/utf8.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using Behavior = PreTokenizer::Behavior;

constexpr size_t kMaxStages = 32;

// GPT-2's pattern, which ByteLevel applies under use_regex.
constexpr absl::string_view kGpt2Pattern =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

constexpr std::array<std::pair<absl::string_view, Behavior>, 5> kBehaviors = {{
    {"Removed", Behavior::kRemoved},
    {"Isolated", Behavior::kIsolated},
    {"MergedWithPrevious", Behavior::kMergedWithPrevious},
    {"MergedWithNext", Behavior::kMergedWithNext},
    {"Contiguous", Behavior::kContiguous},
}};

// Called for the part itself, or for every part of a Sequence in order, however nested. The parser
// limits the depth. A null part has no leaves.
using Leaf = absl::FunctionRef<absl::Status(const std::string& type, const JsonValue& part)>;
absl::Status ForEachPart(const JsonValue& part, absl::string_view list_key, Leaf leaf) {
  if (part.IsNull()) return absl::OkStatus();
  KVASIR_ASSIGN_OR_RETURN(const JsonValue type_value, part.Member("type"));
  KVASIR_ASSIGN_OR_RETURN(const std::string type, type_value.String());
  if (type != "Sequence") return leaf(type, part);
  KVASIR_ASSIGN_OR_RETURN(const JsonValue list, part.Member(list_key));
  KVASIR_ASSIGN_OR_RETURN(const std::vector<JsonValue> parts, list.Elements());
  for (const JsonValue& element : parts) {
    KVASIR_RETURN_IF_ERROR(ForEachPart(element, list_key, leaf));
  }
  return absl::OkStatus();
}

absl::Status Unsupported(const JsonValue& part, const std::string& type,
                         absl::string_view supported) {
  return absl::InvalidArgumentError(
      absl::StrCat(part.path(), ".type is \"", ForMessage(type), "\"; supported: ", supported));
}

absl::StatusOr<PreTokenizer::Split> ReadSplit(const JsonValue& part) {
  KVASIR_ASSIGN_OR_RETURN(const JsonValue behavior_value, part.Member("behavior"));
  KVASIR_ASSIGN_OR_RETURN(const std::string name, behavior_value.String());
  const auto behavior = std::find_if(kBehaviors.begin(), kBehaviors.end(),
                                     [&](const auto& entry) { return entry.first == name; });
  if (behavior == kBehaviors.end()) {
    return behavior_value.Error(
        "expected Removed, Isolated, MergedWithPrevious, MergedWithNext or Contiguous");
  }
  KVASIR_ASSIGN_OR_RETURN(const bool invert, part.BoolMember("invert", false));
  KVASIR_ASSIGN_OR_RETURN(const JsonValue pattern, part.Member("pattern"));
  KVASIR_ASSIGN_OR_RETURN(const JsonValue regex_value, pattern.OptionalMember("Regex"));
  std::optional<SplitRegex> regex;
  if (!regex_value.IsNull()) {
    KVASIR_ASSIGN_OR_RETURN(const std::string text, regex_value.String());
    KVASIR_ASSIGN_OR_RETURN(regex, SplitRegex::CompilePattern(text));
  } else {
    KVASIR_ASSIGN_OR_RETURN(const JsonValue literal, pattern.Member("String"));
    KVASIR_ASSIGN_OR_RETURN(const std::string text, literal.String());
    KVASIR_ASSIGN_OR_RETURN(regex, SplitRegex::CompileLiteral(text));
  }
  return PreTokenizer::Split{
      .regex = *std::move(regex), .behavior = behavior->second, .invert = invert};
}

absl::StatusOr<PreTokenizer::Split> ReadDigits(const JsonValue& part) {
  KVASIR_ASSIGN_OR_RETURN(const bool individual, part.BoolMember("individual_digits", false));
  KVASIR_ASSIGN_OR_RETURN(SplitRegex regex, SplitRegex::CompilePattern("\\p{N}"));
  return PreTokenizer::Split{.regex = std::move(regex),
                             .behavior = individual ? Behavior::kIsolated : Behavior::kContiguous};
}

absl::Status AddByteLevel(const JsonValue& part, std::vector<PreTokenizer::Stage>* stages) {
  KVASIR_ASSIGN_OR_RETURN(const bool add_prefix_space, part.BoolMember("add_prefix_space", true));
  KVASIR_ASSIGN_OR_RETURN(const bool use_regex, part.BoolMember("use_regex", true));
  if (add_prefix_space) stages->emplace_back(PreTokenizer::AddPrefixSpace{});
  if (use_regex) {
    KVASIR_ASSIGN_OR_RETURN(SplitRegex regex, SplitRegex::CompilePattern(kGpt2Pattern));
    stages->emplace_back(
        PreTokenizer::Split{.regex = std::move(regex), .behavior = Behavior::kIsolated});
  }
  return absl::OkStatus();
}

// Reads the special tokens before and after the single sequence of a template.
absl::Status ReadTemplate(const JsonValue& part, int64_t max_tokens, Template* out) {
  KVASIR_ASSIGN_OR_RETURN(const JsonValue special_tokens, part.Member("special_tokens"));
  KVASIR_ASSIGN_OR_RETURN(const JsonValue single, part.Member("single"));
  KVASIR_ASSIGN_OR_RETURN(const std::vector<JsonValue> pieces, single.Elements());
  std::vector<int32_t> prefix;
  std::vector<int32_t> suffix;
  bool seen_sequence = false;
  for (const JsonValue& piece : pieces) {
    KVASIR_ASSIGN_OR_RETURN(const JsonValue sequence, piece.OptionalMember("Sequence"));
    if (!sequence.IsNull()) {
      KVASIR_ASSIGN_OR_RETURN(const JsonValue id, sequence.Member("id"));
      if (id.value() != "A" || seen_sequence) return id.Error("expected \"A\", and that once");
      seen_sequence = true;
      continue;
    }
    KVASIR_ASSIGN_OR_RETURN(const JsonValue special, piece.Member("SpecialToken"));
    KVASIR_ASSIGN_OR_RETURN(const JsonValue name_value, special.Member("id"));
    KVASIR_ASSIGN_OR_RETURN(const std::string name, name_value.String());
    KVASIR_ASSIGN_OR_RETURN(const JsonValue token, special_tokens.Member(name));
    KVASIR_ASSIGN_OR_RETURN(const JsonValue ids, token.Member("ids"));
    KVASIR_ASSIGN_OR_RETURN(const std::vector<JsonValue> elements, ids.Elements());
    for (const JsonValue& element : elements) {
      KVASIR_ASSIGN_OR_RETURN(const int32_t id, element.Index(max_tokens));
      (seen_sequence ? suffix : prefix).push_back(id);
    }
  }
  if (!seen_sequence) return single.Error("expected the sequence A among its parts");
  // A later processor of a Sequence puts its tokens around those of the earlier ones.
  out->prefix_ids.insert(out->prefix_ids.begin(), prefix.begin(), prefix.end());
  out->suffix_ids.insert(out->suffix_ids.end(), suffix.begin(), suffix.end());
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<bool> ReadNormalizer(const JsonValue& normalizer) {
  bool nfc = false;
  KVASIR_RETURN_IF_ERROR(
      ForEachPart(normalizer, "normalizers", [&](const std::string& type, const JsonValue& part) {
        if (type != "NFC") return Unsupported(part, type, "null, NFC");
        nfc = true;
        return absl::OkStatus();
      }));
  return nfc;
}

absl::StatusOr<std::vector<PreTokenizer::Stage>> ReadPreTokenizer(const JsonValue& pre_tokenizer) {
  std::vector<PreTokenizer::Stage> stages;
  bool byte_level = false;
  const auto add = [&](const std::string& type, const JsonValue& part) -> absl::Status {
    if (byte_level) {
      return absl::InvalidArgumentError(absl::StrCat(
          part.path(), " stands after ByteLevel, which must be the last pre-tokenizer"));
    }
    if (stages.size() >= kMaxStages) {
      return absl::InvalidArgumentError(
          absl::StrCat(part.path(), ": more than ", kMaxStages, " pre-tokenizers"));
    }
    if (type == "ByteLevel") {
      byte_level = true;
      return AddByteLevel(part, &stages);
    }
    if (type == "Split") {
      KVASIR_ASSIGN_OR_RETURN(PreTokenizer::Split split, ReadSplit(part));
      stages.emplace_back(std::move(split));
      return absl::OkStatus();
    }
    if (type == "Digits") {
      KVASIR_ASSIGN_OR_RETURN(PreTokenizer::Split split, ReadDigits(part));
      stages.emplace_back(std::move(split));
      return absl::OkStatus();
    }
    return Unsupported(part, type, "ByteLevel, Split, Digits and Sequences of them");
  };
  KVASIR_RETURN_IF_ERROR(ForEachPart(pre_tokenizer, "pretokenizers", add));
  if (!byte_level) {
    return absl::InvalidArgumentError(
        "pre_tokenizer has no ByteLevel; only byte-level tokenizers are supported (GPT-2, Llama 3, "
        "Qwen2 and their like)");
  }
  return stages;
}

absl::StatusOr<Template> ReadPostProcessor(const JsonValue& post_processor, int64_t max_tokens) {
  Template out;
  const auto add = [&](const std::string& type, const JsonValue& part) -> absl::Status {
    if (type == "TemplateProcessing") return ReadTemplate(part, max_tokens, &out);
    if (type == "ByteLevel") return absl::OkStatus();  // moves offsets only
    return Unsupported(part, type, "null, TemplateProcessing, ByteLevel and Sequences of them");
  };
  KVASIR_RETURN_IF_ERROR(ForEachPart(post_processor, "processors", add));
  return out;
}

absl::Status CheckDecoder(const JsonValue& decoder) {
  int num_parts = 0;
  KVASIR_RETURN_IF_ERROR(
      ForEachPart(decoder, "decoders", [&](const std::string& type, const JsonValue& part) {
        ++num_parts;
        return type == "ByteLevel" ? absl::OkStatus() : Unsupported(part, type, "ByteLevel");
      }));
  if (num_parts == 1) return absl::OkStatus();
  return decoder.Error(absl::StrCat("expected one ByteLevel decoder, found ", num_parts));
}

}  // namespace kvasir::coordinator
