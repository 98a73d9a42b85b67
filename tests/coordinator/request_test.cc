#include "coordinator/request/request.h"

#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/coordinator/collected_response.h"

namespace kvasir::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using Role = TokenEvent::Role;

class RequestTest : public ::testing::Test {
 protected:
  std::unique_ptr<Request> Make(ParsedRequest parsed) {
    absl::StatusOr<std::unique_ptr<RunningRequests::Lease>> id = running_.Acquire({.id = "r1"});
    EXPECT_TRUE(id.ok());
    sink_ = std::make_shared<CollectedResponse>();
    absl::StatusOr<std::unique_ptr<Request>> request =
        Request::Create(std::move(parsed), {.tokenizer = *model_.tokenizer,
                                            .metrics = metrics_,
                                            .id = *std::move(id),
                                            .sink = sink_,
                                            .sequence = SequenceId(1),
                                            .origin = {.request_id = "r1", .arrived = now_},
                                            .policy = "default"});
    EXPECT_TRUE(request.ok()) << request.status();
    return *std::move(request);
  }
  // Feeds the bytes of `text` as tokens until the request stops. The last token has role `last`.
  Request::Verdict Feed(Request& request, const std::string& text, Role last = Role::kInner) {
    for (size_t i = 0; i < text.size(); ++i) {
      const TokenEvent event = {.id = SequenceId(1),
                                .index = index_++,
                                .token = static_cast<uint8_t>(text[i]),
                                .role = i + 1 == text.size() ? last : Role::kInner};
      if (request.OnToken(event, now_) == Request::Verdict::kStop) return Request::Verdict::kStop;
    }
    return Request::Verdict::kGoOn;
  }
  static v1::Finish Summary(v1::FinishReason reason) {
    v1::Finish finish;
    finish.set_reason(reason);
    return finish;
  }

  TestModel model_;
  Metrics metrics_{"test", {"default"}};
  RunningRequests running_;
  TimePoint now_ = TimePoint() + std::chrono::hours(1);
  std::shared_ptr<CollectedResponse> sink_;
  int64_t index_ = 0;
};

TEST_F(RequestTest, LogprobsOfThePromptAreAMessageOfTheirOwn) {
  std::unique_ptr<Request> request = Make({});
  PromptLogprobsEvent event = {.id = SequenceId(1), .logprobs = {}};
  event.logprobs.set_index(1);
  event.logprobs.add_logprobs(-2.5f);
  request->OnPromptLogprobs(event);
  const std::vector<v1::GenerateResponse> messages = sink_->messages();
  ASSERT_EQ(messages.size(), 1u);
  EXPECT_EQ(messages[0].prompt_logprobs().logprobs(0), -2.5f);
}

// A byte-level tokenizer has tokens that are no text: the first byte of a longer character.
TEST_F(RequestTest, TextsOfTokensGoWithTheirLogprobsWhenAskedFor) {
  for (const bool asked : {false, true}) {
    index_ = 0;
    std::unique_ptr<Request> request = Make({.wants_token_texts = asked});
    TokenEvent event = {.id = SequenceId(1), .token = 'a', .logprobs = v1::TokenLogprobs()};
    event.logprobs->add_top()->set_token_id(0xC3);
    event.logprobs->add_top()->set_token_id('b');
    event.logprobs->add_top()->set_token_id(1u << 30);  // a model may have more tokens
    request->OnToken(event, now_);
    const v1::TokenLogprobs logprobs = sink_->messages()[0].tokens().logprobs(0);
    EXPECT_EQ(logprobs.has_token(), asked);
    EXPECT_EQ(logprobs.top(0).has_token(), asked);
    if (asked) {
      EXPECT_EQ(logprobs.token().text(), "a");
      EXPECT_EQ(logprobs.top(0).token().part(), "\xC3");
      EXPECT_EQ(logprobs.top(1).token().text(), "b");
      EXPECT_TRUE(logprobs.top(2).token().has_text());
      EXPECT_EQ(logprobs.top(2).token().text(), "");
    }
    request->Finish(absl::OkStatus(), Summary(v1::FINISH_REASON_STOP), now_);
  }
}

