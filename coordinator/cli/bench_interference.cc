#include "coordinator/cli/bench_interference.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"

#include "coordinator/cli/bench_prompts.h"
#include "coordinator/cli/calls/connect.h"
#include "coordinator/cli/calls/load_client.h"
#include "coordinator/cli/progress_bar.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "proto/grpc_status.h"

namespace kvasir::coordinator {
namespace {

constexpr int64_t kSmallestChunk = 64;
constexpr int64_t kSpareTokens = 128;  // before measuring begins, and until the prompt arrives

// Decoding streams that run until Stop.
class Streams {
 public:
  Streams(v1::Generation::Stub& stub, const std::vector<v1::GenerateRequest>& requests,
          absl::Duration timeout)
      : received_(requests.size(), 0), streams_(requests.size()) {
    for (size_t i = 0; i < requests.size(); ++i) {
      threads_.emplace_back([this, &stub, &requests, timeout, i] {
        streams_[i] = ReadTimed(stub, requests[i], clock_.Now(), timeout,
                                [this, i](size_t count) { return OnTokens(i, count); });
        kernels::MutexLock lock(mu_);
        ++ended_;
        changed_.NotifyAll();
      });
    }
  }
  ~Streams() { Stop(); }

  // Waits until every stream has `count` tokens; false when one has ended.
  bool Await(size_t count) {
    kernels::MutexLock lock(mu_);
    while (ended_ == 0 && *std::min_element(received_.begin(), received_.end()) < count) {
      changed_.Wait(mu_);
    }
    return ended_ == 0;
  }
  bool all_run() {
    kernels::MutexLock lock(mu_);
    return ended_ == 0;
  }

  void Stop() {
    stopping_ = true;
    for (std::thread& thread : threads_) {
      if (thread.joinable()) thread.join();
    }
  }
  // Returns the gaps that end in (from, to]. REQUIRES: Stop was called.
  std::vector<absl::Duration> Gaps(TimePoint from, TimePoint to) const {
    std::vector<absl::Duration> gaps;
    for (const TimedStream& stream : streams_) {
      const std::vector<absl::Duration> all = stream.Gaps();
      for (size_t i = 0; i < all.size(); ++i) {
        const TimePoint end = stream.token_times[i + 1];
        if (end > from && end <= to) gaps.push_back(all[i]);
      }
    }
    return gaps;
  }
  // Returns the first error that Stop did not cause. REQUIRES: Stop was called.
  absl::Status status() const {
    for (const TimedStream& stream : streams_) {
      if (!stream.status.ok() && !absl::IsCancelled(stream.status)) return stream.status;
    }
    return absl::OkStatus();
  }

 private:
  bool OnTokens(size_t stream, size_t count) EXCLUDES(mu_) {
    kernels::MutexLock lock(mu_);
    received_[stream] = count;
    changed_.NotifyAll();
    return !stopping_;
  }

  const SteadyClock clock_;
  std::atomic<bool> stopping_ = false;
  kernels::Mutex mu_;
  kernels::CondVar changed_;
  std::vector<size_t> received_ GUARDED_BY(mu_);
  size_t ended_ GUARDED_BY(mu_) = 0;
  std::vector<TimedStream> streams_;  // each written by its own thread
  std::vector<std::thread> threads_;
};

absl::StatusOr<int64_t> ContextLength(v1::Generation::Stub& stub, absl::Duration timeout) {
  grpc::ClientContext context;
  SetTimeout(timeout, context);
  v1::GetModelInfoResponse model;
  KVASIR_RETURN_IF_ERROR(proto::FromGrpcStatus(stub.GetModelInfo(&context, {}, &model)));
  return model.max_context_length();
}

class Scenario {
 public:
  Scenario(const v1::BenchCommandConfig& config, v1::Generation::Stub& stub,
           const v1::GenerateRequest& form)
      : config_(config), stub_(stub), form_(form), timeout_(absl::Seconds(config.timeout())) {}

