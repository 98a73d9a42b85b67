#include "coordinator/tokenizer/pipeline_json.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"

#include "coordinator/tokenizer/unicode/utf8.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using Behavior = PreTokenizer::Behavior;

constexpr size_t kMaxStages = 32;
// A normalizer may make a text so many times as long.
constexpr size_t kMaxGrowth = 8;
constexpr size_t kMaxPatternBytes = 64;
constexpr int64_t kMaxStripped = 64;

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

absl::StatusOr<std::string> ReadShortText(const JsonValue& part, absl::string_view key) {
  KVASIR_ASSIGN_OR_RETURN(const JsonValue value, part.Member(key));
  KVASIR_ASSIGN_OR_RETURN(std::string text, value.String());
  if (!text.empty() && text.size() <= kMaxPatternBytes) return text;
  return value.Error(absl::StrCat("expected 1 to ", kMaxPatternBytes, " bytes"));
}

absl::StatusOr<std::string> ReadCharacter(const JsonValue& part, absl::string_view key) {
  KVASIR_ASSIGN_OR_RETURN(const JsonValue value, part.Member(key));
  KVASIR_ASSIGN_OR_RETURN(std::string text, value.String());
  if (!text.empty() && CodePointAt(text, 0).length == text.size()) return text;
  return value.Error("expected one character");
}

// A part of a normalizer or a decoder.
absl::StatusOr<Normalizer::Replace> ReadReplace(const JsonValue& part) {
  KVASIR_ASSIGN_OR_RETURN(const JsonValue pattern, part.Member("pattern"));
  KVASIR_ASSIGN_OR_RETURN(const JsonValue regex, pattern.OptionalMember("Regex"));
  if (!regex.IsNull()) return regex.Error("expected \"String\": patterns are not supported here");
  Normalizer::Replace replace;
  KVASIR_ASSIGN_OR_RETURN(replace.pattern, ReadShortText(pattern, "String"));
  KVASIR_ASSIGN_OR_RETURN(replace.content, ReadShortText(part, "content"));
  return replace;
}

struct Metaspace {
  std::string mark;
  PreTokenizer::MarkSpaces::Prepend prepend = PreTokenizer::MarkSpaces::Prepend::kAlways;
};

absl::StatusOr<Metaspace> ReadMetaspace(const JsonValue& part) {
  using Prepend = PreTokenizer::MarkSpaces::Prepend;
  Metaspace metaspace;
  KVASIR_ASSIGN_OR_RETURN(metaspace.mark, ReadCharacter(part, "replacement"));
  KVASIR_ASSIGN_OR_RETURN(const JsonValue scheme, part.OptionalMember("prepend_scheme"));
  if (scheme.value() == "first") {
    metaspace.prepend = Prepend::kFirst;
  } else if (scheme.value() == "never") {
    metaspace.prepend = Prepend::kNever;
  } else if (!scheme.IsNull() && scheme.value() != "always") {
    return scheme.Error("expected \"first\", \"always\" or \"never\"");
  }
  // Files from before 2024 say it in this way too.
  KVASIR_ASSIGN_OR_RETURN(const JsonValue adds, part.OptionalMember("add_prefix_space"));
  if (adds.value() == false && metaspace.prepend != Prepend::kNever) {
    return adds.Error("but prepend_scheme is not \"never\"");
  }
  return metaspace;
}

absl::Status AddMetaspace(const JsonValue& part, std::vector<PreTokenizer::Stage>* stages) {
  KVASIR_ASSIGN_OR_RETURN(const Metaspace metaspace, ReadMetaspace(part));
  KVASIR_ASSIGN_OR_RETURN(const bool splits, part.BoolMember("split", true));
  stages->emplace_back(
      PreTokenizer::MarkSpaces{.mark = metaspace.mark, .prepend = metaspace.prepend});
  if (!splits) return absl::OkStatus();
  KVASIR_ASSIGN_OR_RETURN(SplitRegex regex, SplitRegex::CompileLiteral(metaspace.mark));
  stages->emplace_back(
      PreTokenizer::Split{.regex = std::move(regex), .behavior = Behavior::kMergedWithNext});
  return absl::OkStatus();
}

// Reads the decoders of a vocabulary of characters. They change tokens first, then join the bytes
// of byte fallback, then change the text.
class DecoderReader {
 public:
  absl::Status Add(const std::string& type, const JsonValue& part) {
    const auto row =
        std::find_if(kSteps.begin(), kSteps.end(), [&](const auto& s) { return s.first == type; });
    if (row == kSteps.end()) {
      return Unsupported(part, type,
                         "Metaspace, Replace, ByteFallback, Fuse, Strip in this order (ByteLevel "
                         "only beside a ByteLevel pre-tokenizer)");
    }
    const int step = row->second;
    if (step < last_ || (step == last_ && type != "Replace") ||
        (step == kStrip && last_ != kFuse)) {
      return absl::InvalidArgumentError(
          absl::StrCat(part.path(), ": ", type,
                       " does not fit there; supported is the order Metaspace or Replace, "
                       "ByteFallback, Fuse, Strip, where Strip needs Fuse"));
    }
    last_ = step;
    if (type == "Metaspace") return AddMetaspace(part);
    if (type == "Replace") return AddReplace(part);
    if (type == "ByteFallback") rules_.byte_fallback = true;
    return type == "Strip" ? AddStrip(part) : absl::OkStatus();
  }