TEST_F(RequestTest, LogprobsGoWithTheirToken) {
  std::unique_ptr<Request> request = Make({});
  TokenEvent event = {.id = SequenceId(1), .token = 'a', .logprobs = v1::TokenLogprobs()};
  event.logprobs->set_logprob(-0.5f);
  event.logprobs->add_top()->set_token_id(7);
  request->OnToken(event, now_);
  event = {.id = SequenceId(1), .index = 1, .token = 'b', .logprobs = {}};
  request->OnToken(event, now_);
  request->Finish(absl::OkStatus(), Summary(v1::FINISH_REASON_LENGTH), now_);
  const std::vector<v1::GenerateResponse> messages = sink_->messages();
  ASSERT_EQ(messages[0].tokens().logprobs_size(), 1);
  EXPECT_EQ(messages[0].tokens().logprobs(0).logprob(), -0.5f);
  EXPECT_EQ(messages[0].tokens().logprobs(0).top(0).token_id(), 7u);
  EXPECT_EQ(messages[1].tokens().logprobs_size(), 0);
}

// A tokenizer of SentencePiece's form takes a space off the begin of a text, but an answer goes on.
TEST_F(RequestTest, AnAnswerKeepsItsSpaceUnlessThePromptHasNoText) {
  model_.tokenizer = *Tokenizer::Load("tests/coordinator/tokenizer/golden/llama2");
  const int32_t begin = *model_.tokenizer->TokenId("<s>");
  const int32_t word = *model_.tokenizer->TokenId("▁the");
  const auto first_text = [&](std::vector<int32_t> prompt) {
    std::unique_ptr<Request> request = Make({.prompt = std::move(prompt)});
    request->OnToken({.id = SequenceId(1), .token = word, .logprobs = {}}, now_);
    request->Finish(absl::OkStatus(), Summary(v1::FINISH_REASON_LENGTH), now_);
    return sink_->messages()[0].tokens().text();
  };
  EXPECT_EQ(first_text({begin}), "the");
  EXPECT_EQ(first_text({begin, word}), " the");
}

TEST_F(RequestTest, StreamsTokensAndTextAndEndsOnce) {
  std::unique_ptr<Request> request = Make({});
  request->OnProgress({.id = SequenceId(1),
                       .prompt_tokens = 100,
                       .processed_tokens = 64,
                       .cached_tokens = 64,
                       .eta = absl::Milliseconds(1500)},
                      now_);
  EXPECT_EQ(running_.List(1, now_).at(0).processed_tokens(), 64u);
  EXPECT_EQ(Feed(*request, "hello", Role::kLast), Request::Verdict::kGoOn);
  EXPECT_EQ(running_.List(1, now_).at(0).answer_tokens(), 5u);
  request->Finish(absl::OkStatus(), Summary(v1::FINISH_REASON_LENGTH), now_);
  EXPECT_TRUE(running_.List(1, now_).empty());
  request.reset();
  EXPECT_EQ(sink_->status(), absl::OkStatus());
  const std::vector<v1::GenerateResponse> messages = sink_->messages();
  ASSERT_THAT(messages, SizeIs(7));
  EXPECT_EQ(messages[0].progress().request_id(), "r1");
  EXPECT_EQ(messages[0].progress().processed_tokens(), 64u);
  EXPECT_EQ(messages[0].progress().eta().seconds(), 1);
  EXPECT_EQ(messages[0].progress().eta().nanos(), 500'000'000);
  EXPECT_EQ(sink_->text(), "hello");
  EXPECT_THAT(sink_->token_ids(), ElementsAre('h', 'e', 'l', 'l', 'o'));
  EXPECT_EQ(sink_->finish().request_id(), "r1");
  EXPECT_EQ(sink_->finish().reason(), v1::FINISH_REASON_LENGTH);
}

TEST_F(RequestTest, ALostGroupIsToldWithTheProgressSoFar) {
  std::unique_ptr<Request> request = Make({});
  request->OnProgress({.id = SequenceId(1),
                       .prompt_tokens = 100,
                       .processed_tokens = 64,
                       .cached_tokens = 32,
                       .eta = absl::Seconds(1)},
                      now_);
  Feed(*request, "ab");
  request->OnGroupLost();
  EXPECT_EQ(running_.List(1, now_).at(0).state(), v1::REQUEST_STATE_RESUMING);
  Feed(*request, "\n", Role::kLast);
  request->Finish(absl::OkStatus(), Summary(v1::FINISH_REASON_LENGTH), now_);
  const std::vector<v1::GenerateResponse> messages = sink_->messages();
  ASSERT_THAT(messages, SizeIs(6));
  const v1::Progress& waits = messages[3].progress();
  EXPECT_TRUE(waits.waits_for_worker());
  EXPECT_EQ(waits.processed_tokens(), 64u);
  EXPECT_EQ(waits.cached_tokens(), 32u);
  EXPECT_FALSE(waits.has_eta());
  EXPECT_FALSE(messages[0].progress().waits_for_worker());
}