  absl::StatusOr<Interference> Run() {
    KVASIR_ASSIGN_OR_RETURN(context_, ContextLength(stub_, timeout_));
    if (config_.long_prompt_tokens() + 1 > context_ || config_.prompt_tokens() + 2 > context_) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--long-prompt-tokens is ", config_.long_prompt_tokens(), ", the server's context ",
          context_, " tokens; start it with a larger --max-model-len"));
    }
    measured_.streams = config_.streams();
    measured_.long_prompt_tokens = config_.long_prompt_tokens();
    KVASIR_RETURN_IF_ERROR(ReadAlone());
    KVASIR_RETURN_IF_ERROR(ReadAmongStreams());
    return measured_;
  }

 private:
  absl::StatusOr<v1::GenerateRequest> Request(int64_t prompt_tokens, int64_t max_tokens) {
    KVASIR_ASSIGN_OR_RETURN(
        const std::vector<uint32_t> ids,
        RandomTokens(stub_, prompt_tokens, config_.seed() + prompts_++, timeout_));
    v1::GenerateRequest request = form_;
    request.mutable_token_ids()->mutable_ids()->Assign(ids.begin(), ids.end());
    request.mutable_sampling()->set_max_tokens(static_cast<uint32_t>(max_tokens));
    return request;
  }

  absl::Status ReadAlone() {
    KVASIR_ASSIGN_OR_RETURN(const v1::GenerateRequest request,
                            Request(config_.long_prompt_tokens(), 1));
    Tell("the long prompt alone");
    const TimedStream alone = ReadTimed(stub_, request, SteadyClock().Now(), timeout_, nullptr);
    KVASIR_RETURN_IF_ERROR(alone.status);
    for (size_t i = 1; i < alone.progress_times.size(); ++i) {
      measured_.chunks.push_back(Between(alone.progress_times[i - 1], alone.progress_times[i]));
    }
    measured_.read_alone = Between(alone.start, alone.token_times.front());
    return absl::OkStatus();
  }

  absl::Status ReadAmongStreams() {
    KVASIR_ASSIGN_OR_RETURN(const v1::GenerateRequest long_prompt,
                            Request(config_.long_prompt_tokens(), 1));
    std::vector<v1::GenerateRequest> requests;
    // Enough to outlast the long prompt: a step reads at least kSmallestChunk tokens of it and
    // gives each stream one token. More would reserve KV tiers that the streams never use.
    const int64_t answer = std::min<int64_t>(
        context_ - config_.prompt_tokens(),
        config_.max_tokens() + config_.long_prompt_tokens() / kSmallestChunk + kSpareTokens);
    for (uint32_t i = 0; i < config_.streams(); ++i) {
      KVASIR_ASSIGN_OR_RETURN(requests.emplace_back(), Request(config_.prompt_tokens(), answer));
    }
    const SteadyClock clock;
    Streams streams(stub_, requests, timeout_);
    Tell("the streams alone");
    const bool started = streams.Await(2);
    const TimePoint begin = clock.Now();
    const bool decoded = started && streams.Await(2 + config_.max_tokens());
    const TimePoint arrival = clock.Now();
    TimedStream read;
    Tell("the streams while the long prompt arrives");
    if (decoded) read = ReadTimed(stub_, long_prompt, clock.Now(), timeout_, nullptr);
    const bool all_run = streams.all_run();
    streams.Stop();
    KVASIR_RETURN_IF_ERROR(streams.status());
    if (!decoded || !all_run) {
      return absl::FailedPreconditionError(
          "a stream came to the end of the context before the long prompt was read; start the "
          "server with a larger --max-model-len");
    }
    KVASIR_RETURN_IF_ERROR(read.status);
    measured_.before = streams.Gaps(begin, arrival);
    measured_.during = streams.Gaps(read.start, read.token_times.front());
    measured_.read_among_streams = Between(read.start, read.token_times.front());
    return absl::OkStatus();
  }

  void Tell(const char* what) const {
    if (!config_.quiet()) std::fprintf(stderr, "measuring %s\n", what);
  }

  const v1::BenchCommandConfig& config_;
  v1::Generation::Stub& stub_;
  const v1::GenerateRequest& form_;
  const absl::Duration timeout_;
  int64_t context_ = 0;
  uint64_t prompts_ = 0;  // number made so far; each has its own seed
  Interference measured_;
};

