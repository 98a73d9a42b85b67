#include "coordinator/tokenizer_fit.h"

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

constexpr char kRemedy[] = "; put the tokenizer.json of this very model into its folder";

absl::Status CheckSize(const Tokenizer& tokenizer, int64_t vocab_size) {
  const int64_t tokens = tokenizer.vocab_size();
  if (tokens > vocab_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the tokenizer does not fit the model: it has the token ", tokens - 1, " ('",
        tokenizer.TokenContent(static_cast<int32_t>(tokens - 1)),
        "'), and config.json says that the model has ", vocab_size, " tokens", kRemedy));
  }
  // Padding of the embedding is far less than this.
  if (tokens < vocab_size / 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("the tokenizer does not fit the model: it has ", tokens,
                     " tokens, and config.json says that the model has ", vocab_size, kRemedy));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckTokenizerFits(const Tokenizer& tokenizer, const ModelFolder& folder) {
  if (folder.vocab_size.has_value()) {
    KVASIR_RETURN_IF_ERROR(CheckSize(tokenizer, *folder.vocab_size));
  }
  for (const int32_t id : folder.eos_token_ids) {
    if (tokenizer.HasToken(id)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("the tokenizer does not fit the model: eos_token_id is ", id,
                     ", which is no token of its ", tokenizer.vocab_size(), kRemedy,
                     ", or mend eos_token_id in generation_config.json and config.json"));
  }
  return absl::OkStatus();
}

}  // namespace kvasir::coordinator
