#include "coordinator/model_folder.h"

#include <filesystem>
#include <fstream>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class ModelFolderTest : public ::testing::Test {
 protected:
  ModelFolderTest() { std::filesystem::create_directories(folder_); }
  ~ModelFolderTest() override { std::filesystem::remove_all(folder_); }
  void Write(const std::string& name, const std::string& text) const {
    std::ofstream(absl::StrCat(folder_, "/", name)) << text;
  }
  const std::string folder_ =
      absl::StrCat(::testing::TempDir(), "/kvasir_model_folder_test.", getpid(), ".",
                   ::testing::UnitTest::GetInstance()->current_test_info()->name());
};

TEST_F(ModelFolderTest, GenerationConfigComesFirst) {
  Write("config.json", R"({"eos_token_id": 1})");
  EXPECT_THAT(LoadModelFolder(folder_)->eos_token_ids, ElementsAre(1));
  Write("generation_config.json", R"({"eos_token_id": [2, 3]})");
  EXPECT_THAT(LoadModelFolder(folder_)->eos_token_ids, ElementsAre(2, 3));
  Write("generation_config.json", R"({"eos_token_id": null})");
  EXPECT_THAT(LoadModelFolder(folder_)->eos_token_ids, ElementsAre(1));
}

TEST_F(ModelFolderTest, AModelMayHaveNone) {
  Write("config.json", "{}");
  EXPECT_THAT(LoadModelFolder(folder_)->eos_token_ids, IsEmpty());
}

TEST_F(ModelFolderTest, ConfigSaysWhatTheModelIs) {
  Write("config.json", R"({"model_type": "llama", "architectures": ["LlamaForCausalLM", 7]})");
  EXPECT_EQ(LoadModelFolder(folder_)->model_type, "llama");
  EXPECT_THAT(LoadModelFolder(folder_)->architectures, ElementsAre("LlamaForCausalLM"));
  for (const char* text : {R"({"model_type": 7, "architectures": null})", "{}"}) {
    Write("config.json", text);
    ASSERT_TRUE(LoadModelFolder(folder_).ok()) << text;
    EXPECT_EQ(LoadModelFolder(folder_)->model_type, "");
    EXPECT_THAT(LoadModelFolder(folder_)->architectures, IsEmpty());
  }
}

TEST_F(ModelFolderTest, AFolderWithoutConfigIsNoModel) {
  EXPECT_EQ(LoadModelFolder(folder_).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(ModelFolderTest, MinusOneStandsForNoToken) {
  Write("config.json", R"({"eos_token_id": [-1, 7]})");
  EXPECT_THAT(LoadModelFolder(folder_)->eos_token_ids, testing::ElementsAre(7));
}

TEST_F(ModelFolderTest, AnythingElseIsRefused) {
  for (const char* text : {"", "[]", "{", R"({"eos_token_id": "x"})", R"({"eos_token_id": -2})",
                           R"({"eos_token_id": 1.5})", R"({"eos_token_id": [[1]]})",
                           R"({"eos_token_id": 2147483648})"}) {
    Write("config.json", text);
    EXPECT_EQ(LoadModelFolder(folder_).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

std::string Rendered(const ModelFolder& folder, absl::string_view tools = "") {
  const auto text =
      folder.chat.Render({.messages = R"([{"role": "user"}])", .tools = tools}, absl::UnixEpoch());
  return text.ok() ? std::string(text->bytes()) : std::string(text.status().message());
}

TEST_F(ModelFolderTest, TheChatTemplateIsReadFromOneOfThreeFiles) {
  Write("config.json", "{}");
  EXPECT_THAT(Rendered(*LoadModelFolder(folder_)), HasSubstr("no chat template"));
  Write("tokenizer_config.json",
        R"({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": null,
            "chat_template": "a{{ bos_token }}{{ eos_token }}{{ unk_token }}"})");
  EXPECT_EQ(Rendered(*LoadModelFolder(folder_)), "a<s></s>");
  Write("chat_template.json", R"({"chat_template": "b{{ bos_token }}"})");
  EXPECT_EQ(Rendered(*LoadModelFolder(folder_)), "b<s>");
  Write("chat_template.jinja", "c{{ bos_token }}");
  EXPECT_EQ(Rendered(*LoadModelFolder(folder_)), "c<s>");
}

TEST_F(ModelFolderTest, ANamedTemplateIsForConversationsWithTools) {
  Write("config.json", "{}");
  Write("tokenizer_config.json",
        R"({"chat_template": [1, {"name": "tool_use", "template": "with"},
                              {"name": "default", "template": "without"}]})");
  const ModelFolder folder = *LoadModelFolder(folder_);
  EXPECT_EQ(Rendered(folder), "without");
  EXPECT_EQ(Rendered(folder, "[]"), "with");
  Write("tokenizer_config.json", R"({"chat_template": [{"name": 1, "template": 2}]})");
  EXPECT_THAT(Rendered(*LoadModelFolder(folder_)), HasSubstr("no chat template"));
}

}  // namespace
}  // namespace kvasir::coordinator
