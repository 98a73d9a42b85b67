// Agreement with `transformers` and Jinja, character by character, as recorded by make_golden.py.
#include <cstdlib>
#include <fstream>
#include <gtest/gtest.h>
#include <iterator>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "nlohmann/json.hpp"

#include "coordinator/chat/chat_template.h"

namespace kvasir::coordinator {
namespace {

using nlohmann::json;

constexpr char kFolder[] = "tests/coordinator/chat/";

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.is_open()) << path;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

const json& Golden() {
  static const json* const golden =
      new json(json::parse(ReadFile(absl::StrCat(kFolder, "golden.json"))));
  return *golden;
}

absl::StatusOr<std::string> Render(const std::string& source, const Conversation& conversation) {
  const auto parsed = ChatTemplate::Parse(source, {{"bos_token", "<s>"}, {"eos_token", "</s>"}});
  if (!parsed.ok()) return parsed.status();
  const auto text = (*parsed)->Render(
      conversation, absl::FromUnixSeconds(Golden()["unix_seconds"].get<int64_t>()));
  if (!text.ok()) return text.status();
  return std::string(text->bytes());
}

class GoldenTest : public testing::TestWithParam<const char*> {};

TEST_P(GoldenTest, TextsAreThoseOfTransformers) {
  const std::string source = ReadFile(absl::StrCat(kFolder, "templates/", GetParam(), ".jinja"));
  const json& expected = Golden()["renderings"][GetParam()];
  ASSERT_EQ(expected.size(), 30);
  for (size_t i = 0; i < expected.size(); ++i) {
    const json& sent = Golden()["conversations"][i];
    SCOPED_TRACE(sent["name"]);
    const std::string messages = sent["messages"];
    const std::string tools = sent["tools"];
    const std::string variables = sent["variables"];
    const auto text =
        Render(source, {.messages = messages,
                        .tools = tools,
                        .variables = variables,
                        .end = sent["add_generation_prompt"] ? Conversation::End::kGenerationPrompt
                                                             : Conversation::End::kLastMessage});
    if (expected[i].contains("text")) {
      EXPECT_EQ(text.status(), absl::OkStatus());
      EXPECT_EQ(text.value_or(""), expected[i]["text"].get<std::string>());
      continue;
    }
    EXPECT_EQ(text.status().code(), absl::StatusCode::kInvalidArgument);
    const std::string message = expected[i]["error"];
    if (!message.empty()) {
      EXPECT_EQ(text.status().message(), message);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Templates, GoldenTest,
                         testing::Values("deepseek", "gemma", "llama3", "mistral", "phi", "qwen2_5",
                                         "qwen3", "smollm2"),
                         [](const auto& test) { return std::string(test.param); });

// The published template of SmolLM2 is smollm2.jinja with another system message.
TEST(SmolLm2Test, ThePublishedTemplateRendersAsOurs) {
  const char* const folder = std::getenv("KVASIR_SMOLLM2");
  if (folder == nullptr) {
    GTEST_SKIP() << "KVASIR_SMOLLM2 names no folder that deploy/fetch_smollm2.sh has written";
  }
  const json config = json::parse(ReadFile(absl::StrCat(folder, "/tokenizer_config.json")));
  for (size_t i = 0; i < Golden()["conversations"].size(); ++i) {
    const json& sent = Golden()["conversations"][i];
    const json& expected = Golden()["renderings"]["smollm2"][i];
    SCOPED_TRACE(sent["name"]);
    const std::string messages = sent["messages"];
    const auto text =
        Render(config["chat_template"],
               {.messages = messages,
                .end = sent["add_generation_prompt"] ? Conversation::End::kGenerationPrompt
                                                     : Conversation::End::kLastMessage});
    EXPECT_EQ(text.ok(), expected.contains("text"));
    if (!text.ok()) continue;
    EXPECT_EQ(*text,
              absl::StrReplaceAll(expected["text"].get<std::string>(),
                                  {{"You are a small model.",
                                    "You are a helpful AI assistant named SmolLM, trained by "
                                    "Hugging Face"}}));
  }
}

TEST(GoldenSnippetsTest, RulesAreThoseOfJinja) {
  for (const json& snippet : Golden()["snippets"]) {
    const std::string source = snippet[0];
    SCOPED_TRACE(source);
    const auto text = Render(source, {.messages = R"([{"role": "user", "content": "x"}])",
                                      .end = Conversation::End::kLastMessage});
    if (snippet[1].is_null()) {
      EXPECT_EQ(text.status().code(), absl::StatusCode::kInvalidArgument);
      continue;
    }
    EXPECT_EQ(text.status(), absl::OkStatus());
    EXPECT_EQ(text.value_or(""), snippet[1].get<std::string>());
  }
}

}  // namespace
}  // namespace kvasir::coordinator
