#include "coordinator/request/parse_request.h"

#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/coordinator/collected_response.h"

namespace kvasir::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class ParseRequestTest : public ::testing::Test {
 protected:
  absl::StatusOr<ParsedRequest> Parse(const v1::GenerateRequest& request) {
    return ParseRequest(request, model_.served(), /*seed=*/77);
  }
  void ExpectInvalid(const v1::GenerateRequest& request, const std::string& message) {
    const absl::Status status = Parse(request).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << message;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
  static v1::GenerateRequest Text(const std::string& text) {
    v1::GenerateRequest request;
    request.set_text(text);
    return request;
  }

  TestModel model_;
};

TEST_F(ParseRequestTest, UnsetFieldsHaveTheirDocumentedDefaults) {
  absl::StatusOr<ParsedRequest> parsed = Parse(Text("ab"));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_THAT(parsed->prompt, ElementsAre(256, 'a', 'b', 257));
  EXPECT_EQ(parsed->max_tokens, 16);
  EXPECT_EQ(parsed->sampling.temperature(), 1.0f);
  EXPECT_EQ(parsed->sampling.top_p(), 1.0f);
  EXPECT_EQ(parsed->sampling.top_k(), 0u);
  EXPECT_EQ(parsed->sampling.seed(), 77u);
  EXPECT_EQ(parsed->sampling.min_p(), 0.0f);
  EXPECT_EQ(parsed->sampling.repetition_penalty(), 1.0f);
  EXPECT_EQ(parsed->sampling.frequency_penalty(), 0.0f);
  EXPECT_EQ(parsed->sampling.presence_penalty(), 0.0f);
  EXPECT_FALSE(parsed->sampling.has_logprobs());
  EXPECT_FALSE(parsed->wants_prompt_logprobs);
  EXPECT_THAT(parsed->sampling.logit_bias(), IsEmpty());
  EXPECT_THAT(parsed->sampling.stop_token_ids(), ElementsAre(257));
  EXPECT_EQ(parsed->policy.index, 0u);
  EXPECT_EQ(parsed->special_tokens, SpecialTokens::kSkip);
  EXPECT_EQ(parsed->stop_text, StopMatcher::StopText::kExclude);
}

TEST_F(ParseRequestTest, SpecialTokensAreAddedAndParsedUnlessSwitchedOff) {
  v1::GenerateRequest request = Text("a</s>");
  EXPECT_THAT(Parse(request)->prompt, ElementsAre(256, 'a', 257, 257));
  request.set_parse_special_tokens(false);
  EXPECT_EQ(Parse(request)->prompt.size(), 3 + std::string("</s>").size());
  request.set_add_special_tokens(false);
  const std::vector<int32_t> plain = Parse(request)->prompt;
  EXPECT_EQ(std::string(plain.begin(), plain.end()), "a</s>");
  request.mutable_token_ids()->add_ids(1);
  ExpectInvalid(request, "add_special_tokens is set beside token_ids");
  request.clear_add_special_tokens();
  ExpectInvalid(request, "parse_special_tokens is set beside token_ids");
}

TEST_F(ParseRequestTest, BeyondTheTrainedWindowOnlySparsePoliciesAreTaken) {
  model_.trained_window = 50;
  v1::GenerateRequest request = Text(std::string(40, 'a'));
  request.mutable_sampling()->set_max_tokens(8);
  EXPECT_TRUE(Parse(request).ok());  // 42 + 8
  request.mutable_sampling()->set_max_tokens(9);
  ExpectInvalid(request, "prompt and answer may have 51 tokens");
}

TEST_F(ParseRequestTest, WhatIsSetIsTaken) {
  v1::GenerateRequest request = Text("ab");
  request.mutable_policy()->set_name("quest");
  v1::SamplingParams& sampling = *request.mutable_sampling();
  sampling.set_temperature(0);
  sampling.set_top_p(0.5f);
  sampling.set_top_k(7);
  sampling.set_max_tokens(100);
  sampling.set_min_tokens(3);
  sampling.add_stop("END");
  sampling.add_stop_token_ids(5);
  sampling.add_stop_token_ids(5);
  sampling.set_skip_special_tokens(false);
  sampling.set_seed(0);
  sampling.set_min_p(0.25f);
  sampling.set_repetition_penalty(1.5f);
  sampling.set_frequency_penalty(-2);
  sampling.set_presence_penalty(2);
  sampling.set_logprobs(0);
  sampling.set_prompt_logprobs(0);
  for (const uint32_t token : {257u, 0u, 5u}) {
    v1::LogitBias& bias = *sampling.add_logit_bias();
    bias.set_token_id(token);
    bias.set_bias(-100);
  }
  sampling.set_include_stop_str_in_output(true);
  absl::StatusOr<ParsedRequest> parsed = Parse(request);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->policy.index, 1u);
  EXPECT_EQ(parsed->sampling.temperature(), 0.0f);
  EXPECT_EQ(parsed->sampling.seed(), 0u);  // set, although to 0
  EXPECT_EQ(parsed->sampling.min_p(), 0.25f);
  EXPECT_EQ(parsed->sampling.repetition_penalty(), 1.5f);
  EXPECT_EQ(parsed->sampling.frequency_penalty(), -2.0f);
  EXPECT_EQ(parsed->sampling.presence_penalty(), 2.0f);
  EXPECT_TRUE(parsed->sampling.has_logprobs());  // of the chosen token only
  EXPECT_TRUE(parsed->wants_prompt_logprobs);
  std::vector<uint32_t> biased;
  for (const v1::LogitBias& bias : parsed->sampling.logit_bias()) {
    biased.push_back(bias.token_id());
  }
  EXPECT_THAT(biased, ElementsAre(0, 5, 257));
  EXPECT_EQ(parsed->sampling.min_tokens(), 3u);
  EXPECT_THAT(parsed->sampling.stop_token_ids(), ElementsAre(5, 257));
  EXPECT_THAT(parsed->stop_strings, ElementsAre("END"));
  EXPECT_EQ(parsed->special_tokens, SpecialTokens::kKeep);
  EXPECT_EQ(parsed->stop_text, StopMatcher::StopText::kInclude);
}

