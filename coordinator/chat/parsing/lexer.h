// Cuts a chat template into text and the tokens of its tags, with Jinja's rules for white space
// (trim_blocks and lstrip_blocks are on, as in `transformers`; the last newline of the template is
// dropped). Called by the parser. Pure function.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvasir::coordinator {

struct TemplateToken {
  enum class Kind {
    kText,         // outside of tags
    kOutputBegin,  // {{
    kOutputEnd,
    kBlockBegin,  // {%
    kBlockEnd,
    kName,
    kString,  // text is its value
    kInteger,
    kFloat,
    kOperator,
    kEnd,
  };
  Kind kind;
  int line;
  std::string text = {};
};

// The last token is kEnd. Errors: INVALID_ARGUMENT with the line.
// REQUIRES: `source` is well-formed UTF-8.
absl::StatusOr<std::vector<TemplateToken>> ReadTokens(absl::string_view source);

}  // namespace kvasir::coordinator
