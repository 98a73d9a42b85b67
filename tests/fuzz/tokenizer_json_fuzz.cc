// Input: a tokenizer.json, or a JSON merge patch (RFC 7396) to the smallest one that loads, which
// lets small inputs reach deep. What the loader accepts must encode and decode without a fault.
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

#include "coordinator/tokenizer/incremental_decoder.h"
#include "coordinator/tokenizer/json_value.h"
#include "coordinator/tokenizer/tokenizer.h"
#include "coordinator/tokenizer/unicode/utf8.h"
#include "kernels/base/status_macros.h"
#include "tests/coordinator/tokenizer/minimal_json.h"

namespace kvasir::coordinator {
namespace {

constexpr TokenizerLimits kLimits = {.max_tokens = 4096, .max_merges = 4096};

void CheckText(const Tokenizer& tokenizer, absl::string_view text) {
  for (const auto special : {SpecialTokenText::kParse, SpecialTokenText::kPlainText}) {
    const auto ids = tokenizer.Encode(text, {.special_token_text = special, .max_tokens = 2000});
    if (!ids.ok()) {
      KVASIR_CHECK(absl::IsInvalidArgument(ids.status()) ||
                   absl::IsResourceExhausted(ids.status()));
      continue;
    }
    KVASIR_CHECK(ids->size() <= 2000);
    const auto decoded = tokenizer.Decode(*ids, SpecialTokens::kKeep);
    KVASIR_CHECK(decoded.ok() && !FindInvalidUtf8(*decoded).has_value());
    IncrementalDecoder decoder(tokenizer, SpecialTokens::kKeep, TextPosition::kBegin);
    std::string streamed;
    for (const int32_t id : *ids) streamed += decoder.Push(id);
    KVASIR_CHECK(streamed + decoder.Flush() == *decoded);
  }
}

void CheckFile(absl::string_view json) {
  const auto tokenizer = Tokenizer::Parse(json, kLimits);
  if (!tokenizer.ok()) {
    KVASIR_CHECK(absl::IsInvalidArgument(tokenizer.status()));
    KVASIR_CHECK(!FindInvalidUtf8(tokenizer.status().message()).has_value());
    KVASIR_CHECK(tokenizer.status().message().size() < 2000);
    return;
  }
  KVASIR_CHECK((*tokenizer)->vocab_size() <= kLimits.max_tokens);
  CheckText(**tokenizer, json);
  CheckText(**tokenizer, " a\u0301b  12\n\n\u3000<s>abab</s> \u65E5\u672C it's\r\n\t \U0001F600");
  std::vector<int32_t> all;
  for (int32_t id = 0; id < (*tokenizer)->vocab_size(); ++id) {
    if ((*tokenizer)->HasToken(id)) all.push_back(id);
  }
  KVASIR_CHECK((*tokenizer)->Decode(all, SpecialTokens::kSkip).ok());
}

// The smallest file with `patch` applied to it, when that is JSON.
void CheckPatch(absl::string_view patch) {
  const auto parsed = ParseJson(patch, {.max_values = 10'000, .max_keys = 10'000, .max_depth = 64});
  if (!parsed.ok()) return;
  nlohmann::json document = MinimalJson();
  document.merge_patch(*parsed);
  CheckFile(document.dump());
}

}  // namespace
}  // namespace kvasir::coordinator

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view input(reinterpret_cast<const char*>(data), size);
  kvasir::coordinator::CheckFile(input);
  kvasir::coordinator::CheckPatch(input);
  return 0;
}
