#include "coordinator/http/answers/answer.h"

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "coordinator/http/answers/completion_format.h"
#include "coordinator/http/transport/error_reply.h"
#include "tests/coordinator/collected_response.h"

namespace kvasir::coordinator {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

// Keeps what a handler answers; the client takes a stream when the test says so.
class FakeExchange final : public Exchange {
 public:
  const HttpRequest& request() const override { return request_; }
  void set_caller(std::shared_ptr<const Caller> caller) override { caller_ = std::move(caller); }
  const std::shared_ptr<const Caller>& caller() const override { return caller_; }
  std::string TakeBody() override { return ""; }
  void set_on_gone(std::function<void(const absl::Status&)> on_gone) override {
    gone = std::move(on_gone);
  }
  void Reply(HttpReply reply) override { replies.push_back(std::move(reply)); }
  void Refuse(const absl::Status& why) override { Reply(ErrorReply(why)); }
  void Stream(std::shared_ptr<StreamSource> source, std::string) override {
    stream = std::move(source);
  }
  void Run(std::function<void()> work) override { work(); }
  void Wake() override { ++wakes; }
  void Drop(const absl::Status& why) override { dropped = why; }

  std::function<void(const absl::Status&)> gone;
  std::vector<HttpReply> replies;
  std::shared_ptr<StreamSource> stream;
  int wakes = 0;
  absl::Status dropped;

 private:
  HttpRequest request_;
  std::shared_ptr<const Caller> caller_;
};

// Keeps the sinks of the requests that were started.
class FakeApi final : public GenerationApi {
 public:
  absl::StatusOr<Selections> Observe(const std::string&) override { return Selections{}; }
  absl::StatusOr<std::shared_ptr<const Caller>> Authenticate(absl::string_view) override {
    return std::shared_ptr<const Caller>();
  }
  absl::Status RunText(size_t, std::function<void()> work) override {
    work();
    return absl::OkStatus();
  }
  void Generate(const v1::GenerateRequest& request, const RequestOrigin&,
                const std::shared_ptr<ClientSink>& sink) override {
    requests.push_back(request);
    sinks.push_back(sink);
    sink->set_on_cancel([this](const absl::Status& why) { cancelled.push_back(why); });
  }
  void Refuse(const RequestOrigin&, ClientSink& sink, const absl::Status& why) override {
    sink.Close(why);
  }
  std::string NewRequestId() override { return "req-1"; }
  TimePoint Now() const override { return {}; }
  absl::StatusOr<v1::TokenizeResponse> Tokenize(const v1::TokenizeRequest&) override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<v1::DetokenizeResponse> Detokenize(const v1::DetokenizeRequest&) override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<v1::GetModelInfoResponse> ModelInfo() override {
    return absl::UnavailableError("");
  }
  v1::GetServerInfoResponse ServerInfo(const v1::GetServerInfoRequest&) override { return {}; }
  const Tokenizer& tokenizer() const override { return *model.tokenizer; }

  TestModel model;
  std::vector<v1::GenerateRequest> requests;
  std::vector<std::shared_ptr<ClientSink>> sinks;
  std::vector<absl::Status> cancelled;
};

class AnswerTest : public ::testing::Test {
 protected:
  // As a connection does at its end. The answer keeps its exchange, which keeps the answer's
  // stream.
  ~AnswerTest() override { exchange_->stream = nullptr; }

  void Start(AnswerOptions options, EventIds ids = {}) {
    v1::GenerateRequest request;
    request.set_text("prompt");
    request.mutable_sampling()->set_seed(5);
    AnswerSetup setup = {.prompts = {request}, .options = options, .ids = ids, .request_id = "id"};
    setup.format = std::make_unique<CompletionFormat>(CompletionFormatSetup{
        .tokenizer = api_.tokenizer(), .name = {.id = "cmpl-id", .model = "m"}, .n = 1});
    setup.prompt_field = "prompt";
    Answer::Start(api_, exchange_, std::move(setup));
  }
  void Progress(size_t sink, uint32_t processed) {
    v1::GenerateResponse response;
    response.mutable_progress()->set_prompt_tokens(100);
    response.mutable_progress()->set_processed_tokens(processed);
    api_.sinks[sink]->Write(response);
  }
  enum class Place { kInner, kLast };
  void Token(size_t sink, const std::string& text, Place place = Place::kInner) {
    v1::GenerateResponse response;
    response.mutable_tokens()->set_index(index_[sink]++);
    response.mutable_tokens()->add_token_ids(1);
    response.mutable_tokens()->set_text(text);
    response.mutable_tokens()->set_last(place == Place::kLast);
    api_.sinks[sink]->Write(response);
  }
  void Finish(size_t sink) {
    v1::GenerateResponse response;
    response.mutable_finish()->set_reason(v1::FINISH_REASON_LENGTH);
    api_.sinks[sink]->Write(response);
    api_.sinks[sink]->Close(absl::OkStatus());
  }