TEST_F(RequestTest, TextIsWholeUtf8) {
  std::unique_ptr<Request> request = Make({});
  Feed(*request, "\xE2\x82");
  EXPECT_EQ(sink_->text(), "");
  Feed(*request, "\xAC!\xE2", Role::kLast);
  request->Finish(absl::OkStatus(), Summary(v1::FINISH_REASON_LENGTH), now_);
  EXPECT_EQ(sink_->text(), "\xE2\x82\xAC!\xEF\xBF\xBD");
}

TEST_F(RequestTest, AStopStringEndsTheAnswerAndIsLeftOut) {
  std::unique_ptr<Request> request = Make({.stop_strings = {"never", "END"}});
  EXPECT_EQ(Feed(*request, "some text E"), Request::Verdict::kGoOn);
  EXPECT_EQ(sink_->text(), "some text ");  // E may become the stop string
  EXPECT_EQ(Feed(*request, "ND and more"), Request::Verdict::kStop);
  request->Finish(absl::OkStatus(), Summary(v1::FINISH_REASON_STOP), now_);
  EXPECT_EQ(sink_->text(), "some text ");
  EXPECT_EQ(sink_->finish().matched_stop_str(), "END");
}

TEST_F(RequestTest, AStopStringIsPartOfTheAnswerWhenAskedFor) {
  std::unique_ptr<Request> request =
      Make({.stop_strings = {"END"}, .stop_text = StopMatcher::StopText::kInclude});
  EXPECT_EQ(Feed(*request, "text END"), Request::Verdict::kStop);
  request->Finish(absl::OkStatus(), Summary(v1::FINISH_REASON_STOP), now_);
  EXPECT_EQ(sink_->text(), "text END");
}

TEST_F(RequestTest, AStopStringInTheLastTokenIsTheReason) {
  std::unique_ptr<Request> request = Make({.stop_strings = {"END"}});
  EXPECT_EQ(Feed(*request, "text END", Role::kLast), Request::Verdict::kStop);
  request->Finish(absl::OkStatus(), Summary(v1::FINISH_REASON_LENGTH), now_);
  EXPECT_EQ(sink_->finish().reason(), v1::FINISH_REASON_STOP);
  EXPECT_EQ(sink_->finish().matched_stop_str(), "END");
}

TEST_F(RequestTest, HeldBackTextComesWithTheLastToken) {
  std::unique_ptr<Request> request = Make({.stop_strings = {"END"}});
  EXPECT_EQ(Feed(*request, "text EN", Role::kLast), Request::Verdict::kGoOn);
  request->Finish(absl::OkStatus(), Summary(v1::FINISH_REASON_LENGTH), now_);
  EXPECT_EQ(sink_->text(), "text EN");
}

TEST_F(RequestTest, NoStopStringCountsWithinMinTokens) {
  ParsedRequest parsed = {.stop_strings = {"END"}};
  parsed.sampling.set_min_tokens(5);
  std::unique_ptr<Request> request = Make(std::move(parsed));
  EXPECT_EQ(Feed(*request, "END. END"), Request::Verdict::kStop);
  request->Finish(absl::OkStatus(), Summary(v1::FINISH_REASON_STOP), now_);
  EXPECT_EQ(sink_->text(), "END. ");
}

TEST_F(RequestTest, TheTextOfAStopTokenIsLeftOut) {
  std::unique_ptr<Request> request = Make({});
  Feed(*request, "text.", Role::kStop);
  request->Finish(absl::OkStatus(), Summary(v1::FINISH_REASON_STOP), now_);
  EXPECT_EQ(sink_->text(), "text");
  EXPECT_THAT(sink_->token_ids(), SizeIs(5));  // without the id of the stop token
}

TEST_F(RequestTest, AResumedAnswerGoesOnAfterWhatTheClientHas) {
  const std::string answer = "te\u00e4t EN.";
  ParsedRequest parsed = {.stop_strings = {"END"}};
  parsed.told = {'t', 'e', 0xC3};
  std::unique_ptr<Request> request = Make(std::move(parsed));
  EXPECT_THAT(request->TakeSpec().answer, ElementsAre('t', 'e'));
  index_ = 2;
  Feed(*request, answer.substr(2), Role::kLast);
  request->Finish(absl::OkStatus(), Summary(v1::FINISH_REASON_LENGTH), now_);
  EXPECT_EQ(sink_->text(), answer.substr(2));  // the client has the first half of no character
  ASSERT_TRUE(sink_->messages()[0].has_tokens());
  EXPECT_EQ(sink_->messages()[0].tokens().index(), 3u);
}