double Milliseconds(absl::Duration duration) { return absl::ToDoubleMilliseconds(duration); }

}  // namespace

absl::Duration Interference::bound() const {
  return Percentile(before, 0.99) + 1.5 * Percentile(chunks, 0.5);
}

bool Interference::held() const { return Percentile(during, 0.99) <= bound(); }

absl::StatusOr<Interference> MeasureInterference(const v1::BenchCommandConfig& config,
                                                 v1::Generation::Stub& stub,
                                                 const v1::GenerateRequest& form) {
  return Scenario(config, stub, form).Run();
}

std::string InterferenceTable(const Interference& measured) {
  const auto line = [](const std::string& name, const std::vector<absl::Duration>& values) {
    return absl::StrFormat(
        "%-50s %8.1f %8.1f %8.1f %8d\n", name, Milliseconds(Percentile(values, 0.5)),
        Milliseconds(Percentile(values, 0.99)), Milliseconds(Percentile(values, 1)), values.size());
  };
  const std::string prompt = WithCommas(static_cast<uint64_t>(measured.long_prompt_tokens));
  std::string text =
      absl::StrFormat("%-50s %8s %8s %8s %8s\n", "milliseconds", "p50", "p99", "max", "samples");
  absl::StrAppend(
      &text,
      line(absl::StrFormat("inter-token latency, %d streams alone", measured.streams),
           measured.before),
      line(absl::StrCat("the same while ", prompt, " tokens arrive"), measured.during),
      line(absl::StrCat("a chunk of ", prompt, " tokens that are read alone"), measured.chunks));
  absl::StrAppendFormat(&text, "the prompt took %.2f s alone and %.2f s among the streams\n",
                        absl::ToDoubleSeconds(measured.read_alone),
                        absl::ToDoubleSeconds(measured.read_among_streams));
  absl::StrAppendFormat(&text, "p99 %.1f ms, bound %.1f + 1.5 x %.1f = %.1f ms: %s\n",
                        Milliseconds(Percentile(measured.during, 0.99)),
                        Milliseconds(Percentile(measured.before, 0.99)),
                        Milliseconds(Percentile(measured.chunks, 0.5)),
                        Milliseconds(measured.bound()), measured.held() ? "held" : "MISSED");
  return text;
}

std::string InterferenceJson(const Interference& measured) {
  const auto percentiles = [](const std::vector<absl::Duration>& values) {
    return nlohmann::ordered_json{{"p50", Milliseconds(Percentile(values, 0.5))},
                                  {"p99", Milliseconds(Percentile(values, 0.99))},
                                  {"max", Milliseconds(Percentile(values, 1))},
                                  {"samples", values.size()}};
  };
  const nlohmann::ordered_json object = {
      {"streams", measured.streams},
      {"long_prompt_tokens", measured.long_prompt_tokens},
      {"inter_token_latency_alone_ms", percentiles(measured.before)},
      {"inter_token_latency_while_reading_ms", percentiles(measured.during)},
      {"chunk_ms", percentiles(measured.chunks)},
      {"read_alone_s", absl::ToDoubleSeconds(measured.read_alone)},
      {"read_among_streams_s", absl::ToDoubleSeconds(measured.read_among_streams)},
      {"bound_ms", Milliseconds(measured.bound())},
      {"held", measured.held()}};
  return absl::StrCat(object.dump(), "\n");
}

}  // namespace kvasir::coordinator
