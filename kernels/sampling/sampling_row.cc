#include "kernels/sampling/sampling_row.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace kvasir::kernels {
namespace {

absl::Status CheckTokens(absl::string_view what, std::span<const int32_t> ids, int64_t vocab) {
  for (int32_t id : ids) {
    if (id >= 0 && id < vocab) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(what, " token ", id, " is not in a vocabulary of ", vocab));
  }
  return absl::OkStatus();
}

absl::Status CheckAdjustments(const SamplingOptions& options, int64_t vocab) {
  for (const TokenBias& bias : options.biases) {
    KVASIR_RETURN_IF_ERROR(CheckTokens("biased", std::span(&bias.token, 1), vocab));
    if (!std::isfinite(bias.bias)) {
      return absl::InvalidArgumentError(absl::StrCat("the bias of token ", bias.token, " is ",
                                                     bias.bias, ", expected a finite number"));
    }
  }
  if (!(options.repetition_penalty > 0) || !std::isfinite(options.repetition_penalty) ||
      !std::isfinite(options.frequency_penalty) || !std::isfinite(options.presence_penalty)) {
    return absl::InvalidArgumentError(
        absl::StrCat("penalties are repetition ", options.repetition_penalty, ", frequency ",
                     options.frequency_penalty, ", presence ", options.presence_penalty,
                     "; expected finite numbers, repetition above 0"));
  }
  if (!HasPenalties(options)) return absl::OkStatus();
  KVASIR_RETURN_IF_ERROR(CheckTokens("prompt", options.prompt, vocab));
  return CheckTokens("output", options.output, vocab);
}

}  // namespace

absl::Status CheckOptions(const SamplingOptions& options, int64_t vocab) {
  if (!(options.temperature >= 0) || std::isinf(options.temperature)) {
    return absl::InvalidArgumentError(
        absl::StrCat("temperature is ", options.temperature, ", expected a number from 0 on"));
  }
  if (!(options.top_p > 0 && options.top_p <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("top_p is ", options.top_p, ", expected a number in (0, 1]"));
  }
  if (options.top_k < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("top_k is ", options.top_k, ", expected a count, or 0 for all tokens"));
  }
  if (!(options.min_p >= 0 && options.min_p <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("min_p is ", options.min_p, ", expected a number in [0, 1]"));
  }
  if (options.given != -1) {
    KVASIR_RETURN_IF_ERROR(CheckTokens("given", std::span(&options.given, 1), vocab));
  }
  KVASIR_RETURN_IF_ERROR(CheckAdjustments(options, vocab));
  return CheckTokens("banned", options.banned, vocab);
}

void CountOccurrences(const SamplingOptions& options, std::span<int32_t> occurrences) {
  std::fill(occurrences.begin(), occurrences.end(), -1);
  for (int32_t id : options.prompt) occurrences[static_cast<size_t>(id)] = 0;
  for (int32_t id : options.output) {
    int32_t& count = occurrences[static_cast<size_t>(id)];
    count = std::max(count, 0) + 1;
  }
}

SampledToken FinishRow(const FoundToken& found, const SamplingOptions& options,
                       std::span<TokenLogit> top) {
  SampledToken result;
  if (found.bad_token >= 0) {
    result.status = absl::DataLossError(
        absl::StrCat("the logit of token ", found.bad_token, " is ", found.bad_logit,
                     ": the weights or the KV of this sequence are damaged"));
    return result;
  }
  if (found.token < 0) {
    result.status = absl::InvalidArgumentError("every token of the vocabulary is banned");
    return result;
  }
  result.token = found.token;
  if (!WantsLogprobs(options)) return result;
  const double total = static_cast<double>(found.total) / static_cast<double>(kLargestWeight);
  const float log_sum_exp = found.max + static_cast<float>(std::log(total));
  result.logprob = found.logit - log_sum_exp;
  std::sort(top.begin(), top.end(), [](const TokenLogit& a, const TokenLogit& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
  });
  std::transform(top.begin(), top.end(), options.top.begin(), [&](const TokenLogit& entry) {
    return TokenLogprob{.token = entry.token, .logprob = entry.logit - log_sum_exp};
  });
  return result;
}

}  // namespace kvasir::kernels