TEST_F(RequestTest, TextThatWasHeldBackIsHeldBackAgain) {
  ParsedRequest parsed = {.stop_strings = {"END"}};
  parsed.told = {'a', 'E', 'N'};
  std::unique_ptr<Request> request = Make(std::move(parsed));
  index_ = 2;
  EXPECT_EQ(Feed(*request, "ND"), Request::Verdict::kStop);
  request->Finish(absl::OkStatus(), Summary(v1::FINISH_REASON_STOP), now_);
  EXPECT_EQ(sink_->text(), "");
  EXPECT_EQ(sink_->finish().matched_stop_str(), "END");
}

TEST_F(RequestTest, AnAnswerThatTheClientHasWholeOnlyEnds) {
  ParsedRequest parsed = {.stop_strings = {"END"}};
  parsed.told = {'E', 'N', 'D'};
  std::unique_ptr<Request> request = Make(std::move(parsed));
  index_ = 2;
  EXPECT_EQ(Feed(*request, "D"), Request::Verdict::kStop);
  request->Finish(absl::OkStatus(), Summary(v1::FINISH_REASON_STOP), now_);
  EXPECT_THAT(sink_->messages(), SizeIs(1));
  EXPECT_EQ(sink_->finish().matched_stop_str(), "END");
}

TEST_F(RequestTest, AnAnswerThatWouldGoOnOtherwiseIsRefused) {
  ParsedRequest parsed;
  parsed.told = {'a', 'b'};
  std::unique_ptr<Request> request = Make(std::move(parsed));
  index_ = 1;
  EXPECT_EQ(Feed(*request, "c"), Request::Verdict::kStop);
  request->Finish(absl::OkStatus(), Summary(v1::FINISH_REASON_STOP), now_);
  EXPECT_EQ(sink_->status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(sink_->status().message()),
              HasSubstr("resume.token_ids[1] is 98, this server computes 99"));
}

TEST_F(RequestTest, AnAnswerThatEndedBeforeIsNotResumed) {
  ParsedRequest parsed = {.stop_strings = {"END"}};
  parsed.told = {'E', 'N', 'D', 's'};
  const std::shared_ptr<CollectedResponse> sink = std::make_shared<CollectedResponse>();
  absl::StatusOr<std::unique_ptr<Request>> request =
      Request::Create(std::move(parsed), {.tokenizer = *model_.tokenizer,
                                          .metrics = metrics_,
                                          .id = *running_.Acquire({.id = "r"}),
                                          .sink = sink,
                                          .sequence = SequenceId(1),
                                          .origin = {},
                                          .policy = "default"});
  EXPECT_THAT(std::string(request.status().message()),
              HasSubstr("resume.token_ids[2] completes a stop string"));
  EXPECT_THAT(sink->messages(), SizeIs(0));  // the caller answers
}

TEST_F(RequestTest, AnErrorEndsTheStreamWithoutAFinishMessage) {
  std::unique_ptr<Request> request = Make({});
  Feed(*request, "te");
  request->Finish(absl::UnavailableError("gone"), {}, now_);
  EXPECT_EQ(sink_->status(), absl::UnavailableError("gone"));
  EXPECT_FALSE(sink_->messages().back().has_finish());
}

TEST_F(RequestTest, AForgottenRequestIsStillAnswered) {
  Make({}).reset();
  EXPECT_EQ(sink_->status().code(), absl::StatusCode::kInternal);
}

TEST_F(RequestTest, TheIdIsFreeWhenTheClientHearsOfTheEnd) {
  std::unique_ptr<Request> request = Make({});
  EXPECT_EQ(running_.Acquire({.id = "r1"}).status().code(), absl::StatusCode::kAlreadyExists);
  request->Finish(absl::OkStatus(), {}, now_);
  EXPECT_TRUE(running_.Acquire({.id = "r1"}).ok());
}

TEST_F(RequestTest, AnEmptyStopStringIsRefused) {
  absl::StatusOr<std::unique_ptr<Request>> request =
      Request::Create({.stop_strings = {""}}, {.tokenizer = *model_.tokenizer,
                                               .metrics = metrics_,
                                               .id = *running_.Acquire({.id = "r"}),
                                               .sink = std::make_shared<CollectedResponse>(),
                                               .sequence = SequenceId(1),
                                               .origin = {.request_id = "r1", .arrived = now_},
                                               .policy = "default"});
  EXPECT_EQ(request.status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvasir::coordinator
