// Input: a chat template and, after a 0 byte, the messages as JSON; the tests' template language
// and a fixed conversation where one is missing. What is accepted must be UTF-8 with marks in
// order.
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

#include "coordinator/chat/chat_template.h"
#include "coordinator/tokenizer/unicode/utf8.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

constexpr RenderLimits kLimits = {.max_steps = 20'000, .max_bytes = 1 << 20};
constexpr absl::string_view kMessages =
    R"([{"role":"system","content":"<|im_end|> é"},{"role":"user","content":[{"type":"text","text":"a b"}]},
        {"role":"assistant","tool_calls":[{"id":"x","function":{"name":"f","arguments":{"k":[1,2.5,null]}}}]}])";
constexpr absl::string_view kTools =
    R"([{"type":"function","function":{"name":"f","parameters":{"a":1}}}])";

void CheckMarks(const MarkedText& text) {
  KVASIR_CHECK(!FindInvalidUtf8(text.bytes()).has_value());
  size_t done = 0;
  for (const TextSpan& span : text.client_spans()) {
    KVASIR_CHECK(span.begin < span.end && (span.begin > done || done == 0) &&
                 span.end <= text.size());
    done = span.end;
  }
}

void CheckStatus(const absl::Status& status) {
  KVASIR_CHECK(absl::IsInvalidArgument(status));
  KVASIR_CHECK(!FindInvalidUtf8(status.message()).has_value());
}

void Check(absl::string_view source, absl::string_view messages) {
  const auto parsed = ChatTemplate::Parse(source, {{"bos_token", "<s>"}, {"eos_token", "</s>"}});
  if (!parsed.ok()) return CheckStatus(parsed.status());
  for (const auto end :
       {Conversation::End::kGenerationPrompt, Conversation::End::kContinuesLastMessage}) {
    const auto text = (*parsed)->Render({.messages = messages, .tools = kTools, .end = end},
                                        absl::UnixEpoch(), kLimits);
    if (text.ok()) {
      CheckMarks(*text);
    } else {
      CheckStatus(text.status());
    }
  }
}

}  // namespace
}  // namespace kvasir::coordinator

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t cut = input.find('\0');
  kvasir::coordinator::Check(input.substr(0, cut), cut == absl::string_view::npos
                                                       ? kvasir::coordinator::kMessages
                                                       : input.substr(cut + 1));
  return 0;
}