  DecoderRules rules() && { return std::move(rules_); }

 private:
  static constexpr int kFuse = 3;
  static constexpr int kStrip = 4;
  static constexpr std::array<std::pair<absl::string_view, int>, 5> kSteps = {
      {{"Metaspace", 1}, {"Replace", 1}, {"ByteFallback", 2}, {"Fuse", kFuse}, {"Strip", kStrip}}};

  absl::Status AddMetaspace(const JsonValue& part) {
    KVASIR_ASSIGN_OR_RETURN(const Metaspace metaspace, ReadMetaspace(part));
    rules_.replacements.push_back({.pattern = metaspace.mark, .content = " "});
    if (metaspace.prepend != PreTokenizer::MarkSpaces::Prepend::kNever) {
      rules_.dropped_in_first_token = metaspace.mark;
    }
    return absl::OkStatus();
  }

  absl::Status AddReplace(const JsonValue& part) {
    if (!rules_.dropped_in_first_token.empty() || rules_.replacements.size() >= kMaxStages) {
      return absl::InvalidArgumentError(absl::StrCat(
          part.path(), ": a Replace after Metaspace, or more than ", kMaxStages, " of them"));
    }
    KVASIR_ASSIGN_OR_RETURN(Normalizer::Replace replace, ReadReplace(part));
    rules_.replacements.push_back(std::move(replace));
    return absl::OkStatus();
  }

  absl::Status AddStrip(const JsonValue& part) {
    KVASIR_ASSIGN_OR_RETURN(rules_.stripped, ReadCharacter(part, "content"));
    KVASIR_ASSIGN_OR_RETURN(const JsonValue start, part.Member("start"));
    KVASIR_ASSIGN_OR_RETURN(rules_.max_stripped, start.Index(kMaxStripped + 1));
    KVASIR_ASSIGN_OR_RETURN(const JsonValue stop, part.Member("stop"));
    if (stop.value() == 0) return absl::OkStatus();
    return stop.Error("expected 0: the end of a text that is streamed is not known");
  }

  DecoderRules rules_;
  int last_ = 0;
};

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

absl::StatusOr<Normalizer> ReadNormalizer(const JsonValue& normalizer) {
  std::vector<Normalizer::Step> steps;
  size_t growth = 1;
  const auto add = [&](const std::string& type, const JsonValue& part) -> absl::Status {
    if (steps.size() >= kMaxStages) {
      return absl::InvalidArgumentError(
          absl::StrCat(part.path(), ": more than ", kMaxStages, " normalizers"));
    }
    if (type == "NFC") {
      steps.emplace_back(Normalizer::Nfc{});
      return absl::OkStatus();
    }
    if (type == "Prepend") {
      KVASIR_ASSIGN_OR_RETURN(std::string text, ReadShortText(part, "prepend"));
      steps.emplace_back(Normalizer::Prepend{std::move(text)});
      return absl::OkStatus();
    }
    if (type != "Replace") return Unsupported(part, type, "null, NFC, Prepend, Replace");
    KVASIR_ASSIGN_OR_RETURN(Normalizer::Replace replace, ReadReplace(part));
    const size_t times = (replace.content.size() - 1) / replace.pattern.size() + 1;
    if (growth * times > kMaxGrowth) {
      return absl::InvalidArgumentError(
          absl::StrCat(part.path(), ": with it the normalizer can make a text more than ",
                       kMaxGrowth, " times as long, which is the limit"));
    }
    growth *= times;
    steps.emplace_back(std::move(replace));
    return absl::OkStatus();
  };
  KVASIR_RETURN_IF_ERROR(ForEachPart(normalizer, "normalizers", add));
  return Normalizer(std::move(steps));
}

absl::StatusOr<PreTokenizerParts> ReadPreTokenizer(const JsonValue& pre_tokenizer) {
  PreTokenizerParts parts;
  std::vector<PreTokenizer::Stage>& stages = parts.stages;
  bool byte_level = false;
  bool marks_spaces = false;
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
    if (type == "Metaspace") {
      marks_spaces = true;
      return AddMetaspace(part, &stages);
    }
    return Unsupported(part, type,
                       "null, ByteLevel, Metaspace, Split, Digits and Sequences of them");
  };
  KVASIR_RETURN_IF_ERROR(ForEachPart(pre_tokenizer, "pretokenizers", add));
  if (byte_level && marks_spaces) {
    return pre_tokenizer.Error("has both Metaspace and ByteLevel; expected one of them");
  }
  if (byte_level) parts.alphabet = Alphabet::kBytes;
  return parts;
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

absl::StatusOr<DecoderRules> ReadDecoder(const JsonValue& decoder, Alphabet alphabet) {
  DecoderReader reader;
  int num_parts = 0;
  KVASIR_RETURN_IF_ERROR(
      ForEachPart(decoder, "decoders", [&](const std::string& type, const JsonValue& part) {
        ++num_parts;
        if (alphabet == Alphabet::kCharacters) return reader.Add(type, part);
        return type == "ByteLevel" ? absl::OkStatus() : Unsupported(part, type, "ByteLevel");
      }));
  if (alphabet == Alphabet::kBytes && num_parts != 1) {
    return decoder.Error(absl::StrCat("expected one ByteLevel decoder, found ", num_parts));
  }
  if (num_parts == 0) return decoder.Error("expected a decoder");
  return std::move(reader).rules();
}

}  // namespace kvasir::coordinator