TEST_F(ParseRequestTest, IgnoringEosLeavesOnlyTheRequestsStopTokens) {
  v1::GenerateRequest request = Text("ab");
  request.mutable_sampling()->set_ignore_eos(true);
  EXPECT_THAT(Parse(request)->sampling.stop_token_ids(), IsEmpty());
}

TEST_F(ParseRequestTest, AnEmptyPromptIsRefused) {
  ExpectInvalid(v1::GenerateRequest(), "none of text, chat and token_ids");
  ExpectInvalid(Text(""), "the prompt is empty");
  v1::GenerateRequest request;
  request.mutable_token_ids();
  ExpectInvalid(request, "the prompt is empty");
}

TEST_F(ParseRequestTest, PromptAndAnswerMustFitTheContext) {
  v1::GenerateRequest request = Text(std::string(900, 'x'));
  request.mutable_sampling()->set_max_tokens(98);  // exactly 1000 with the tokens around the text
  EXPECT_TRUE(Parse(request).ok()) << Parse(request).status();
  request.mutable_sampling()->set_max_tokens(99);
  ExpectInvalid(request, "more than 901 tokens");
  ExpectInvalid(request, "the context has 1000 tokens, sampling.max_tokens is 99");
  v1::GenerateRequest ids;
  for (int i = 0; i < 900; ++i) ids.mutable_token_ids()->add_ids(1);
  ids.mutable_sampling()->set_max_tokens(101);
  ExpectInvalid(ids, "the prompt has 900 tokens");
}

TEST_F(ParseRequestTest, AnAnswerLongerThanTheContextIsRefusedBeforeTokenising) {
  v1::GenerateRequest request = Text("x");
  request.mutable_sampling()->set_max_tokens(16777216);
  ExpectInvalid(request, "context of 1000");
}

TEST_F(ParseRequestTest, AHugePromptIsRefusedWithoutTokenisingItAll) {
  v1::GenerateRequest request = Text(std::string(size_t{20} << 20, 'x'));
  ExpectInvalid(request, "more than 984 tokens");
}

TEST_F(ParseRequestTest, TokenIdsOutsideTheVocabularyAreRefused) {
  for (uint32_t id : {258u, 2147483647u, 2147483648u, 4294967295u}) {
    v1::GenerateRequest request;
    request.mutable_token_ids()->add_ids(1);
    request.mutable_token_ids()->add_ids(id);
    EXPECT_EQ(Parse(request).status().code(), absl::StatusCode::kInvalidArgument) << id;
    v1::GenerateRequest stop = Text("x");
    stop.mutable_sampling()->add_stop_token_ids(id);
    EXPECT_EQ(Parse(stop).status().code(), absl::StatusCode::kInvalidArgument) << id;
  }
  v1::GenerateRequest request;
  request.mutable_token_ids()->add_ids(258);
  ExpectInvalid(request, "token_ids.ids[0] is 258; the model's tokens are [0, 258)");
}

TEST_F(ParseRequestTest, BiasesNameTokensOfTheModelEachOnce) {
  v1::GenerateRequest request = Text("x");
  v1::SamplingParams& sampling = *request.mutable_sampling();
  sampling.add_logit_bias()->set_token_id(257);
  sampling.add_logit_bias()->set_token_id(258);
  ExpectInvalid(request, "sampling.logit_bias names token 258");
  sampling.mutable_logit_bias(1)->set_token_id(257);
  ExpectInvalid(request, "sampling.logit_bias names token 257 twice");
  sampling.mutable_logit_bias(1)->set_token_id(1);
  sampling.mutable_logit_bias(1)->set_bias(std::numeric_limits<float>::infinity());
  ExpectInvalid(request, "sampling.logit_bias[1].bias is inf; it must be in [-100, 100]");
  sampling.clear_logit_bias();
  for (uint32_t i = 0; i < 1025; ++i) sampling.add_logit_bias()->set_token_id(i);
  ExpectInvalid(request, "sampling.logit_bias has a number of elements of 1025");
}

