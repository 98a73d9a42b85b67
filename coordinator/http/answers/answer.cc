#include "coordinator/http/answers/answer.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "coordinator/http/transport/error_reply.h"
#include "coordinator/http/transport/json_reply.h"

namespace kvasir::coordinator {
namespace {

using kernels::MutexLock;
using nlohmann::json;

constexpr char kEvents[] = "text/event-stream; charset=utf-8";
constexpr char kDone[] = "data: [DONE]\n\n";
// Text that is made at a time: what is written while the rest waits as it came.
constexpr size_t kPieceBytes = size_t{64} << 10;

void AddEventText(absl::string_view data, std::string& text) {
  absl::StrAppend(&text, "data: ", data, "\n\n");
}

}  // namespace

// The sink of one sequence. It keeps the answer until the sequence has ended.
class Answer::ChoiceSink final : public ClientSink {
 public:
  ChoiceSink(std::shared_ptr<Answer> answer, size_t choice)
      : answer_(std::move(answer)), choice_(choice) {}

  void Write(v1::GenerateResponse response) override {
    answer_->OnResponse(choice_, std::move(response));
  }
  void Close(const absl::Status& status) override {
    std::exchange(answer_, nullptr)->OnClose(status);
  }
  void Leave(const absl::Status& why) { Cancel(why); }

