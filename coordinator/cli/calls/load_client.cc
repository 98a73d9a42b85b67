#include "coordinator/cli/calls/load_client.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <random>
#include <thread>

#include "grpcpp/client_context.h"

#include "coordinator/cli/calls/connect.h"
#include "kernels/base/mutex.h"
#include "proto/grpc_status.h"

namespace kvasir::coordinator {
namespace {

// Returns when each request is due: at once, or after exponential pauses of mean 1 / rate.
std::vector<absl::Duration> Arrivals(size_t count, const LoadOptions& options) {
  std::vector<absl::Duration> due(count);
  if (options.rate <= 0) return due;
  std::mt19937_64 random(options.seed);
  std::exponential_distribution<double> pause(options.rate);
  absl::Duration at;
  for (absl::Duration& when : due) {
    at += absl::Seconds(pause(random));
    when = at;
  }
  return due;
}

}  // namespace

std::vector<absl::Duration> TimedStream::Gaps() const {
  std::vector<absl::Duration> gaps;
  for (size_t i = 1; i < token_times.size(); ++i) {
    gaps.push_back(Between(token_times[i - 1], token_times[i]));
  }
  return gaps;
}

TimedStream ReadTimed(v1::Generation::Stub& stub, const v1::GenerateRequest& request,
                      TimePoint start, absl::Duration timeout, const OnTokens& on_tokens) {
  const SteadyClock clock;
  TimedStream timed;
  timed.start = start;
  grpc::ClientContext context;
  SetTimeout(timeout, context);
  const auto reader = stub.Generate(&context, request);
  bool finished = false;
  v1::GenerateResponse response;
  while (reader->Read(&response)) {
    const TimePoint now = clock.Now();
    if (response.has_progress()) {
      timed.progress_times.push_back(now);
    } else if (response.has_tokens()) {
      const auto count = static_cast<size_t>(response.tokens().token_ids_size());
      timed.token_times.insert(timed.token_times.end(), count, now);
      if (on_tokens && !on_tokens(timed.token_times.size())) context.TryCancel();
    } else if (response.has_finish()) {
      timed.finish = response.finish();
      finished = true;
    }
  }
  timed.status = proto::FromGrpcStatus(reader->Finish());
  if (timed.status.ok() && !finished) {
    timed.status = absl::InternalError("the server ended the stream without a finish message");
  }
  return timed;
}

std::vector<TimedStream> RunLoad(v1::Generation::Stub& stub,
                                 const std::vector<v1::GenerateRequest>& requests,
                                 const LoadOptions& options,
                                 const std::function<void(const TimedStream&)>& on_done) {
  const std::vector<absl::Duration> due = Arrivals(requests.size(), options);
  const SteadyClock clock;
  const TimePoint begin = clock.Now();
  std::vector<TimedStream> streams(requests.size());
  std::atomic<size_t> next = 0;
  kernels::Mutex mu;  // held in calls of on_done
  const auto run = [&] {
    for (size_t i = next.fetch_add(1); i < requests.size(); i = next.fetch_add(1)) {
      const TimePoint start = options.rate > 0 ? After(begin, due[i]) : clock.Now();
      std::this_thread::sleep_until(start);
      streams[i] = ReadTimed(stub, requests[i], start, options.timeout, nullptr);
      kernels::MutexLock lock(mu);
      on_done(streams[i]);
    }
  };
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < std::min<int64_t>(options.streams, std::ssize(requests)); ++i) {
    threads.emplace_back(run);
  }
  for (std::thread& thread : threads) thread.join();
  return streams;
}

absl::Duration Percentile(std::vector<absl::Duration> values, double q) {
  if (values.empty()) return absl::ZeroDuration();
  std::sort(values.begin(), values.end());
  const auto rank = static_cast<int64_t>(std::ceil(q * static_cast<double>(values.size())));
  return values[static_cast<size_t>(std::clamp<int64_t>(rank - 1, 0, std::ssize(values) - 1))];
}

absl::Duration Mean(const std::vector<absl::Duration>& values) {
  absl::Duration sum;
  for (const absl::Duration value : values) sum += value;
  return values.empty() ? sum : sum / static_cast<double>(values.size());
}

}  // namespace kvasir::coordinator
