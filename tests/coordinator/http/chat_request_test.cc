#include "coordinator/http/requests/chat_request.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "coordinator/http/transport/error_reply.h"

namespace kvasir::coordinator {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

constexpr char kMessages[] = R"("messages": [{"role": "user", "content": "hi"}])";

JsonBody Body(const std::string& text) {
  absl::StatusOr<JsonBody> body = ParseBody(text);
  EXPECT_EQ(body.status(), absl::OkStatus());
  return *std::move(body);
}

ChatRequest Parse(const std::string& members) {
  absl::StatusOr<ChatRequest> chat = ParseChat(Body(absl::StrCat("{", members, "}")));
  EXPECT_EQ(chat.status(), absl::OkStatus());
  return *std::move(chat);
}

json ErrorOf(const std::string& members) {
  const absl::Status status = ParseChat(Body(absl::StrCat("{", members, "}"))).status();
  EXPECT_EQ(HttpStatusOf(status), 400);
  return json::parse(ErrorJson(status))["error"];
}

// Templates print tools with their keys in the order in which the client wrote them.
TEST(JsonBodyTest, TheTextOfAMemberIsAsTheClientWroteIt) {
  const JsonBody body = Body(
      R"( { "a" : {"z": 1, "b": "}\"]"} , "\u0061b":[ {"c":"\\"},"{"],"n": null, "t" : true} )");
  EXPECT_EQ(body.MemberText("a"), R"({"z": 1, "b": "}\"]"})");
  EXPECT_EQ(body.MemberText("ab"), R"([ {"c":"\\"},"{"])");
  EXPECT_EQ(body.MemberText("t"), "true");
  EXPECT_EQ(body.MemberText("n"), "");
  EXPECT_EQ(body.MemberText("absent"), "");
}

TEST(ChatRequestTest, TheConversationKeepsItsText) {
  const ChatRequest chat = Parse(
      R"("tools": [{"type": "function", "function": {"z": 1, "a": 2}}], "chat_template_kwargs": {"y": 1, "b": 2},)"
      R"("messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": false)");
  const v1::ChatInput& input = chat.request.chat();
  EXPECT_EQ(input.messages(), R"([{"role": "user", "content": "hi"}])");
  EXPECT_EQ(input.tools(), R"([{"type": "function", "function": {"z": 1, "a": 2}}])");
  EXPECT_EQ(input.template_kwargs(), R"({"y": 1, "b": 2})");
  EXPECT_FALSE(input.add_generation_prompt());
  EXPECT_EQ(Parse(absl::StrCat(kMessages, R"(,"tools": [{}], "tool_choice": "none")"))
                .request.chat()
                .tools(),
            "");
}

TEST(ChatRequestTest, NumbersReachTheRequest) {
  const auto sampling = [](const std::string& members) {
    return Parse(absl::StrCat(kMessages, members)).request.sampling();
  };
  EXPECT_FALSE(sampling("").has_max_tokens());
  EXPECT_EQ(sampling(R"(,"max_tokens": 5)").max_tokens(), 5u);
  EXPECT_EQ(sampling(R"(,"max_tokens": 5, "max_completion_tokens": 7)").max_tokens(), 7u);
  EXPECT_FALSE(sampling(R"(,"logprobs": false, "top_logprobs": 0)").has_logprobs());
  EXPECT_EQ(sampling(R"(,"logprobs": true)").logprobs(), 0u);
  EXPECT_TRUE(sampling(R"(,"logprobs": true)").has_logprobs());
  EXPECT_EQ(sampling(R"(,"logprobs": true, "top_logprobs": 4)").logprobs(), 4u);
  EXPECT_EQ(Parse(absl::StrCat(kMessages, R"(,"n": 3, "stream": true)")).options.n, 3);
}

TEST(ChatRequestTest, WhatIsNotServedIsNamed) {
  const auto field = [](const std::string& members) {
    return ErrorOf(absl::StrCat(kMessages, ",", members))["param"];
  };
  EXPECT_EQ(field(R"("top_logprobs": 4)"), "top_logprobs");
  EXPECT_EQ(field(R"("logprobs": 4)"), "logprobs");
  EXPECT_EQ(field(R"("response_format": {"type": "json_object"})"), "response_format");
  EXPECT_EQ(field(R"("response_format": "text")"), "response_format");
  EXPECT_EQ(field(R"("tools": {})"), "tools");
  EXPECT_EQ(field(R"("tool_choice": {"type": "function"})"), "tool_choice");
  EXPECT_EQ(field(R"("functions": [])"), "functions");
  EXPECT_EQ(field(R"("chat_template_kwargs": 1)"), "chat_template_kwargs");
  for (const char* messages : {R"("messages": [])", R"("messages": {})", R"("prompt": "hi")"}) {
    EXPECT_EQ(ErrorOf(messages)["param"], "messages");
  }
}

TEST(ChatRequestTest, OnlyPartsOfTextAreTaken) {
  const auto with = [](const std::string& part) {
    return absl::StrCat(R"("messages": [{"role": "user", "content": [)", part, "]}]");
  };
  Parse(with(R"({"type": "text", "text": "a"})"));
  const json error = ErrorOf(with(R"({"type": "text", "text": "a"}, {"type": "image_url"})"));
  EXPECT_EQ(error["param"], "messages");
  EXPECT_THAT(error["message"].get<std::string>(),
              HasSubstr("messages[0].content[1] has type \"image_url\""));
  ErrorOf(with(R"({"type": 5})"));
}

}  // namespace
}  // namespace kvasir::coordinator
