// Timed requests, for `kvasir bench`. Times are taken where the client reads, so they include the
// network and the server's queue. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

#include "coordinator/time/clock.h"
#include "proto/kvasir/v1/generation.grpc.pb.h"

namespace kvasir::coordinator {

struct TimedStream {
  TimePoint start = {};                        // when it was due to be sent
  std::vector<TimePoint> progress_times = {};  // of messages that reported read prompt tokens
  std::vector<TimePoint> token_times = {};     // of each token
  v1::Finish finish = {};                      // when the status is OK
  absl::Status status = {};

  // Returns the times between one token and the next; 0 between tokens of one message.
  std::vector<absl::Duration> Gaps() const;
};

// Gets the number of tokens received so far. Returns false to cancel the request.
using OnTokens = std::function<bool(size_t num_tokens)>;

// Sends the request and reads its stream to the end. `on_tokens` may be empty.
TimedStream ReadTimed(v1::Generation::Stub& stub, const v1::GenerateRequest& request,
                      TimePoint start, absl::Duration timeout, const OnTokens& on_tokens);

struct LoadOptions {
  int64_t streams = 1;  // most requests in flight
  // Requests per second, arriving at random. 0: a stream sends its next request when one ends.
  double rate = 0;
  uint64_t seed = 0;  // of the arrivals
  absl::Duration timeout;
};

// Runs all requests and returns their streams in the same order. Calls `on_done` when a request
// ends, by one thread at a time. A request waits while all streams are in use; its wait counts.
std::vector<TimedStream> RunLoad(v1::Generation::Stub& stub,
                                 const std::vector<v1::GenerateRequest>& requests,
                                 const LoadOptions& options,
                                 const std::function<void(const TimedStream&)>& on_done);

// Returns the smallest of the values v such that at least the share q of them are <= v; 0 if empty.
absl::Duration Percentile(std::vector<absl::Duration> values, double q);
absl::Duration Mean(const std::vector<absl::Duration>& values);

}  // namespace kvasir::coordinator
