// The answer to one HTTP request, of one or several sequences (choices): starts them, collects what
// they say, and tells it as a stream of server-sent events or as a whole. When the client goes,
// does not read, or a sequence fails, all of them end. Hidden: order of events, bounds.
// Thread-safe.
//
// A stream has one event a token, so that clients which count events count tokens; the last event
// of a choice has its last token and the reason of its end. Events may have ids, and begin after
// one that the client has (requests/event_ids.h). While a prompt is read, comments tell how far. Of
// a stream at most kMaxWaitingBytes wait for a slow client; a whole answer may have kMaxWholeBytes.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"

#include "coordinator/http/answers/answer_format.h"
#include "coordinator/http/answers/usage.h"
#include "coordinator/http/requests/event_ids.h"
#include "coordinator/http/requests/generate_fields.h"
#include "coordinator/http/transport/exchange.h"
#include "coordinator/request/generation_api.h"
#include "kernels/base/mutex.h"

namespace kvasir::coordinator {

struct AnswerSetup {
  std::vector<v1::GenerateRequest> prompts;  // without ids
  AnswerOptions options;
  EventIds ids = {};
  std::string request_id;
  std::unique_ptr<AnswerFormat> format = nullptr;
  std::string prompt_field = {};  // name of the prompt in errors
};

class Answer final : public StreamSource, public std::enable_shared_from_this<Answer> {
 public:
  // With what the allocator and a piece in flight take, a client that does not read costs 1 MiB.
  static constexpr size_t kMaxWaitingBytes = size_t{768} << 10;
  static constexpr size_t kMaxWholeBytes = size_t{64} << 20;

  // Starts the sequences and answers `exchange` in the end. Called within api.RunText.
  static void Start(GenerationApi& api, std::shared_ptr<Exchange> exchange, AnswerSetup setup);

  Piece Take() override EXCLUDES(mu_);

 private:
  class ChoiceSink;
  struct Choice {
    std::weak_ptr<ChoiceSink> sink;  // kept by its request
    v1::Tokens tokens = {};          // of a whole answer: all; of a stream: the last ones
    std::string text = {};           // of a whole answer
    v1::PromptLogprobs prompt = {};  // of a whole answer
    std::optional<v1::Finish> finish = {};
    bool read = false;    // its prompt is counted
    bool began = false;   // it has a token
    bool opened = false;  // its first event was sent
  };
  struct Waiting {
    size_t choice;
    v1::GenerateResponse response;
    size_t bytes;
  };
  enum class State { kQuiet, kStreaming };

  Answer(GenerationApi& api, std::shared_ptr<Exchange> exchange, AnswerSetup setup);

  // Submits the first answer to each prompt, or the others, which find the prompt in the cache.
  enum class Which { kFirst, kOthers };
  void Submit(Which which) EXCLUDES(mu_);
  v1::GenerateRequest RequestOf(size_t choice);
  // Submits the others away from the engine's thread.
  void SubmitOthersLater() EXCLUDES(mu_);

  // Called by the sinks.
  void OnResponse(size_t choice, v1::GenerateResponse response) EXCLUDES(mu_);
  void OnClose(const absl::Status& status) EXCLUDES(mu_);
  // Ends all sequences and tells the client, if it is still there.
  void Fail(const absl::Status& why) EXCLUDES(mu_);
  void FailOverflow(const absl::Status& why) EXCLUDES(mu_);
  enum class Room { kEnough, kFull };
  Room Keep(size_t choice, v1::GenerateResponse response) REQUIRES(mu_);
  // Returns true when the others can be submitted: each prompt's first answer has a token.
  bool CountFirstToken(size_t choice) REQUIRES(mu_);
  nlohmann::json Whole() EXCLUDES(mu_);

  // Events of a stream.
  void Tell(Waiting& waiting, std::string& text) REQUIRES(mu_);
  void TellTokens(size_t choice, const v1::Tokens& tokens, const v1::Finish* finish,
                  std::string& text) REQUIRES(mu_);
  // The id is the index of a token; none: the event has none.
  void AddEvent(nlohmann::json choice, std::optional<int64_t> id, std::string& text) REQUIRES(mu_);

  GenerationApi& api_;
  const std::shared_ptr<Exchange> exchange_;
  AnswerSetup setup_;  // constant, except that the prompts are moved out as they are submitted

  kernels::Mutex mu_;
  std::vector<Choice> choices_ GUARDED_BY(mu_);  // those of the first prompt first
  std::deque<Waiting> waiting_ GUARDED_BY(mu_);
  size_t bytes_ GUARDED_BY(mu_) = 0;  // waiting, or collected
  UsageSum usage_ GUARDED_BY(mu_);
  size_t open_ GUARDED_BY(mu_) = 0;          // choices that have not ended
  size_t first_tokens_ GUARDED_BY(mu_) = 0;  // first answers that have a token
  State state_ GUARDED_BY(mu_) = State::kQuiet;
  absl::Status failed_ GUARDED_BY(mu_);
};

}  // namespace kvasir::coordinator
