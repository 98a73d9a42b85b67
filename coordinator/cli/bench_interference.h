// Measures how much an arriving long prompt disturbs streams that are decoding: the scenario of
// `kvasir bench --long-prompt-tokens`. Three measurements, on a server without other load:
//
//   chunk     time between progress messages (one a step) while the long prompt is read alone
//   before    inter-token latencies while all streams decode and nothing arrives
//   during    the same from the arrival of another prompt of that length to its first token
//
// The bound: p99 during <= p99 before + 1.5 x the median chunk. Thread-safe.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "proto/kvasir/v1/config.pb.h"
#include "proto/kvasir/v1/generation.grpc.pb.h"

namespace kvasir::coordinator {

struct Interference {
  int64_t streams = 0;
  int64_t long_prompt_tokens = 0;
  std::vector<absl::Duration> chunks = {};
  absl::Duration read_alone = {};  // time to the long prompt's first token
  std::vector<absl::Duration> before = {};
  std::vector<absl::Duration> during = {};
  absl::Duration read_among_streams = {};

  absl::Duration bound() const;
  bool held() const;
};

// Copies `form`, a request without a prompt. INVALID_ARGUMENT when the context is too short for
// the prompts, FAILED_PRECONDITION when a stream ended before the long prompt was read.
absl::StatusOr<Interference> MeasureInterference(const v1::BenchCommandConfig& config,
                                                 v1::Generation::Stub& stub,
                                                 const v1::GenerateRequest& form);

std::string InterferenceTable(const Interference& measured);
// Returns the same as one line of JSON.
std::string InterferenceJson(const Interference& measured);

}  // namespace kvasir::coordinator
