#include "coordinator/request/request.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "coordinator/request/request_log.h"
#include "coordinator/tokenizer/unicode/utf8.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

// The last told token is computed again.
std::vector<int32_t> AnswerOf(const std::vector<int32_t>& told) {
  return {told.begin(), told.empty() ? told.end() : told.end() - 1};
}

// An answer continues the text of its prompt, if that has any.
TextPosition AnswerPosition(const Tokenizer& tokenizer, const std::vector<int32_t>& prompt,
                            SpecialTokens special_tokens) {
  const bool has_text = std::any_of(prompt.begin(), prompt.end(), [&](int32_t id) {
    return tokenizer.HasToken(id) &&
           (special_tokens == SpecialTokens::kKeep || !tokenizer.IsSpecial(id));
  });
  return has_text ? TextPosition::kInside : TextPosition::kBegin;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Request>> Request::Create(ParsedRequest parsed,
                                                         RequestContext context) {
  KVASIR_ASSIGN_OR_RETURN(StopStrings stops, StopStrings::Create(parsed.stop_strings));
  std::unique_ptr<Request> request(
      new Request(std::move(parsed), std::move(stops), std::move(context)));
  if (absl::Status replayed = request->Replay(); !replayed.ok()) {
    request->sink_ = nullptr;  // the caller answers
    return replayed;
  }
  return request;
}

Request::Request(ParsedRequest parsed, StopStrings stops, RequestContext context)
    : tokenizer_(context.tokenizer),
      min_tokens_(parsed.sampling.min_tokens()),
      wants_token_texts_(parsed.wants_token_texts),
      stop_strings_(std::move(parsed.stop_strings)),
      stops_(std::move(stops)),
      sequence_(context.sequence),
      accepted_{.origin = std::move(context.origin),
                .policy = std::move(context.policy),
                .prompt_tokens = static_cast<int64_t>(parsed.prompt.size()),
                .is_conversation = parsed.is_conversation,
                .max_tokens = parsed.max_tokens,
                .temperature = parsed.sampling.temperature(),
                .top_p = parsed.sampling.top_p(),
                .top_k = parsed.sampling.top_k()},
      metrics_(context.metrics),
      tracer_(context.tracer),
      told_(std::move(parsed.told)),
      spec_(SequenceSpec{.id = context.sequence,
                         .prompt = std::move(parsed.prompt),
                         .answer = AnswerOf(told_),
                         .max_tokens = parsed.max_tokens,
                         .sampling = std::move(parsed.sampling),
                         .wants_prompt_logprobs = parsed.wants_prompt_logprobs,
                         .is_read_elsewhere = context.is_read_elsewhere,
                         .policy = std::move(parsed.policy),
                         .tenant = accepted_.origin.tenant,
                         .arrival = accepted_.origin.arrived}),
      decoder_(context.tokenizer, parsed.special_tokens,
               AnswerPosition(context.tokenizer, spec_->prompt, parsed.special_tokens)),
      matcher_(stops_, parsed.stop_text),
      stop_text_(parsed.stop_text),
      id_(std::move(context.id)),
      use_(std::move(context.use)),
      sink_(std::move(context.sink)) {
  progress_.set_request_id(request_id());
  progress_.set_prompt_tokens(static_cast<uint32_t>(accepted_.prompt_tokens));
}

Request::~Request() {
  if (sink_ == nullptr) return;
  Refuse(absl::InternalError("the server lost track of this request"), arrival());
}

absl::Status Request::Replay() {
  for (size_t i = 0; i + 1 < told_.size(); ++i) {
    TextOf({.id = sequence_, .index = static_cast<int64_t>(i), .token = told_[i]});
    if (!matched_stop_.has_value()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("resume.token_ids[", i,
                     "] completes a stop string, which ends the answer; "
                     "drop what follows"));
  }
  return absl::OkStatus();
}

bool Request::IsTold(const TokenEvent& event) {
  const auto index = static_cast<size_t>(event.index);
  if (index >= told_.size()) return false;
  if (event.token != told_[index]) {
    diverged_ = absl::FailedPreconditionError(absl::StrCat(
        "resume.token_ids[", index, "] is ", told_[index], ", this server computes ", event.token,
        ": its weights, the policy or the sampling are not those that began the answer; ask again "
        "without resume"));
  }
  return true;
}

SequenceSpec Request::TakeSpec() { return *std::exchange(spec_, std::nullopt); }

void Request::OnProgress(const ProgressEvent& event, TimePoint now) {
  id_->OnProgress(event, now);
  metrics_.PromptRead(event.processed_tokens - int64_t{progress_.processed_tokens()});
  if (event.cached_tokens > 0) cache_ = Metrics::Cache::kHit;
  progress_.set_processed_tokens(static_cast<uint32_t>(event.processed_tokens));
  progress_.set_cached_tokens(static_cast<uint32_t>(event.cached_tokens));
  progress_.set_sealed_tokens(static_cast<uint32_t>(event.sealed_tokens));
  progress_.clear_waits_for_worker();
  progress_.clear_eta();
  if (event.eta.has_value()) {
    const int64_t nanos = absl::ToInt64Nanoseconds(*event.eta);
    progress_.mutable_eta()->set_seconds(nanos / 1'000'000'000);
    progress_.mutable_eta()->set_nanos(static_cast<int32_t>(nanos % 1'000'000'000));
  }
  WriteProgress();
}

void Request::OnGroupLost() {
  id_->OnGroupLost();
  progress_.set_waits_for_worker(true);
  progress_.clear_eta();
  WriteProgress();
}

void Request::WriteProgress() {
  v1::GenerateResponse response;
  *response.mutable_progress() = progress_;
  sink_->Write(std::move(response));
}

void Request::OnPromptLogprobs(PromptLogprobsEvent event) {
  v1::GenerateResponse response;
  *response.mutable_prompt_logprobs() = std::move(event.logprobs);
  sink_->Write(std::move(response));
}

Request::Verdict Request::OnToken(const TokenEvent& event, TimePoint now) {
  if (use_ != nullptr) use_->AddTokens(1);
  id_->OnToken(event, now);
  if (last_token_at_.has_value()) {
    metrics_.NextToken(accepted_.policy, Between(*last_token_at_, now));
  } else {
    metrics_.FirstToken(accepted_.policy, cache_, Between(arrival(), now));
  }
  last_token_at_ = now;
  v1::GenerateResponse response;
  v1::Tokens& tokens = *response.mutable_tokens();
  tokens.set_index(static_cast<uint32_t>(event.index));
  tokens.add_token_ids(static_cast<uint32_t>(event.token));
  tokens.set_text(TextOf(event));
  const bool stops = matched_stop_.has_value();
  if (IsTold(event)) return stops || !diverged_.ok() ? Verdict::kStop : Verdict::kGoOn;
  if (event.logprobs.has_value()) {
    *tokens.add_logprobs() = *event.logprobs;
    if (wants_token_texts_) AddTexts(event.token, *tokens.mutable_logprobs(0));
  }
  tokens.set_last(event.role != TokenEvent::Role::kInner || stops);
  sink_->Write(std::move(response));
  return stops ? Verdict::kStop : Verdict::kGoOn;
}

void Request::AddTexts(int32_t token, v1::TokenLogprobs& logprobs) const {
  const auto text_of = [this](int32_t id) {
    v1::TokenText text;
    const absl::string_view bytes = tokenizer_.TokenBytes(id);
    if (FindInvalidUtf8(bytes).has_value()) {
      text.set_part(std::string(bytes));
    } else {
      text.set_text(std::string(bytes));
    }
    return text;
  };
  *logprobs.mutable_token() = text_of(token);
  for (v1::TopLogprob& top : *logprobs.mutable_top()) {
    *top.mutable_token() = text_of(static_cast<int32_t>(top.token_id()));
  }
}

// Returns the text of a token, after the text held back before it. The text of a stop token is part
// of the answer only when asked for, like that of a stop string.
std::string Request::TextOf(const TokenEvent& event) {
  using Role = TokenEvent::Role;
  const bool shown = event.role != Role::kStop || stop_text_ == StopMatcher::StopText::kInclude;
  std::string decoded = shown ? decoder_.Push(event.token) : std::string();
  if (event.role != Role::kInner) decoded += decoder_.Flush();
  // A stop string counts when it begins after the first min_tokens tokens.
  if (event.index < min_tokens_) return decoded;
  StopMatcher::Output output = matcher_.Push(decoded);
  matched_stop_ = output.stopped_by;
  if (!matched_stop_.has_value() && event.role != Role::kInner) output.text += matcher_.Flush();
  return std::move(output.text);
}

void Request::Finish(const absl::Status& outcome, v1::Finish summary, TimePoint now) {
  KVASIR_CHECK(sink_ != nullptr);
  const absl::Status status = outcome.ok() ? diverged_ : outcome;
  metrics_.RequestFinished(status, summary, Between(arrival(), now));
  if (matched_stop_.has_value()) {
    summary.set_reason(v1::FINISH_REASON_STOP);
    summary.set_matched_stop_str(stop_strings_[static_cast<size_t>(*matched_stop_)]);
  }
  LogRequestEnd(accepted_, status, summary, Between(arrival(), now));
  if (tracer_ != nullptr) tracer_->OnEnd(accepted_, status, summary, Between(arrival(), now));
  if (status.ok()) {
    v1::GenerateResponse response;
    summary.set_request_id(request_id());
    *response.mutable_finish() = std::move(summary);
    sink_->Write(std::move(response));
  }
  Close(status);
}

void Request::Refuse(const absl::Status& status, TimePoint now) {
  KVASIR_CHECK(sink_ != nullptr);
  metrics_.RequestRejected(status);
  LogRefusal(accepted_.origin, status);
  if (tracer_ != nullptr) tracer_->OnRefusal(accepted_.origin, status, Between(arrival(), now));
  Close(status);
}

void Request::Close(const absl::Status& status) {
  id_.reset();
  use_.reset();
  std::exchange(sink_, nullptr)->Close(status);
}

}  // namespace kvasir::coordinator