  std::map<size_t, uint32_t> index_;
  FakeApi api_;
  std::shared_ptr<FakeExchange> exchange_ = std::make_shared<FakeExchange>();
};

TEST_F(AnswerTest, TheLastTokenWaitsForItsReason) {
  Start({.stream = true});
  Progress(0, 50);
  Token(0, "a");
  Token(0, "b", Place::kLast);
  const StreamSource::Piece before = exchange_->stream->Take();
  EXPECT_THAT(before.text, HasSubstr(": reading prompt 50/100\n\n"));
  EXPECT_THAT(before.text, HasSubstr("\"text\":\"a\""));
  EXPECT_EQ(before.text.find("\"text\":\"b\""), std::string::npos);
  EXPECT_FALSE(before.last);
  Finish(0);
  const StreamSource::Piece end = exchange_->stream->Take();
  EXPECT_THAT(end.text, HasSubstr("\"finish_reason\":\"length\""));
  EXPECT_THAT(end.text, HasSubstr("\"text\":\"b\""));
  EXPECT_TRUE(end.last);
  EXPECT_EQ(end.text.substr(end.text.size() - 14), "data: [DONE]\n\n");
}

v1::GenerateResponse PromptPart(uint32_t index, std::vector<uint32_t> ids) {
  v1::GenerateResponse response;
  v1::PromptLogprobs& part = *response.mutable_prompt_logprobs();
  part.set_index(index);
  if (index == 1) part.set_first_token_id(5);
  part.set_top_count(1);
  for (const uint32_t id : ids) {
    part.add_token_ids(id);
    part.add_logprobs(-1.5f);
    part.add_top_token_ids(7);
    part.add_top_logprobs(-0.5f);
  }
  return response;
}

// What follows "data: " in each event, after the id if it has one.
std::vector<std::string> Events(const std::string& text) {
  std::vector<std::string> events;
  for (const absl::string_view event : absl::StrSplit(text, "\n\n", absl::SkipEmpty())) {
    const size_t data = event.find("data: {");
    if (data == absl::string_view::npos) continue;
    const json choices = json::parse(event.substr(data + 6))["choices"];
    const std::string told = choices.empty() ? "usage" : choices[0]["text"].dump();
    events.push_back(absl::StrCat(event.substr(0, data), told));
  }
  return events;
}

TEST_F(AnswerTest, EventsHaveIdsWhenAskedFor) {
  Start({.stream = true}, {.sent = true});
  api_.sinks[0]->Write(PromptPart(1, {6, 7}));
  Token(0, "a");
  Token(0, "b", Place::kLast);
  Finish(0);
  EXPECT_THAT(Events(exchange_->stream->Take().text),
              ElementsAre("\"\"", "id: 0\n\"a\"", "id: 1\n\"b\""));
}

TEST_F(AnswerTest, AStreamGoesOnAfterTheEventThatTheClientHas) {
  for (const int64_t told : {1, 2, 3}) {
    index_.clear();
    api_.sinks.clear();
    Start({.stream = true, .include_usage = true}, {.sent = true, .told_tokens = told});
    api_.sinks[0]->Write(PromptPart(1, {6, 7}));
    Token(0, "a");
    Token(0, "b");
    Token(0, "c", Place::kLast);
    Finish(0);
    const StreamSource::Piece piece = exchange_->stream->Take();
    const std::vector<std::string> all = {"id: 1\n\"b\"", "id: 2\n\"c\"", "usage"};
    EXPECT_THAT(Events(piece.text), ElementsAreArray(all.begin() + told - 1, all.end()));
    EXPECT_THAT(piece.text, HasSubstr("\"completion_tokens\":3"));
    EXPECT_TRUE(piece.last);
    exchange_->stream = nullptr;
    exchange_ = std::make_shared<FakeExchange>();
  }
}

TEST_F(AnswerTest, AnEventThatTheAnswerDoesNotHaveIsAnError) {
  Start({.stream = true}, {.sent = true, .told_tokens = 3});
  Token(0, "a");
  Token(0, "b", Place::kLast);
  Finish(0);
  const StreamSource::Piece piece = exchange_->stream->Take();
  EXPECT_THAT(piece.text, HasSubstr("Last-Event-ID is 2, the last event of this answer is 1"));
  EXPECT_TRUE(piece.last);
}

TEST(EventIdsTest, OnlyAnAnswerThatIsTheSameEachTimeIsResumed) {
  v1::GenerateRequest prompt;
  HttpRequest http;
  AnswerOptions options = {.stream = true};
  const auto read = [&] { return ReadEventIds(http, options, absl::MakeConstSpan(&prompt, 1)); };
  ASSERT_TRUE(read().ok());
  EXPECT_FALSE(read()->sent);
  options.event_ids = true;
  ASSERT_TRUE(read().ok());
  EXPECT_TRUE(read()->sent);
  EXPECT_EQ(read()->told_tokens, 0);
  options.event_ids = false;
  http.last_event_id = "17";
  EXPECT_THAT(std::string(read().status().message()), HasSubstr("seed is not set"));
  prompt.mutable_sampling()->set_temperature(0);
  ASSERT_TRUE(read().ok());
  EXPECT_TRUE(read()->sent);
  EXPECT_EQ(read()->told_tokens, 18);
  prompt.mutable_sampling()->clear_temperature();
  prompt.mutable_sampling()->set_seed(3);
  EXPECT_TRUE(read().ok());
  for (const char* bad : {"a", "-1", "1.5", "99999999999"}) {
    http.last_event_id = bad;
    EXPECT_EQ(read().status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
  http.last_event_id = "17";
  options.n = 2;
  EXPECT_THAT(std::string(read().status().message()), HasSubstr("leave n at 1"));
  options = {};
  EXPECT_THAT(std::string(read().status().message()), HasSubstr("set stream"));
  http.last_event_id = "";
  options.event_ids = true;
  EXPECT_THAT(std::string(read().status().message()), HasSubstr("stream_options.event_ids"));
}

TEST_F(AnswerTest, WhoWaitsForAWorkerIsToldByAComment) {
  Start({.stream = true});
  v1::GenerateResponse waits;
  waits.mutable_progress()->set_prompt_tokens(100);
  waits.mutable_progress()->set_waits_for_worker(true);
  api_.sinks[0]->Write(waits);  // before it was admitted: nothing is known of its prompt's cache
  EXPECT_EQ(exchange_->stream->Take().text, ": waiting for a worker\n\n");
  Progress(0, 50);
  Token(0, "a");
  EXPECT_THAT(exchange_->stream->Take().text, HasSubstr(": reading prompt 50/100\n\n"));
  api_.sinks[0]->Write(waits);
  EXPECT_EQ(exchange_->stream->Take().text, ": waiting for a worker\n\n");
  Token(0, "b", Place::kLast);
  Finish(0);
  EXPECT_THAT(exchange_->stream->Take().text, HasSubstr("\"text\":\"b\""));
}

TEST_F(AnswerTest, OnlyTheNewestProgressWaits) {
  Start({.stream = true});
  for (uint32_t i = 0; i < 100000; ++i) Progress(0, i % 100);
  EXPECT_EQ(exchange_->stream->Take().text, ": reading prompt 99/100\n\n");
}

// As lm-evaluation-harness reads them: lists over prompt and answer, the first place without.
TEST_F(AnswerTest, LogprobsOfThePromptComeBeforeThoseOfTheAnswer) {
  Start({});
  api_.sinks[0]->Write(PromptPart(1, {6, 7}));
  api_.sinks[0]->Write(PromptPart(3, {8}));
  v1::GenerateResponse token;
  token.mutable_tokens()->add_token_ids(9);
  token.mutable_tokens()->add_logprobs()->set_logprob(-2.0f);
  api_.sinks[0]->Write(token);
  Finish(0);
  ASSERT_EQ(exchange_->replies.size(), 1u);
  const json logprobs = json::parse(exchange_->replies[0].body)["choices"][0]["logprobs"];
  EXPECT_EQ(logprobs["token_logprobs"], json::array({nullptr, -1.5, -1.5, -1.5, -2.0}));
  EXPECT_EQ(logprobs["tokens"].size(), 5u);
  EXPECT_TRUE(logprobs["top_logprobs"][0].is_null());
  // The token's own beside the most probable one, which it may be.
  EXPECT_EQ(logprobs["top_logprobs"][1].size(), 2u);
  EXPECT_EQ(logprobs["top_logprobs"][2].size(), 1u);
}

TEST_F(AnswerTest, LogprobsOfThePromptStreamAsTheyCome) {
  Start({.stream = true});
  api_.sinks[0]->Write(PromptPart(1, {6, 7}));
  const std::string text = exchange_->stream->Take().text;
  const json chunk = json::parse(text.substr(6));
  EXPECT_EQ(chunk["choices"][0]["text"], "");
  EXPECT_EQ(chunk["choices"][0]["logprobs"]["token_logprobs"].size(), 3u);
}

TEST_F(AnswerTest, AFailureBeforeTheFirstEventIsAnError) {
  Start({.stream = true});
  api_.sinks[0]->Close(absl::InvalidArgumentError("sampling.top_p is 3; it must be less"));
  ASSERT_EQ(exchange_->replies.size(), 1u);
  EXPECT_EQ(exchange_->replies[0].status, 400);
  EXPECT_EQ(json::parse(exchange_->replies[0].body)["error"]["param"], "top_p");
  EXPECT_EQ(exchange_->stream, nullptr);
}

TEST_F(AnswerTest, ALaterFailureIsAnEventAfterTheTokens) {
  Start({.stream = true});
  Token(0, "a");
  api_.sinks[0]->Close(absl::InternalError("broken"));
  const StreamSource::Piece piece = exchange_->stream->Take();
  EXPECT_LT(piece.text.find("\"text\":\"a\""), piece.text.find("data: {\"error\""));
  EXPECT_THAT(piece.text, HasSubstr("broken"));
  EXPECT_TRUE(piece.last);
  EXPECT_TRUE(exchange_->replies.empty());
}

TEST_F(AnswerTest, AClientThatDoesNotReadIsDroppedAtItsBound) {
  Start({.stream = true});
  size_t sent = 0;
  while (exchange_->dropped.ok()) {
    Token(0, std::string(1000, 'x'));
    ASSERT_LT(++sent, 2 * Answer::kMaxWaitingBytes / 1000);
  }
  EXPECT_GT(sent, Answer::kMaxWaitingBytes / 1000 / 2);
  EXPECT_EQ(api_.cancelled.size(), 1u);
  EXPECT_EQ(api_.cancelled[0].code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(AnswerTest, AClientThatIsGoneEndsEverySequence) {
  Start({.n = 3});
  Token(0, "a");
  ASSERT_EQ(api_.sinks.size(), 3u);
  exchange_->gone(absl::CancelledError("gone"));
  EXPECT_EQ(api_.cancelled.size(), 3u);
}

TEST_F(AnswerTest, TheOthersBeginWhenTheFirstHasAToken) {
  Start({.n = 3});
  ASSERT_EQ(api_.requests.size(), 1u);
  Progress(0, 100);
  EXPECT_EQ(api_.requests.size(), 1u) << "they would not find the prompt in the cache";
  Token(0, "a");
  ASSERT_EQ(api_.requests.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(api_.requests[i].text(), "prompt");
    EXPECT_EQ(api_.requests[i].request_id(), absl::StrCat("id-", i));
    EXPECT_EQ(api_.requests[i].sampling().seed(), 5 + i);
  }
  for (size_t i = 1; i < 3; ++i) Progress(i, 100);
  for (size_t i = 0; i < 3; ++i) Token(i, "b", Place::kLast);
  EXPECT_TRUE(exchange_->replies.empty());
  for (size_t i = 0; i < 3; ++i) Finish(i);
  ASSERT_EQ(exchange_->replies.size(), 1u);
  const json answer = json::parse(exchange_->replies[0].body);
  EXPECT_EQ(answer["choices"][0]["text"], "ab");
  EXPECT_EQ(answer["choices"][2]["text"], "b");
  EXPECT_EQ(answer["usage"]["prompt_tokens"], 100);
  EXPECT_EQ(answer["usage"]["completion_tokens"], 4);
}

TEST_F(AnswerTest, OneThatFailsEndsTheOthers) {
  Start({.n = 2});
  Token(0, "a");
  api_.sinks[1]->Close(absl::InternalError("broken"));
  EXPECT_EQ(api_.cancelled.size(), 2u);
  ASSERT_EQ(exchange_->replies.size(), 1u);
  EXPECT_EQ(exchange_->replies[0].status, 500);
}

}  // namespace
}  // namespace kvasir::coordinator
