#include "coordinator/tokenizer/split_regex.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "coordinator/tokenizer/regex_dialect.h"
#include "coordinator/tokenizer/unicode/utf8.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

constexpr size_t kMaxPatternBytes = 16 << 10;
// Most steps back in one match: a few per byte, because one alternative after another goes through
// a run of white space and gives it up.
constexpr uint64_t kMatchLimit = 10'000'000;
constexpr uint64_t kMatchLimitPerByte = 8;
constexpr size_t kJitStackStart = 32 << 10;
constexpr size_t kJitStackLimit = 1 << 20;

std::string PcreMessage(int code) {
  std::array<PCRE2_UCHAR, 256> buffer{};
  pcre2_get_error_message(code, buffer.data(), buffer.size());
  return reinterpret_cast<const char*>(buffer.data());
}

PCRE2_SPTR Subject(absl::string_view text) {
  static constexpr char kEmpty[] = "";
  return reinterpret_cast<PCRE2_SPTR>(text.data() == nullptr ? kEmpty : text.data());
}

}  // namespace

struct SplitRegex::Code {
  pcre2_code* code;

  explicit Code(pcre2_code* c) : code(c) {}
  ~Code() { pcre2_code_free(code); }
  Code(const Code&) = delete;
  Code& operator=(const Code&) = delete;
};

struct SplitRegex::Scratch::Pcre {
  pcre2_match_data* match_data = pcre2_match_data_create(1, nullptr);
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_jit_stack* jit_stack = pcre2_jit_stack_create(kJitStackStart, kJitStackLimit, nullptr);

  Pcre() {
    KVASIR_CHECK(match_data != nullptr && context != nullptr);
    // The stack is null where no just-in-time code may be made; then the interpreter runs.
    if (jit_stack != nullptr) pcre2_jit_stack_assign(context, nullptr, jit_stack);
  }
  ~Pcre() {
    pcre2_jit_stack_free(jit_stack);
    pcre2_match_context_free(context);
    pcre2_match_data_free(match_data);
  }
  Pcre(const Pcre&) = delete;
  Pcre& operator=(const Pcre&) = delete;
};

SplitRegex::Scratch::Scratch() : pcre_(std::make_unique<Pcre>()) {}
SplitRegex::Scratch::~Scratch() = default;

absl::StatusOr<SplitRegex> SplitRegex::CompilePattern(absl::string_view pattern) {
  if (pattern.size() > kMaxPatternBytes) {
    return absl::InvalidArgumentError(absl::StrCat("splitting pattern has ", pattern.size(),
                                                   " bytes; the limit is ", kMaxPatternBytes));
  }
  KVASIR_ASSIGN_OR_RETURN(const std::string translated, TranslateToPcre(pattern));
  return Compile(translated, Syntax::kPcre);
}

absl::StatusOr<SplitRegex> SplitRegex::CompileLiteral(absl::string_view text) {
  return Compile(text, Syntax::kLiteral);
}

absl::StatusOr<SplitRegex> SplitRegex::Compile(absl::string_view pattern, Syntax syntax) {
  const uint32_t options =
      PCRE2_UTF |
      (syntax == Syntax::kLiteral ? PCRE2_LITERAL : PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C);
  const std::unique_ptr<pcre2_compile_context, decltype(&pcre2_compile_context_free)> context(
      pcre2_compile_context_create(nullptr), &pcre2_compile_context_free);
  KVASIR_CHECK(context != nullptr);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE offset = 0;
  auto code = std::make_shared<const Code>(
      pcre2_compile(Subject(pattern), pattern.size(), options, &error, &offset, context.get()));
  if (code->code == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("splitting pattern is wrong at byte ", offset,
                                                   ": ", PcreMessage(error), ": ",
                                                   ForMessage(pattern)));
  }
  uint32_t matches_empty = 0;
  pcre2_pattern_info(code->code, PCRE2_INFO_MATCHEMPTY, &matches_empty);
  if (matches_empty != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("splitting pattern can match the empty string: ", ForMessage(pattern)));
  }
  // This fails without permission for executable memory. Then the interpreter matches.
  pcre2_jit_compile(code->code, PCRE2_JIT_COMPLETE);
  return SplitRegex(std::move(code));
}

absl::StatusOr<std::optional<SplitRegex::Match>> SplitRegex::Find(absl::string_view text,
                                                                  size_t from,
                                                                  Scratch* scratch) const {
  Scratch::Pcre& pcre = *scratch->pcre_;
  const uint64_t limit = kMatchLimit + kMatchLimitPerByte * (text.size() - from);
  pcre2_set_match_limit(pcre.context, static_cast<uint32_t>(std::min<uint64_t>(limit, UINT32_MAX)));
  // The text was validated once, before it was cut into pieces; validating it at every match would
  // take quadratic time. The result 0 says that groups of the pattern were not recorded.
  const int result = pcre2_match(code_->code, Subject(text), text.size(), from, PCRE2_NO_UTF_CHECK,
                                 pcre.match_data, pcre.context);
  if (result == PCRE2_ERROR_NOMATCH) return std::nullopt;
  if (result < 0) {
    return absl::ResourceExhaustedError(absl::StrCat("splitting pattern gave up at byte ", from,
                                                     " of a piece of ", text.size(),
                                                     " bytes: ", PcreMessage(result)));
  }
  const PCRE2_SIZE* offsets = pcre2_get_ovector_pointer(pcre.match_data);
  // A match begins at `from` or later, because \K is refused. Empty matches were refused.
  KVASIR_CHECK(from <= offsets[0] && offsets[0] < offsets[1] && offsets[1] <= text.size());
  return Match{offsets[0], offsets[1]};
}

}  // namespace kvasir::coordinator
