// How much a long prompt that arrives disturbs streams that are decoding: the scenario of
// `kvasir bench --long-prompt-tokens`. Three things are measured on a server without other load:
//
//   chunk     the long prompt is read alone: the time between its progress messages, each a step
//   before    all streams decode and nothing arrives: their inter-token latencies
//   during    another prompt of that length arrives: the same, until it has its first token
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

// `form` is a request without a prompt. INVALID_ARGUMENT when the context is too short for the
// prompts, FAILED_PRECONDITION when a stream ended before the long prompt was read.
absl::StatusOr<Interference> MeasureInterference(const v1::BenchCommandConfig& config,
                                                 v1::Generation::Stub& stub,
                                                 const v1::GenerateRequest& form);

std::string InterferenceTable(const Interference& measured);

}  // namespace kvasir::coordinator
