#include "coordinator/http/requests/generate_fields.h"

#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "coordinator/http/requests/completion_request.h"
#include "coordinator/http/transport/error_reply.h"
#include "proto/grpc_status.h"

namespace kvasir::coordinator {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string FieldOf(const absl::Status& status) {
  const json error = json::parse(ErrorJson(status))["error"];
  return error["param"].is_null() ? "" : error["param"].get<std::string>();
}

v1::GenerateRequest Read(const json& body) {
  JsonFields fields(body);
  v1::GenerateRequest request;
  ReadGenerateFields(fields, request);
  EXPECT_EQ(fields.status(), absl::OkStatus());
  return request;
}

TEST(GenerateFieldsTest, FieldsReachTheRequest) {
  const v1::GenerateRequest request =
      Read({{"temperature", 0.5},
            {"top_p", 0.25},
            {"top_k", 3},
            {"min_p", 0.125},
            {"frequency_penalty", -1},
            {"presence_penalty", 1.5},
            {"repetition_penalty", 2},
            {"min_tokens", 4},
            {"seed", -1},
            {"stop", {"a", "b"}},
            {"stop_token_ids", {7}},
            {"skip_special_tokens", false},
            {"ignore_eos", true},
            {"include_stop_str_in_output", true},
            {"logit_bias", {{"5", -2.5}}},
            {"cache_salt", "salt"},
            {"sparsity", {{"name", "quest"}, {"decode_overrides", {{"token_budget", 64}}}}},
            {"quality", 0.75}});
  const v1::SamplingParams& sampling = request.sampling();
  EXPECT_EQ(sampling.temperature(), 0.5f);
  EXPECT_EQ(sampling.top_p(), 0.25f);
  EXPECT_EQ(sampling.top_k(), 3u);
  EXPECT_EQ(sampling.min_p(), 0.125f);
  EXPECT_EQ(sampling.frequency_penalty(), -1);
  EXPECT_EQ(sampling.presence_penalty(), 1.5f);
  EXPECT_EQ(sampling.repetition_penalty(), 2);
  EXPECT_EQ(sampling.min_tokens(), 4u);
  EXPECT_EQ(sampling.seed(), std::numeric_limits<uint64_t>::max());
  EXPECT_THAT(sampling.stop(), ElementsAre("a", "b"));
  EXPECT_THAT(sampling.stop_token_ids(), ElementsAre(7));
  EXPECT_FALSE(sampling.skip_special_tokens());
  EXPECT_TRUE(sampling.ignore_eos());
  EXPECT_TRUE(sampling.include_stop_str_in_output());
  ASSERT_EQ(sampling.logit_bias_size(), 1);
  EXPECT_EQ(sampling.logit_bias(0).token_id(), 5u);
  EXPECT_EQ(sampling.logit_bias(0).bias(), -2.5f);
  EXPECT_EQ(request.tenant_id(), "salt");
  EXPECT_EQ(request.policy().name(), "quest");
  EXPECT_EQ(request.policy().decode_overrides().token_budget(), 64u);
  EXPECT_EQ(request.policy().decode_overrides().quality().min_mass(), 0.75f);
}

TEST(GenerateFieldsTest, AbsentAndNullFieldsAreNotSet) {
  const v1::GenerateRequest absent = Read(json::object());
  EXPECT_FALSE(absent.sampling().has_temperature());
  EXPECT_FALSE(absent.sampling().has_seed());
  EXPECT_EQ(
      Read({{"temperature", nullptr}, {"seed", nullptr}, {"stop", nullptr}}).SerializeAsString(),
      absent.SerializeAsString());
}

TEST(GenerateFieldsTest, IntegersMayBeWrittenAsFloats) {
  EXPECT_EQ(AsInteger(json(3.0), 0, 5), 3);
  EXPECT_EQ(AsInteger(json(3.5), 0, 5), std::nullopt);
  EXPECT_EQ(AsInteger(json(6), 0, 5), std::nullopt);
  EXPECT_EQ(AsInteger(json(-1), 0, 5), std::nullopt);
  EXPECT_EQ(AsInteger(json(1e300), 0, 5), std::nullopt);
  EXPECT_EQ(AsInteger(json(std::numeric_limits<uint64_t>::max()), 0, 5), std::nullopt);
  EXPECT_EQ(AsInteger(json("3"), 0, 5), std::nullopt);
  EXPECT_EQ(AsInteger(json(true), 0, 5), std::nullopt);
}

TEST(GenerateFieldsTest, TheFirstWrongTypeIsNamed) {
  const json body = {{"min_p", "little"}, {"stop", 1}};
  JsonFields fields(body);
  v1::GenerateRequest request;
  ReadGenerateFields(fields, request);
  EXPECT_EQ(FieldOf(fields.status()), "min_p");
  EXPECT_THAT(std::string(fields.status().message()), HasSubstr("min_p is \"little\""));
}

TEST(GenerateFieldsTest, OptionsOfAStreamAreReadAndNamed) {
  const json body = {{"stream", true},
                     {"n", 2},
                     {"stream_options", {{"include_usage", true}, {"continuous_usage_stats", 1}}}};
  JsonFields fields(body);
  const AnswerOptions options = ReadAnswerOptions(fields);
  EXPECT_TRUE(options.stream);
  EXPECT_TRUE(options.include_usage);
  EXPECT_EQ(options.n, 2);
  EXPECT_EQ(FieldOf(fields.status()), "stream_options.continuous_usage_stats");
}

TEST(GenerateFieldsTest, ErrorsOfTheParserAreInTheWordsOfHttp) {
  const auto said = [](const char* message) {
    return InHttpWords(absl::InvalidArgumentError(message), "prompt");
  };
  const absl::Status top_p = said("sampling.top_p is 3; it must be in [0, 1]");
  EXPECT_EQ(top_p.message(), "top_p is 3; it must be in [0, 1]");
  EXPECT_EQ(FieldOf(top_p), "top_p");
  EXPECT_EQ(FieldOf(said("token_ids.ids[3] is 9; the model's tokens are [0, 9)")), "prompt");
  EXPECT_EQ(FieldOf(said("text: more than 7 tokens")), "prompt");
  EXPECT_EQ(FieldOf(said("the prompt has 9 tokens")), "");
  EXPECT_EQ(InHttpWords(absl::UnavailableError("sampling.x is"), "p").message(), "sampling.x is");
}

TEST(CompletionRequestTest, EveryFormOfAPromptIsRead) {
  const auto parse = [](const json& prompt) { return *ParseCompletion({{"prompt", prompt}}); };
  EXPECT_EQ(parse("a").prompts[0].text(), "a");
  EXPECT_EQ(parse({"a", "b"}).prompts[1].text(), "b");
  EXPECT_THAT(parse({1, 2}).prompts[0].token_ids().ids(), ElementsAre(1, 2));
  const CompletionRequest lists = parse({{1, 2}, {3}});
  ASSERT_EQ(lists.prompts.size(), 2u);
  EXPECT_THAT(lists.prompts[1].token_ids().ids(), ElementsAre(3));
}

TEST(CompletionRequestTest, WhatIsNotServedIsNamed) {
  const auto field = [](json body) {
    body.emplace("prompt", "a");
    return FieldOf(ParseCompletion(body).status());
  };
  EXPECT_EQ(field({{"suffix", "end"}}), "suffix");
  EXPECT_EQ(field({{"best_of", 2}}), "best_of");
  EXPECT_EQ(field({{"use_beam_search", true}}), "use_beam_search");
  EXPECT_EQ(field({{"prompt", {"a", 1}}}), "prompt");
  EXPECT_EQ(field({{"prompt", json::array({"a", "b"})}, {"n", kMostChoices}}), "n");
  EXPECT_EQ(FieldOf(ParseCompletion(json::object()).status()), "prompt");
}

TEST(CompletionRequestTest, SwitchesOfTextAreSetForTextOnly) {
  const json body = {{"prompt", json::array({"a", json::array({1})})},
                     {"add_special_tokens", false},
                     {"parse_special_tokens", false},
                     {"max_tokens", 3}};
  const CompletionRequest completion = *ParseCompletion(body);
  EXPECT_FALSE(completion.prompts[0].add_special_tokens());
  EXPECT_TRUE(completion.prompts[0].has_parse_special_tokens());
  EXPECT_FALSE(completion.prompts[1].has_add_special_tokens());
  EXPECT_EQ(completion.prompts[1].sampling().max_tokens(), 3u);
}

TEST(ErrorReplyTest, StatusesAreThoseOfHttp) {
  EXPECT_EQ(ErrorReply(absl::UnauthenticatedError("")).status, 401);
  EXPECT_EQ(ErrorReply(absl::AlreadyExistsError("")).status, 409);
  EXPECT_EQ(ErrorReply(absl::InternalError("")).status, 500);
  EXPECT_EQ(ErrorReply(absl::ResourceExhaustedError("never fits")).status, 400);
  const HttpReply full = ErrorReply(
      proto::WithRetryDelay(absl::ResourceExhaustedError("the queue is full"), absl::Seconds(7)));
  EXPECT_EQ(full.status, 429);
  EXPECT_EQ(full.retry_after, absl::Seconds(7));
  EXPECT_TRUE(ErrorReply(absl::UnavailableError("")).retry_after.has_value());
  EXPECT_FALSE(ErrorReply(absl::InternalError("")).retry_after.has_value());
}

}  // namespace
}  // namespace kvasir::coordinator
