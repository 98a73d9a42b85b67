// One running request, from its submission to its only end: turns the scheduler's events into the
// messages of its stream. Hidden: detokenizing, stop strings, holding text back, latencies. Made by
// the service, then owned and called by the engine loop. Belongs to one thread at a time.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "coordinator/metrics/metrics.h"
#include "coordinator/request/accepted_request.h"
#include "coordinator/request/parse_request.h"
#include "coordinator/request/request_origin.h"
#include "coordinator/request/request_trace.h"
#include "coordinator/request/response_sink.h"
#include "coordinator/request/running_requests.h"
#include "coordinator/scheduling/scheduler.h"
#include "coordinator/time/clock.h"
#include "coordinator/tokenizer/incremental_decoder.h"
#include "coordinator/tokenizer/stop_matcher.h"

namespace kvasir::coordinator {

struct RequestContext {
  const Tokenizer& tokenizer;
  Metrics& metrics;
  std::unique_ptr<RunningRequests::Lease> id;
  std::unique_ptr<Caller::Use> use = nullptr;  // null on a server without API keys
  std::shared_ptr<ResponseSink> sink;
  SequenceId sequence;
  RequestOrigin origin;
  std::string policy;                     // name
  bool is_read_elsewhere = false;         // as in SequenceSpec
  const RequestTracer* tracer = nullptr;  // null: requests are not traced
};

class Request {
 public:
  // Makes a request. INVALID_ARGUMENT for stop strings that cannot be matched.
  static absl::StatusOr<std::unique_ptr<Request>> Create(ParsedRequest parsed,
                                                         RequestContext context);
  // Answers with INTERNAL when Finish was never called.
  ~Request();

  SequenceId sequence() const { return sequence_; }
  TimePoint arrival() const { return accepted_.origin.arrived; }
  // Tokens that it brings: the prompt, and what an answer that it resumes had. REQUIRES: before
  // TakeSpec.
  int64_t given_tokens() const { return std::ssize(spec_->prompt) + std::ssize(spec_->answer); }
  // Moves out the spec for the scheduler. Called once.
  SequenceSpec TakeSpec();

  void OnProgress(const ProgressEvent& event, TimePoint now);
  void OnPromptLogprobs(PromptLogprobsEvent event);
  void OnSelections(v1::SelectionMap map, TimePoint now) { id_->OnSelections(std::move(map), now); }
  // The worker group is lost: the request waits for the next one, and then goes on.
  void OnGroupLost();
  enum class Verdict { kGoOn, kStop };
  // Returns kStop when the answer ends in a stop string.
  Verdict OnToken(const TokenEvent& event, TimePoint now);

  // Ends the request: the only exit, called once. `summary` is used when the outcome is OK.
  void Finish(const absl::Status& outcome, v1::Finish summary, TimePoint now);
  // Finishes a request that was refused before it ran.
  void Refuse(const absl::Status& status, TimePoint now);

 private:
  Request(ParsedRequest parsed, StopStrings stops, RequestContext context);

  const std::string& request_id() const { return accepted_.origin.request_id; }
  // Brings the text to where the client has it. INVALID_ARGUMENT when the answer ended before.
  absl::Status Replay();
  // Whether the client has the token. The last of those that it has must be the same one.
  bool IsTold(const TokenEvent& event);
  void WriteProgress();
  std::string TextOf(const TokenEvent& event);
  // Writes what the tokens add to a text beside their log probabilities.
  void AddTexts(int32_t token, v1::TokenLogprobs& logprobs) const;
  void Close(const absl::Status& status);

  const Tokenizer& tokenizer_;
  const int64_t min_tokens_;
  const bool wants_token_texts_;
  const std::vector<std::string> stop_strings_;
  const StopStrings stops_;
  const SequenceId sequence_;
  const AcceptedRequest accepted_;
  Metrics& metrics_;
  const RequestTracer* const tracer_;

  const std::vector<int32_t> told_;  // tokens that the client has
  absl::Status diverged_;            // the answer to resume would go on otherwise
  std::optional<SequenceSpec> spec_;
  IncrementalDecoder decoder_;
  StopMatcher matcher_;
  const StopMatcher::StopText stop_text_;
  std::optional<int64_t> matched_stop_;
  std::optional<TimePoint> last_token_at_;
  v1::Progress progress_;  // as it was last reported
  Metrics::Cache cache_ = Metrics::Cache::kMiss;
  // Given back before the client learns of the end, so that it may use the id again at once.
  std::unique_ptr<RunningRequests::Lease> id_;
  std::unique_ptr<Caller::Use> use_;
  std::shared_ptr<ResponseSink> sink_;  // null when finished
};

}  // namespace kvasir::coordinator