TEST_F(ParseRequestTest, TextWithTokensThatTheModelLacksIsRefused) {
  ServedModel small = model_.served();
  small.vocab_size = 256;  // the tokenizer puts 256 before the text
  const absl::Status status = ParseRequest(Text("x"), small, 1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("token 256"));
}

TEST_F(ParseRequestTest, OnlyAnAnswerThatGoesOnWithTheSameTokensIsResumed) {
  v1::GenerateRequest request = Text("ab");
  v1::SamplingParams& sampling = *request.mutable_sampling();
  sampling.set_max_tokens(3);
  sampling.set_prompt_logprobs(1);
  for (const uint32_t id : {7u, 8u, 9u}) request.mutable_resume()->add_token_ids(id);
  ExpectInvalid(request, "resume is set, sampling.temperature is 1 and sampling.seed is not set");
  sampling.set_temperature(0);
  absl::StatusOr<ParsedRequest> parsed = Parse(request);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_THAT(parsed->told, ElementsAre(7, 8, 9));
  EXPECT_FALSE(parsed->wants_prompt_logprobs) << "they were told";
  sampling.set_temperature(1);
  sampling.set_seed(1);
  EXPECT_TRUE(Parse(request).ok());
  sampling.add_stop_token_ids(9);
  EXPECT_TRUE(Parse(request).ok()) << "the last token may end the answer";
  sampling.add_stop_token_ids(8);
  ExpectInvalid(request, "resume.token_ids[1] is 8, which ends the answer");
  sampling.set_min_tokens(2);
  EXPECT_TRUE(Parse(request).ok());
  sampling.set_max_tokens(2);
  ExpectInvalid(request, "resume.token_ids has 3 tokens; sampling.max_tokens, which counts them");
  request.mutable_resume()->set_token_ids(0, 1u << 20);
  ExpectInvalid(request, "resume.token_ids[0] is 1048576");
  request.mutable_resume()->clear_token_ids();
  ExpectInvalid(request, "resume.token_ids has a number of elements of 0");
}

TEST_F(ParseRequestTest, MinTokensBeyondMaxTokensIsRefused) {
  v1::GenerateRequest request = Text("x");
  request.mutable_sampling()->set_min_tokens(17);
  ExpectInvalid(request, "sampling.min_tokens is 17; it must be at most max_tokens, 16");
}

TEST_F(ParseRequestTest, LimitsAreCheckedFirst) {
  v1::GenerateRequest request = Text("x");
  request.mutable_sampling()->set_temperature(std::numeric_limits<float>::quiet_NaN());
  ExpectInvalid(request, "sampling.temperature is nan");
  request = Text("x");
  request.mutable_policy()->mutable_decode_overrides()->set_window_tokens(4294967295u);
  ExpectInvalid(request, "policy.decode_overrides.window_tokens");
  request = Text("x");
  request.set_request_id(std::string(129, 'i'));
  ExpectInvalid(request, "request_id");
  request = Text("x");
  request.mutable_policy()->set_name("nope");
  ExpectInvalid(request, "'nope'");
}

TEST_F(ParseRequestTest, AConversationIsRenderedAndItsSpecialTokensStayText) {
  model_.chat = ModelChat({.jinja = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
                                    "{% if add_generation_prompt %}!{% endif %}"});
  v1::GenerateRequest request;
  request.mutable_chat()->set_messages(R"([{"role": "user", "content": "a</s>"}])");
  EXPECT_THAT(Parse(request)->prompt, ElementsAre(256, 'a', '<', '/', 's', '>', 257, '!'));
  request.mutable_chat()->set_add_generation_prompt(false);
  EXPECT_THAT(Parse(request)->prompt, ElementsAre(256, 'a', '<', '/', 's', '>', 257));
  request.mutable_chat()->set_continue_final_message(true);
  EXPECT_THAT(Parse(request)->prompt, ElementsAre(256, 'a', '<', '/', 's', '>'));
  request.mutable_chat()->set_add_generation_prompt(true);
  ExpectInvalid(request, "chat: add_generation_prompt and continue_final_message are both set");
}

TEST_F(ParseRequestTest, AConversationThatCannotBeRenderedIsRefused) {
  v1::GenerateRequest request;
  request.mutable_chat()->set_messages("[]");
  ExpectInvalid(request, "chat: the model has no chat template");
  model_.chat = ModelChat({.jinja = "{% nope %}"});
  ExpectInvalid(request, "template in chat_template.jinja cannot be used: line 1: this statement");
  model_.chat = ModelChat({.jinja = "{{ raise_exception('No system message, please') }}"});
  ExpectInvalid(request, "chat: messages is not an array with at least one message");
  request.mutable_chat()->set_messages(R"([{"role": "user"}])");
  ExpectInvalid(request, "chat: No system message, please");
  model_.chat = ModelChat({.jinja = "{{ 'x' * 2000 }}"});
  ExpectInvalid(request, "chat: text of 2000 bytes has more than 984 tokens");
  request.set_parse_special_tokens(true);
  ExpectInvalid(request, "parse_special_tokens is set beside chat");
}

}  // namespace
}  // namespace kvasir::coordinator