 private:
  std::shared_ptr<Answer> answer_;
  const size_t choice_;
};

Answer::Answer(GenerationApi& api, std::shared_ptr<Exchange> exchange, AnswerSetup setup)
    : api_(api), exchange_(std::move(exchange)), setup_(std::move(setup)) {
  choices_.resize(setup_.prompts.size() * static_cast<size_t>(setup_.options.n));
  open_ = choices_.size();
  if (setup_.ids.told_tokens > 0) choices_.front().opened = true;
}

void Answer::Start(GenerationApi& api, std::shared_ptr<Exchange> exchange, AnswerSetup setup) {
  const std::shared_ptr<Answer> answer(new Answer(api, std::move(exchange), std::move(setup)));
  answer->exchange_->set_on_gone([weak = std::weak_ptr<Answer>(answer)](const absl::Status& why) {
    if (const std::shared_ptr<Answer> gone = weak.lock()) gone->Fail(why);
  });
  answer->Submit(Which::kFirst);
}

// --- the sequences ------------------------------------------------------------------------------

v1::GenerateRequest Answer::RequestOf(size_t choice) {
  const auto n = static_cast<size_t>(setup_.options.n);
  v1::GenerateRequest& prompt = setup_.prompts[choice / n];
  // The last one takes the prompt, which may be long.
  v1::GenerateRequest request = choice % n == n - 1 ? std::move(prompt) : prompt;
  const bool single = setup_.prompts.size() * n == 1;
  request.set_request_id(single ? setup_.request_id : absl::StrCat(setup_.request_id, "-", choice));
  // Answers to one prompt differ, and are the same ones when they are asked for again.
  if (request.sampling().has_seed()) {
    request.mutable_sampling()->set_seed(request.sampling().seed() + choice % n);
  }
  return request;
}

void Answer::Submit(Which which) {
  const auto n = static_cast<size_t>(setup_.options.n);
  std::vector<std::shared_ptr<ChoiceSink>> sinks(setup_.prompts.size() * n);
  {
    MutexLock lock(mu_);
    if (!failed_.ok()) return;
    for (size_t choice = 0; choice < choices_.size(); ++choice) {
      if ((choice % n == 0) != (which == Which::kFirst)) continue;
      sinks[choice] = std::make_shared<ChoiceSink>(shared_from_this(), choice);
      choices_[choice].sink = sinks[choice];
    }
  }
  for (size_t choice = 0; choice < sinks.size(); ++choice) {
    if (sinks[choice] == nullptr) continue;
    const v1::GenerateRequest request = RequestOf(choice);
    const HttpRequest& http = exchange_->request();
    const RequestOrigin origin = OriginOf(
        request,
        {.caller = exchange_->caller(),
         .authorization = http.authorization,
         .traceparent = http.traceparent},
        [this] { return api_.NewRequestId(); }, http.arrived);
    api_.Generate(request, origin, sinks[choice]);
  }
}

void Answer::SubmitOthersLater() {
  exchange_->Run([self = shared_from_this()] {
    size_t bytes = 0;
    for (const v1::GenerateRequest& prompt : self->setup_.prompts) bytes += prompt.ByteSizeLong();
    const absl::Status taken =
        self->api_.RunText(bytes * static_cast<size_t>(self->setup_.options.n - 1),
                           [self] { self->Submit(Which::kOthers); });
    if (!taken.ok()) self->Fail(taken);
  });
}

void Answer::OnResponse(size_t choice, v1::GenerateResponse response) {
  bool begins = false;
  bool others = false;
  Room room = Room::kEnough;
  {
    MutexLock lock(mu_);
    if (!failed_.ok()) return;
    if (response.has_tokens()) others = CountFirstToken(choice);
    room = Keep(choice, std::move(response));
    if (setup_.options.stream) begins = std::exchange(state_, State::kStreaming) == State::kQuiet;
  }
  if (room == Room::kFull) {
    return FailOverflow(
        setup_.options.stream
            ? absl::ResourceExhaustedError(
                  "the client does not read: 768 KiB of the answer wait for it")
            : absl::InvalidArgumentError(
                  "the answer has more than 64 MiB; ask for a stream, or for fewer tokens"));
  }
  if (begins) exchange_->Stream(shared_from_this(), kEvents);
  if (setup_.options.stream && !begins) exchange_->Wake();
  if (others) SubmitOthersLater();
}

bool Answer::CountFirstToken(size_t choice) {
  if (std::exchange(choices_[choice].began, true)) return false;
  const auto n = static_cast<size_t>(setup_.options.n);
  if (n == 1 || choice % n != 0) return false;
  return ++first_tokens_ == setup_.prompts.size();
}

Answer::Room Answer::Keep(size_t choice, v1::GenerateResponse response) {
  Choice& kept = choices_[choice];
  const auto n = static_cast<size_t>(setup_.options.n);
  const bool admitted = response.has_progress() && !response.progress().waits_for_worker();
  if (admitted && choice % n == 0 && !std::exchange(kept.read, true)) {
    usage_.AddPrompt(response.progress());
  }
  const size_t bytes = sizeof(Waiting) + response.SpaceUsedLong();
  if (setup_.options.stream) {
    const bool replaces = response.has_progress() && !waiting_.empty() &&
                          waiting_.back().choice == choice &&
                          waiting_.back().response.has_progress();
    if (replaces) {
      waiting_.back().response = std::move(response);
      return Room::kEnough;
    }
    bytes_ += bytes;
    waiting_.push_back({.choice = choice, .response = std::move(response), .bytes = bytes});
    return bytes_ > kMaxWaitingBytes ? Room::kFull : Room::kEnough;
  }
  if (response.has_finish()) kept.finish = std::move(*response.mutable_finish());
  if (!response.has_tokens() && !response.has_prompt_logprobs()) return Room::kEnough;
  bytes_ += bytes;
  kept.prompt.MergeFrom(response.prompt_logprobs());
  kept.tokens.MergeFrom(response.tokens());
  // MergeFrom replaces text.
  kept.text += response.tokens().text();
  return bytes_ > kMaxWholeBytes ? Room::kFull : Room::kEnough;
}

void Answer::OnClose(const absl::Status& status) {
  if (!status.ok()) return Fail(status);
  {
    MutexLock lock(mu_);
    if (--open_ > 0 || !failed_.ok()) return;
  }
  if (setup_.options.stream) return exchange_->Wake();
  exchange_->Run([self = shared_from_this()] { ReplyJson(*self->exchange_, self->Whole()); });
}

void Answer::Fail(const absl::Status& why) {
  std::vector<std::shared_ptr<ChoiceSink>> sinks;
  bool streaming = false;
  absl::Status told;
  {
    MutexLock lock(mu_);
    if (!failed_.ok()) return;
    failed_ = told = InHttpWords(why, setup_.prompt_field);
    streaming = state_ != State::kQuiet;
    for (const Choice& choice : choices_) sinks.push_back(choice.sink.lock());
  }
  for (const std::shared_ptr<ChoiceSink>& sink : sinks) {
    if (sink != nullptr) sink->Leave(why);
  }
  if (streaming) return exchange_->Wake();
  exchange_->Reply(ErrorReply(told));
}

void Answer::FailOverflow(const absl::Status& why) {
  Fail(why);
  if (!setup_.options.stream) return;
  exchange_->Drop(why);
  MutexLock lock(mu_);
  waiting_.clear();
}

json Answer::Whole() {
  MutexLock lock(mu_);
  json answer = setup_.format->WholeHead();
  json choices = json::array();
  for (size_t i = 0; i < choices_.size(); ++i) {
    Choice& choice = choices_[i];
    choice.tokens.set_text(std::move(choice.text));
    usage_.AddTokens(choice.tokens.token_ids_size());
    usage_.AddFinish(*choice.finish);
    choices.push_back(setup_.format->WholeChoice(
        {.choice = i,
         .tokens = choice.tokens,
         .finish = &*choice.finish,
         .prompt = choice.prompt.token_ids().empty() ? nullptr : &choice.prompt}));
  }
  answer["choices"] = std::move(choices);
  answer["usage"] = usage_.Json(UsageSum::State::kFinished);
  return answer;
}

// --- events of a stream -------------------------------------------------------------------------

StreamSource::Piece Answer::Take() {
  MutexLock lock(mu_);
  Piece piece;
  while (!waiting_.empty() && piece.text.size() < kPieceBytes) {
    Tell(waiting_.front(), piece.text);
    bytes_ -= waiting_.front().bytes;
    waiting_.pop_front();
  }
  if (!waiting_.empty()) return piece;
  if (!failed_.ok()) {
    AddEventText(ErrorJson(failed_), piece.text);
  } else if (open_ > 0) {
    return piece;
  } else if (setup_.options.include_usage) {
    json chunk = setup_.format->ChunkHead();
    chunk["choices"] = json::array();
    chunk["usage"] = usage_.Json(UsageSum::State::kFinished);
    AddEventText(ToText(chunk), piece.text);
  }
  piece.text += kDone;
  piece.last = true;
  return piece;
}

void Answer::Tell(Waiting& waiting, std::string& text) {
  Choice& choice = choices_[waiting.choice];
  if (waiting.response.has_progress()) {
    const v1::Progress& progress = waiting.response.progress();
    if (progress.waits_for_worker()) {
      text += ": waiting for a worker\n\n";
    } else if (progress.processed_tokens() < progress.prompt_tokens()) {
      absl::StrAppend(&text, ": reading prompt ", progress.processed_tokens(), "/",
                      progress.prompt_tokens(), "\n\n");
    }
  } else if (waiting.response.has_prompt_logprobs()) {
    std::optional<json> choice_json =
        setup_.format->ChunkPrompt(waiting.choice, waiting.response.prompt_logprobs());
    if (choice_json.has_value() && setup_.ids.told_tokens == 0) {
      AddEvent(*std::move(choice_json), std::nullopt, text);
    }
  } else if (waiting.response.has_finish()) {
    usage_.AddFinish(waiting.response.finish());
    TellTokens(waiting.choice, choice.tokens, &waiting.response.finish(), text);
  } else if (waiting.response.tokens().last()) {
    choice.tokens = std::move(*waiting.response.mutable_tokens());  // told with its reason
  } else {
    TellTokens(waiting.choice, waiting.response.tokens(), nullptr, text);
  }
}

void Answer::TellTokens(size_t choice, const v1::Tokens& tokens, const v1::Finish* finish,
                        std::string& text) {
  if (!std::exchange(choices_[choice].opened, true)) {
    if (std::optional<json> opening = setup_.format->Opening(choice)) {
      AddEvent(*std::move(opening), std::nullopt, text);
    }
  }
  usage_.AddTokens(tokens.token_ids_size());
  json chunk = setup_.format->ChunkChoice({.choice = choice, .tokens = tokens, .finish = finish});
  if (tokens.token_ids().empty()) return AddEvent(std::move(chunk), std::nullopt, text);
  const int64_t last = int64_t{tokens.index()} + tokens.token_ids_size() - 1;
  if (last >= setup_.ids.told_tokens) return AddEvent(std::move(chunk), last, text);
  if (finish != nullptr && last + 1 < setup_.ids.told_tokens) {
    failed_ = absl::InvalidArgumentError(absl::StrCat("the header Last-Event-ID is ",
                                                      setup_.ids.told_tokens - 1,
                                                      ", the last event of this answer is ", last));
  }
}

void Answer::AddEvent(json choice, std::optional<int64_t> id, std::string& text) {
  json chunk = setup_.format->ChunkHead();
  chunk["choices"] = json::array({std::move(choice)});
  if (setup_.options.continuous_usage) {
    chunk["usage"] = usage_.Json(UsageSum::State::kRunning);
  } else if (setup_.options.include_usage) {
    chunk["usage"] = nullptr;
  }
  if (setup_.ids.sent && id.has_value()) absl::StrAppend(&text, "id: ", *id, "\n");
  AddEventText(ToText(chunk), text);
}

}  // namespace kvasir::coordinator
