#include "coordinator/cli/bench_command.h"

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <map>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"

#include "coordinator/cli/bench_interference.h"
#include "coordinator/cli/bench_prompts.h"
#include "coordinator/cli/calls/connect.h"
#include "coordinator/cli/progress_bar.h"
#include "kernels/base/status_macros.h"
#include "proto/finish_numbers.h"

namespace kvasir::coordinator {
namespace {

// The request that all others copy. A run never finds prefixes of another run in the cache.
v1::GenerateRequest MakeRequest(const v1::BenchCommandConfig& config, const std::string& tenant) {
  v1::GenerateRequest request;
  request.set_tenant_id(tenant);
  request.mutable_policy()->set_name(config.policy());
  v1::SamplingParams& sampling = *request.mutable_sampling();
  sampling.set_temperature(0);
  sampling.set_max_tokens(config.max_tokens());
  sampling.set_ignore_eos(true);
  return request;
}

absl::StatusOr<std::vector<v1::GenerateRequest>> MakeRequests(const v1::BenchCommandConfig& config,
                                                              v1::Generation::Stub& stub,
                                                              const v1::GenerateRequest& form) {
  std::vector<v1::GenerateRequest> requests(config.requests(), form);
  std::vector<std::string> documents;
  if (!config.documents().empty()) {
    KVASIR_ASSIGN_OR_RETURN(documents, DocumentPrompts(config.documents()));
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    if (!documents.empty()) {
      requests[i].set_text(documents[i % documents.size()]);
      continue;
    }
    KVASIR_ASSIGN_OR_RETURN(const std::vector<uint32_t> ids,
                            RandomTokens(stub, config.prompt_tokens(), config.seed() + i,
                                         absl::Seconds(config.timeout())));
    requests[i].mutable_token_ids()->mutable_ids()->Assign(ids.begin(), ids.end());
  }
  return requests;
}

double Milliseconds(absl::Duration duration) { return absl::ToDoubleMilliseconds(duration); }

std::string Row(const char* name, const std::vector<absl::Duration>& values) {
  return absl::StrFormat("%-26s %10.1f %10.1f %10.1f %10.1f\n", name, Milliseconds(Mean(values)),
                         Milliseconds(Percentile(values, 0.5)),
                         Milliseconds(Percentile(values, 0.9)),
                         Milliseconds(Percentile(values, 0.99)));
}

nlohmann::ordered_json Percentiles(const std::vector<absl::Duration>& values) {
  return {{"mean", Milliseconds(Mean(values))},
          {"p50", Milliseconds(Percentile(values, 0.5))},
          {"p90", Milliseconds(Percentile(values, 0.9))},
          {"p99", Milliseconds(Percentile(values, 0.99))},
          {"samples", values.size()}};
}

std::string JsonText(const nlohmann::ordered_json& object) {
  return object.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

// Sums over the streams of a load.
struct LoadSummary {
  std::vector<absl::Duration> first_tokens;
  std::vector<absl::Duration> gaps;
  uint64_t tokens = 0;  // generated
  uint64_t prompt_tokens = 0;
  uint64_t cached_tokens = 0;
  uint64_t failed = 0;
  std::map<std::string, int64_t> errors;  // how often each
  double seconds = 0;
};

LoadSummary Summarize(const std::vector<TimedStream>& streams, absl::Duration wall) {
  LoadSummary load;
  load.seconds = absl::ToDoubleSeconds(wall);
  for (const TimedStream& stream : streams) {
    load.tokens += stream.token_times.size();
    if (!stream.status.ok()) {
      ++load.failed;
      ++load.errors[stream.status.ToString()];
    }
    if (!stream.token_times.empty()) {
      load.first_tokens.push_back(Between(stream.start, stream.token_times.front()));
    }
    const std::vector<absl::Duration> own = stream.Gaps();
    load.gaps.insert(load.gaps.end(), own.begin(), own.end());
    const v1::Usage& usage = stream.finish.usage();
    load.prompt_tokens += usage.prompt_tokens();
    load.cached_tokens += proto::TokensOfAllTiers(usage.cached_tokens());
  }
  return load;
}

absl::Status RunLoadBench(const v1::BenchCommandConfig& config, v1::Generation::Stub& stub,
                          const v1::GenerateRequest& form) {
  KVASIR_ASSIGN_OR_RETURN(const std::vector<v1::GenerateRequest> requests,
                          MakeRequests(config, stub, form));
  ProgressBar bar(stderr, "requests");
  int64_t done = 0;
  const SteadyClock clock;
  const TimePoint begin = clock.Now();
  const std::vector<TimedStream> streams =
      RunLoad(stub, requests,
              {.streams = config.streams(),
               .rate = config.rate(),
               .seed = config.seed(),
               .timeout = absl::Seconds(config.timeout())},
              [&](const TimedStream&) {
                if (!config.quiet()) bar.Show(++done, config.requests(), std::nullopt);
              });
  const absl::Duration wall = Between(begin, clock.Now());
  bar.Clear();
  const bool none_succeeded =
      std::all_of(streams.begin(), streams.end(),
                  [](const TimedStream& stream) { return !stream.status.ok(); });
  if (none_succeeded) return streams.front().status;  // there is nothing to measure
  std::cout << (config.json() ? BenchJson(streams, wall) : BenchTable(streams, wall));
  return absl::OkStatus();
}

}  // namespace

std::string BenchTable(const std::vector<TimedStream>& streams, absl::Duration wall) {
  const LoadSummary load = Summarize(streams, wall);
  std::string text =
      absl::StrFormat("%-26s %10s %10s %10s %10s\n", "", "mean", "p50", "p90", "p99");
  absl::StrAppend(&text, Row("time to first token, ms", load.first_tokens),
                  Row("inter-token latency, ms", load.gaps));
  absl::StrAppendFormat(&text, "throughput                 %.1f tokens/s generated, %.1f read\n",
                        static_cast<double>(load.tokens) / load.seconds,
                        static_cast<double>(load.prompt_tokens) / load.seconds);
  absl::StrAppendFormat(
      &text, "requests                   %s in %.2f s, %s failed; %s of %s prompt tokens cached\n",
      WithCommas(streams.size()), load.seconds, WithCommas(load.failed),
      WithCommas(load.cached_tokens), WithCommas(load.prompt_tokens));
  for (const auto& [error, count] : load.errors) {
    absl::StrAppend(&text, "  ", count, " x ", error, "\n");
  }
  return text;
}

std::string BenchJson(const std::vector<TimedStream>& streams, absl::Duration wall) {
  const LoadSummary load = Summarize(streams, wall);
  const nlohmann::ordered_json object = {
      {"requests", streams.size()},
      {"failed", load.failed},
      {"seconds", load.seconds},
      {"time_to_first_token_ms", Percentiles(load.first_tokens)},
      {"inter_token_latency_ms", Percentiles(load.gaps)},
      {"generated_tokens", load.tokens},
      {"prompt_tokens", load.prompt_tokens},
      {"cached_prompt_tokens", load.cached_tokens},
      {"generated_tokens_per_s", static_cast<double>(load.tokens) / load.seconds},
      {"prompt_tokens_per_s", static_cast<double>(load.prompt_tokens) / load.seconds},
      {"errors", load.errors}};
  return absl::StrCat(JsonText(object), "\n");
}

absl::Status RunBench(const v1::BenchCommandConfig& config) {
  KVASIR_ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel,
                          Connect(config.server(), config.api_key_file(), config.tls()));
  const auto stub = v1::Generation::NewStub(channel);
  const v1::GenerateRequest form =
      MakeRequest(config, absl::StrCat("bench-", std::random_device()()));
  if (config.long_prompt_tokens() == 0) return RunLoadBench(config, *stub, form);
  KVASIR_ASSIGN_OR_RETURN(const Interference measured, MeasureInterference(config, *stub, form));
  std::cout << (config.json() ? InterferenceJson(measured) : InterferenceTable(measured));
  if (measured.held()) return absl::OkStatus();
  return absl::FailedPreconditionError("the bound on inter-token latency was missed");
}

}  // namespace kvasir::coordinator
