#include "coordinator/cli/generate_command.h"

#include <cstdio>
#include <iostream>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "coordinator/cli/connect.h"
#include "coordinator/cli/progress_bar.h"
#include "coordinator/cli/read_text.h"
#include "kernels/base/status_macros.h"
#include "proto/grpc_status.h"
#include "proto/kvasir/v1/generation.grpc.pb.h"

namespace kvasir::coordinator {
namespace {

absl::StatusOr<std::string> ReadPrompt(const v1::GenerateCommandConfig& config) {
  const std::string& path = config.prompt_file();
  if (config.prompt().empty() == path.empty()) {
    return absl::InvalidArgumentError(
        "give the prompt by one of --prompt and --prompt-file ('-': stdin)");
  }
  if (!config.prompt().empty()) return config.prompt();
  return path == "-" ? ReadStandardInput() : ReadFile("--prompt-file", path);
}

absl::StatusOr<v1::GenerateRequest> MakeRequest(const v1::GenerateCommandConfig& config,
                                                std::string prompt) {
  KVASIR_RETURN_IF_ERROR(CheckUtf8("the prompt", prompt));
  KVASIR_RETURN_IF_ERROR(CheckUtf8("--tenant", config.tenant()));
  KVASIR_RETURN_IF_ERROR(CheckUtf8("--policy", config.policy()));
  v1::GenerateRequest request;
  request.set_text(std::move(prompt));
  request.set_tenant_id(config.tenant());
  request.mutable_policy()->set_name(config.policy());
  v1::SamplingParams& sampling = *request.mutable_sampling();
  sampling.set_temperature(static_cast<float>(config.temperature()));
  sampling.set_top_p(static_cast<float>(config.top_p()));
  sampling.set_top_k(config.top_k());
  if (config.has_seed()) sampling.set_seed(config.seed());
  sampling.set_max_tokens(config.max_tokens());
  sampling.set_ignore_eos(config.ignore_eos());
  for (const std::string& stop : config.stop()) {
    KVASIR_RETURN_IF_ERROR(CheckUtf8("--stop", stop));
    sampling.add_stop(stop);
  }
  KVASIR_RETURN_IF_ERROR(CheckSize(request));
  return request;
}

double ToSeconds(const google::protobuf::Duration& duration) {
  return static_cast<double>(duration.seconds()) + 1e-9 * duration.nanos();
}

double Percent(uint64_t part, uint64_t whole) {
  return whole == 0 ? 0.0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole);
}

std::string SkippedLine(absl::string_view phase, uint64_t total, const v1::BlocksSkipped& skipped) {
  const uint64_t sum =
      skipped.selected_out() + skipped.window() + skipped.pruned() + skipped.terminated();
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

// Reads the stream to its end and prints the answer to standard output as it arrives.
absl::StatusOr<v1::Finish> ReadStream(grpc::ClientReader<v1::GenerateResponse>& reader,
                                      bool quiet) {
  std::unique_ptr<ProgressBar> bar;
  if (!quiet) bar = std::make_unique<ProgressBar>(stderr, "reading prompt");
  v1::Finish finish;
  bool finished = false;
  v1::GenerateResponse response;
  while (reader.Read(&response)) {
    if (response.has_progress() && bar != nullptr) {
      const v1::Progress& progress = response.progress();
      bar->Show(progress.processed_tokens(), progress.prompt_tokens(),
                progress.has_eta() ? std::make_optional(absl::Seconds(ToSeconds(progress.eta())))
                                   : std::nullopt);
    } else if (response.has_tokens()) {
      bar.reset();
      std::cout << response.tokens().text() << std::flush;
    } else if (response.has_finish()) {
      finish = response.finish();
      finished = true;
    }
  }
  bar.reset();
  const absl::Status status = proto::FromGrpcStatus(reader.Finish());
  if (!status.ok()) return status;
  if (!finished) return absl::InternalError("the server ended the stream without a finish message");
  return finish;
}

}  // namespace

std::string FinishSummary(const v1::Finish& finish) {
  const v1::Usage& usage = finish.usage();
  const v1::AttentionReport& attention = finish.attention();
  const v1::CachedTokens& cached = usage.cached_tokens();
  const double decode_s = ToSeconds(finish.timing().decode());
  std::string text = absl::StrFormat(
      "  prompt                   %s tokens; cached: %s device, %s host, %s disk\n"
      "  time to first token      %.3f s\n"
      "  answer                   %s tokens",
      WithCommas(usage.prompt_tokens()), WithCommas(cached.device()), WithCommas(cached.host()),
      WithCommas(cached.disk()), ToSeconds(finish.timing().time_to_first_token()),
      WithCommas(usage.completion_tokens()));
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
  KVASIR_ASSIGN_OR_RETURN(const v1::GenerateRequest request,
                          MakeRequest(config, std::move(prompt)));
  const auto stub = v1::Generation::NewStub(Connect(config.server()));
  grpc::ClientContext context;
  SetTimeout(absl::Seconds(config.timeout()), context);
  const auto reader = stub->Generate(&context, request);
  KVASIR_ASSIGN_OR_RETURN(const v1::Finish finish, ReadStream(*reader, config.quiet()));
  std::cout << std::endl;
  if (!config.quiet()) std::cerr << "\n" << FinishSummary(finish);
  return absl::OkStatus();
}

}  // namespace kvasir::coordinator
