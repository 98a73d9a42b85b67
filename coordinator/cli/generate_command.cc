#include "coordinator/cli/generate_command.h"

#include <cstdio>
#include <iostream>
#include <memory>
#include <string>

#include "absl/random/random.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"

#include "coordinator/cli/calls/connect.h"
#include "coordinator/cli/calls/resuming_call.h"
#include "coordinator/cli/check_text.h"
#include "coordinator/cli/progress_bar.h"
#include "kernels/base/status_macros.h"
#include "proto/finish_numbers.h"
#include "proto/grpc_status.h"
#include "proto/kvasir/v1/generation.grpc.pb.h"
#include "proto/text_file.h"

namespace kvasir::coordinator {
namespace {

absl::StatusOr<std::string> ReadPrompt(const v1::GenerateCommandConfig& config) {
  const std::string& path = config.prompt_file();
  if (config.prompt().empty() == path.empty()) {
    return absl::InvalidArgumentError(
        "give the prompt by one of --prompt and --prompt-file ('-': stdin)");
  }
  if (!config.prompt().empty()) return config.prompt();
  return path == "-" ? proto::ReadStandardInput() : proto::ReadTextFile("--prompt-file", path);
}

// Parses "5,17".
absl::Status AddStopTokens(const std::string& text, v1::SamplingParams& sampling) {
  for (const absl::string_view word : absl::StrSplit(text, ',', absl::SkipWhitespace())) {
    uint32_t token = 0;
    if (!absl::SimpleAtoi(word, &token)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--stop-token-ids has '", word, "', expected token ids, comma-separated: 5,17"));
    }
    sampling.add_stop_token_ids(token);
  }
  return absl::OkStatus();
}

// Parses "5=-100,17=2.5".
absl::Status AddBiases(const std::string& text, v1::SamplingParams& sampling) {
  for (const absl::string_view word : absl::StrSplit(text, ',', absl::SkipWhitespace())) {
    const std::pair<absl::string_view, absl::string_view> halves =
        absl::StrSplit(word, absl::MaxSplits('=', 1));
    uint32_t token = 0;
    float bias = 0;
    if (!absl::SimpleAtoi(halves.first, &token) || !absl::SimpleAtof(halves.second, &bias)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--logit-bias has '", word, "', expected TOKEN=BIAS, comma-separated: 5=-100,17=2.5"));
    }
    v1::LogitBias& added = *sampling.add_logit_bias();
    added.set_token_id(token);
    added.set_bias(bias);
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::SamplingParams> MakeSampling(const v1::GenerateCommandConfig& config) {
  v1::SamplingParams sampling;
  sampling.set_temperature(static_cast<float>(config.temperature()));
  sampling.set_top_p(static_cast<float>(config.top_p()));
  sampling.set_top_k(config.top_k());
  sampling.set_min_p(static_cast<float>(config.min_p()));
  sampling.set_frequency_penalty(static_cast<float>(config.frequency_penalty()));
  sampling.set_presence_penalty(static_cast<float>(config.presence_penalty()));
  sampling.set_repetition_penalty(static_cast<float>(config.repetition_penalty()));
  if (config.has_seed()) sampling.set_seed(config.seed());
  sampling.set_max_tokens(config.max_tokens());
  sampling.set_min_tokens(config.min_tokens());
  sampling.set_ignore_eos(config.ignore_eos());
  sampling.set_skip_special_tokens(config.skip_special_tokens());
  sampling.set_include_stop_str_in_output(config.include_stop_str_in_output());
  if (config.has_logprobs()) sampling.set_logprobs(config.logprobs());
  if (config.has_prompt_logprobs()) sampling.set_prompt_logprobs(config.prompt_logprobs());
  sampling.set_logprobs_text(config.logprobs_text());
  for (const std::string& stop : config.stop()) {
    KVASIR_RETURN_IF_ERROR(CheckUtf8("--stop", stop));
    sampling.add_stop(stop);
  }
  KVASIR_RETURN_IF_ERROR(AddStopTokens(config.stop_token_ids(), sampling));
  KVASIR_RETURN_IF_ERROR(AddBiases(config.logit_bias(), sampling));
  return sampling;
}

}  // namespace

absl::StatusOr<v1::GenerateRequest> MakeGenerateRequest(const v1::GenerateCommandConfig& config,
                                                        std::string prompt) {
  KVASIR_RETURN_IF_ERROR(CheckUtf8("the prompt", prompt));
  KVASIR_RETURN_IF_ERROR(CheckUtf8("--tenant", config.tenant()));
  KVASIR_RETURN_IF_ERROR(CheckUtf8("--policy", config.policy()));
  KVASIR_RETURN_IF_ERROR(CheckUtf8("--request-id", config.request_id()));
  KVASIR_RETURN_IF_ERROR(CheckUtf8("--context", config.context()));
  v1::GenerateRequest request;
  request.set_text(std::move(prompt));
  request.set_tenant_id(config.tenant());
  request.mutable_policy()->set_name(config.policy());
  request.set_request_id(config.request_id());
  request.set_add_special_tokens(config.add_special_tokens());
  request.set_parse_special_tokens(config.parse_special_tokens());
  request.set_context(config.context());
  if (!config.context().empty()) request.set_add_special_tokens(false);  // they precede the context
  KVASIR_ASSIGN_OR_RETURN(*request.mutable_sampling(), MakeSampling(config));
  KVASIR_RETURN_IF_ERROR(CheckSize(request));
  return request;
}

namespace {

using proto::ToSeconds;

double Percent(uint64_t part, uint64_t whole) {
  return whole == 0 ? 0.0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole);
}

std::string SkippedLine(absl::string_view phase, uint64_t total, const v1::BlocksSkipped& skipped) {
  const uint64_t sum = proto::SkippedPages(skipped);
  return absl::StrFormat("  blocks skipped, %-8s %s of %s (%.1f%%)\n", phase, WithCommas(sum),
                         WithCommas(total), Percent(sum, total));
}

const char* WhyUnmeasured(v1::MassUnmeasured why) {
  switch (why) {
    case v1::MASS_UNMEASURED_NOTHING_COMPUTED:
      return "none to measure: no token was computed in this phase";
    case v1::MASS_UNMEASURED_DENSE:
      return "all: this part of the policy attends to everything";
    case v1::MASS_UNMEASURED_OFF:
      return "unknown: the server measures none, its --mass-sample-rate is 0";
    case v1::MASS_UNMEASURED_GPU:
      return "unknown: a worker on a GPU does not measure it";
    case v1::MASS_UNMEASURED_ON_DEMAND:
      return "unknown: it is not measured with --kv-on-demand-size-gb";
    case v1::MASS_UNMEASURED_COMPACT_POSITIONS:
      return "unknown: it is not measured under --position-extension=streaming";
    case v1::MASS_UNMEASURED_NOT_DRAWN:
      return "unknown: no layer and step of this phase was drawn for the sample";
    default:
      return "unknown";
  }
}

std::string Masses(const v1::MassSummary& mass, absl::string_view how) {
  return absl::StrFormat("mean %.4f, p1 %.3f, min %.4f (%s samples, %s)", mass.mean(), mass.p1(),
                         mass.minimum(), WithCommas(mass.samples()), how);
}

std::string MassLines(const v1::AttentionReport& attention) {
  std::string text = "  attention mass kept      prefill: ";
  if (attention.has_prefill_measured_mass()) {
    text += Masses(attention.prefill_measured_mass(), "measured");
  } else {
    text += WhyUnmeasured(attention.prefill_mass_unmeasured());
  }
  text += "\n                           decode: ";
  if (attention.has_decode_measured_mass()) {
    text += Masses(attention.decode_measured_mass(), "measured");
  } else {
    text += WhyUnmeasured(attention.decode_mass_unmeasured());
  }
  if (attention.has_estimated_mass()) {
    text += "\n                           decode: ";
    text += Masses(attention.estimated_mass(), "estimated");
  }
  return text + "\n";
}

// Returns a token's text after a space; empty when none was asked for.
std::string Quoted(const v1::TokenText& token) {
  switch (token.content_case()) {
    case v1::TokenText::kText:
      return absl::StrCat(" '", absl::Utf8SafeCHexEscape(token.text()), "'");
    case v1::TokenText::kPart:
      return absl::StrCat(" '", absl::CHexEscape(token.part()), "'");
    case v1::TokenText::CONTENT_NOT_SET:
      return "";
  }
  return "";
}

// The end of an answer, and the log probabilities of tokens.
struct Ending {
  v1::Finish finish;
  std::string prompt_lines;
  std::string logprob_lines;
};

// Prints the answer to standard output as it arrives.
absl::StatusOr<Ending> Print(ResumingCall& call, bool quiet) {
  std::unique_ptr<ProgressBar> bar;
  if (!quiet) bar = std::make_unique<ProgressBar>(stderr, "reading prompt");
  Ending ending;
  const absl::Status status = call.Run([&](const v1::GenerateResponse& response) {
    if (response.has_progress() && bar != nullptr) {
      const v1::Progress& progress = response.progress();
      bar->Show(progress.processed_tokens(), progress.prompt_tokens(),
                progress.has_eta() ? std::make_optional(absl::Seconds(ToSeconds(progress.eta())))
                                   : std::nullopt);
    } else if (response.has_prompt_logprobs()) {
      // A prompt that is read again is scored again.
      if (response.prompt_logprobs().index() == 1) ending.prompt_lines.clear();
      ending.prompt_lines += LogprobLines(response.prompt_logprobs());
    } else if (response.has_tokens()) {
      bar.reset();
      std::cout << response.tokens().text() << std::flush;
      ending.logprob_lines += LogprobLines(response.tokens());
    } else if (response.has_finish()) {
      ending.finish = response.finish();
    }
  });
  bar.reset();
  if (!status.ok()) return status;
  return ending;
}

}  // namespace

std::string LogprobLines(const v1::Tokens& tokens) {
  std::string text;
  for (int i = 0; i < tokens.logprobs_size(); ++i) {
    const v1::TokenLogprobs& logprobs = tokens.logprobs(i);
    absl::StrAppendFormat(&text, "  token %7d%s  logprob %8.4f", tokens.token_ids(i),
                          Quoted(logprobs.token()), logprobs.logprob());
    for (const v1::TopLogprob& top : logprobs.top()) {
      absl::StrAppendFormat(&text, "  %d%s: %.4f", top.token_id(), Quoted(top.token()),
                            top.logprob());
    }
    text += "\n";
  }
  return text;
}

std::string LogprobLines(const v1::PromptLogprobs& prompt) {
  std::string text;
  const auto count = static_cast<int>(prompt.top_count());
  for (int i = 0; i < prompt.token_ids_size(); ++i) {
    absl::StrAppendFormat(&text, "  prompt token %7d  logprob %8.4f", prompt.token_ids(i),
                          prompt.logprobs(i));
    for (int n = i * count; n < (i + 1) * count; ++n) {
      absl::StrAppendFormat(&text, "  %d: %.4f", prompt.top_token_ids(n), prompt.top_logprobs(n));
    }
    text += "\n";
  }
  return text;
}

std::string FinishSummary(const v1::Finish& finish) {
  const v1::Usage& usage = finish.usage();
  const v1::AttentionReport& attention = finish.attention();
  const v1::CachedTokens& cached = usage.cached_tokens();
  const double decode_s = ToSeconds(finish.timing().decode());
  std::string text = absl::StrFormat(
      "  prompt                   %s tokens; cached: %s device, %s host, %s disk, %s peer\n"
      "  time to first token      %.3f s\n"
      "  answer                   %s tokens",
      WithCommas(usage.prompt_tokens()), WithCommas(cached.device()), WithCommas(cached.host()),
      WithCommas(cached.disk()), WithCommas(cached.peer()),
      ToSeconds(finish.timing().time_to_first_token()), WithCommas(usage.completion_tokens()));
  if (usage.completion_tokens() > 1 && decode_s > 0) {
    absl::StrAppendFormat(&text, ", %.1f tokens/s", (usage.completion_tokens() - 1) / decode_s);
  }
  const uint64_t reads = attention.device_page_hits() + attention.device_page_misses();
  absl::StrAppend(
      &text,
      absl::StrFormat("\n  page reads               device %.1f%%, host %.1f%% of %s\n",
                      Percent(attention.device_page_hits(), reads),
                      Percent(attention.device_page_misses(), reads), WithCommas(reads)),
      SkippedLine("prefill:", attention.prefill_blocks_total(), attention.prefill_blocks_skipped()),
      SkippedLine("decode:", attention.decode_blocks_total(), attention.decode_blocks_skipped()),
      absl::StrFormat("  tokens attended to       %.0f per decoded token, layer and KV head\n",
                      attention.decode_budget_tokens()),
      MassLines(attention));
  if (attention.disk_page_waits() > 0) {
    absl::StrAppendFormat(&text, "  waits for pages on disk  %s, %.3f s in all\n",
                          WithCommas(attention.disk_page_waits()), attention.disk_wait_s());
  }
  if (attention.has_contract()) {
    const v1::ContractReport& contract = attention.contract();
    absl::StrAppendFormat(
        &text, "  selections under min_mass %s: %.1f%% made dense, %.1f%% widened, %.1f%% missed\n",
        WithCommas(contract.selections()), Percent(contract.dense(), contract.selections()),
        Percent(contract.widened(), contract.selections()),
        Percent(contract.missed(), contract.selections()));
  }
  return text;
}

absl::Status RunGenerate(const v1::GenerateCommandConfig& config) {
  KVASIR_ASSIGN_OR_RETURN(std::string prompt, ReadPrompt(config));
  KVASIR_ASSIGN_OR_RETURN(v1::GenerateRequest request,
                          MakeGenerateRequest(config, std::move(prompt)));
  // An answer can go on elsewhere with the same tokens only if its seed is known.
  if (!config.has_seed())
    request.mutable_sampling()->set_seed(absl::Uniform<uint64_t>(absl::BitGen()));
  KVASIR_ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel,
                          Connect(config.server(), config.api_key_file(), config.tls()));
  const auto stub = v1::Generation::NewStub(channel);
  ResumingCall call(*stub, std::move(request),
                    {.timeout = absl::Seconds(config.timeout()),
                     .resume_timeout = absl::Seconds(config.resume_timeout()),
                     .tell = config.quiet() ? nullptr : stderr});
  KVASIR_ASSIGN_OR_RETURN(const Ending ending, Print(call, config.quiet()));
  std::cout << std::endl;
  std::cerr << ending.prompt_lines << ending.logprob_lines;
  if (!config.quiet()) std::cerr << "\n" << FinishSummary(ending.finish);
  return absl::OkStatus();
}

}  // namespace kvasir::coordinator
