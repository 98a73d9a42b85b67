// Events of a scheduler's sequences. For each sequence: progress and logprobs of the prompt, then
// tokens, then one FinishEvent; before the last one selections at any time.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>

#include "absl/status/status.h"
#include "absl/time/time.h"

#include "kernels/base/strong_id.h"
#include "proto/kvasir/v1/generation.pb.h"
#include "proto/kvasir/v1/worker.pb.h"

namespace kvasir::coordinator {

using kernels::SequenceId;

// Sums of a sequence's attention so far, over prompt and answer, in the units of AttentionReport.
struct AttentionSoFar {
  uint64_t blocks_total = 0;
  uint64_t blocks_skipped = 0;
  uint64_t measured_samples = 0;
  double measured_mass = 0;  // sum over these samples
  uint64_t estimated_samples = 0;
  double estimated_mass = 0;
};

struct ProgressEvent {
  SequenceId id;
  int64_t prompt_tokens = 0;
  int64_t processed_tokens = 0;
  int64_t cached_tokens = 0;
  int64_t sealed_tokens = 0;               // in blocks that sent plans seal
  std::optional<absl::Duration> eta = {};  // to the first token
  AttentionSoFar attention = {};
};
// Log probabilities of the prompt's next tokens, when the request asked for them.
struct PromptLogprobsEvent {
  SequenceId id;
  v1::PromptLogprobs logprobs;
};
// Pages that an observed row selected; without counts where the ranks cannot tell.
struct SelectionEvent {
  SequenceId id;
  v1::SelectionMap map;
};
struct TokenEvent {
  enum class Role { kInner, kLast, kStop };  // kStop: the last one, and a stop token

  SequenceId id;
  int64_t index = 0;  // among the generated tokens
  int32_t token = 0;
  Role role = Role::kInner;
  std::optional<v1::TokenLogprobs> logprobs = {};  // set when the request asked for them
  AttentionSoFar attention = {};
};
// The last event of a sequence.
struct FinishEvent {
  SequenceId id;
  absl::Status status;
  v1::Finish summary;  // without request_id; without a reason when the status is not OK
};
using Event =
    std::variant<ProgressEvent, PromptLogprobsEvent, SelectionEvent, TokenEvent, FinishEvent>;

}  // namespace kvasir::coordinator
