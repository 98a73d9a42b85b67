// Requests with a clock beside them: what `kvasir bench` measures with. Times are taken where the
// client reads, so they hold the network and the server's queue. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

#include "coordinator/clock.h"
#include "proto/kvasir/v1/generation.grpc.pb.h"

namespace kvasir::coordinator {

struct TimedStream {
  TimePoint start = {};                        // when it was due to be sent
  std::vector<TimePoint> progress_times = {};  // of messages that told of read prompt tokens
  std::vector<TimePoint> token_times = {};     // of each token
  v1::Finish finish = {};                      // when the status is OK
  absl::Status status = {};

  // Between each token and the next. Tokens of one message came at once.
  std::vector<absl::Duration> Gaps() const;
};

// The number of tokens received so far; false: that is enough, the request is cancelled.
using OnTokens = std::function<bool(size_t num_tokens)>;

// Sends the request and reads its stream to the end. `on_tokens` may be empty.
TimedStream ReadTimed(v1::Generation::Stub& stub, const v1::GenerateRequest& request,
                      TimePoint start, absl::Duration timeout, const OnTokens& on_tokens);

struct LoadOptions {
  int64_t streams = 1;  // requests in flight, at most
  // Requests per second, arriving at random; 0: each stream sends its next when one ends.
  double rate = 0;
  uint64_t seed = 0;  // of the arrivals
  absl::Duration timeout;
};

// Runs all requests and returns their streams, in their order. `on_done` is called with each end,
// by one thread at a time. When all streams are taken a request waits, and its wait counts.
std::vector<TimedStream> RunLoad(v1::Generation::Stub& stub,
                                 const std::vector<v1::GenerateRequest>& requests,
                                 const LoadOptions& options,
                                 const std::function<void(const TimedStream&)>& on_done);

// The smallest value that at least the share q of the values does not exceed; 0 without values.
absl::Duration Percentile(std::vector<absl::Duration> values, double q);
absl::Duration Mean(const std::vector<absl::Duration>& values);

}  // namespace kvasir::coordinator
