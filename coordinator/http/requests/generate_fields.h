// Turns the fields that completions and chat share into a GenerateRequest: sampling, stops, policy,
// cache, and how the answer is told. Ranges are left to ParseRequest, as for gRPC; only types are
// checked here. Pure functions: thread-safe.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

#include "coordinator/http/requests/json_fields.h"
#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::coordinator {

// Most answers of one HTTP request: prompts times n.
inline constexpr int64_t kMostChoices = 128;

// How an answer is told.
struct AnswerOptions {
  bool stream = false;
  bool include_usage = false;     // a last chunk of a stream tells the usage
  bool continuous_usage = false;  // so does every chunk
  bool event_ids = false;         // events of a stream have ids
  int64_t n = 1;                  // answers to each prompt
};

// Reads all shared fields except max_tokens and logprobs. Errors are kept in `fields`.
void ReadGenerateFields(JsonFields& fields, v1::GenerateRequest& request);
AnswerOptions ReadAnswerOptions(JsonFields& fields);

// Returns an error of ParseRequest in the words of the HTTP API: "sampling.top_p is 3" is about
// top_p, and names of the prompt become `prompt_field`.
absl::Status InHttpWords(const absl::Status& status, absl::string_view prompt_field);

}  // namespace kvasir::coordinator
