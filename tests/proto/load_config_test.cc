#include "proto/load_config.h"

#include <cstdio>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proto/kvasir/v1/config.pb.h"
#include "proto/kvasir/v1/sparsity.pb.h"

namespace kvasir::proto {
namespace {

using ::testing::HasSubstr;

class LoadConfigTest : public ::testing::Test {
 protected:
  absl::StatusOr<LoadedConfig> Load(std::vector<std::string> args) {
    return LoadConfig({.args = std::move(args),
                       .getenv = [this](const char* name) -> const char* {
                         const auto it = environment_.find(name);
                         return it == environment_.end() ? nullptr : it->second.c_str();
                       }},
                      config_);
  }
  std::string WriteFile(const std::string& text) {
    const std::string path = ::testing::TempDir() + "/load_config_test.yaml";
    std::ofstream(path) << text;
    return path;
  }

  std::map<std::string, std::string> environment_;
  v1::ServeConfig config_;
};

TEST_F(LoadConfigTest, EveryDefaultOfTheSchemaIsValid) {
  ASSERT_TRUE(Load({"--model=m"}).ok());
  EXPECT_EQ(config_.scheduler().max_num_batched_tokens(), 0u);
  EXPECT_TRUE(config_.scheduler().enable_prefix_caching());
  EXPECT_EQ(config_.rank_timeout(), 4);
  v1::WorkerConfig worker;
  v1::GenerateCommandConfig generate;
  for (google::protobuf::Message* message :
       std::initializer_list<google::protobuf::Message*>{&worker, &generate}) {
    const auto loaded = LoadConfig(
        {.args = {}, .getenv = [](const char*) -> const char* { return nullptr; }}, *message);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
  }
}

// The flags accept every method that has a field in sparsity.proto.
TEST_F(LoadConfigTest, FlagsOfMethodsTakeEveryMethod) {
  const std::vector<std::pair<std::string, std::string>> flags = {
      {"--sparse-selector", "selector"},
      {"--sparse-prefill-selector", "selector"},
      {"--sparse-terminate", "terminator"}};
  for (const auto& [flag, kind] : flags) {
    const auto* methods = v1::AttentionPolicy::descriptor()->FindOneofByName(kind);
    ASSERT_GT(methods->field_count(), 0);
    for (int i = 0; i < methods->field_count(); ++i) {
      const auto loaded = Load({"--model=m", flag + "=" + methods->field(i)->name()});
      EXPECT_TRUE(loaded.ok()) << loaded.status();
    }
    EXPECT_THAT(std::string(Load({"--model=m", flag + "=other"}).status().message()),
                HasSubstr(methods->field(methods->field_count() - 1)->name()));
  }
  EXPECT_TRUE(Load({"--model=m", "--sparse-terminate=none"}).ok());
}

TEST_F(LoadConfigTest, FlagBeatsEnvironmentBeatsFileBeatsDefault) {
  const std::string file = WriteFile("max-num-seqs: 3\nmax-queue-len: 3\nport: 3\nmodel: m\n");
  environment_ = {{"KVASIR_MAX_QUEUE_LEN", "4"}, {"KVASIR_PORT", "4"}};
  const auto loaded = Load({"--config", file, "--port=5"});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(config_.scheduler().max_num_seqs(), 3u);
  EXPECT_EQ(config_.scheduler().max_queue_len(), 4u);
  EXPECT_EQ(config_.endpoint().port(), 5u);
  EXPECT_EQ(loaded->origins.at("max-num-seqs"), "file");
  EXPECT_EQ(loaded->origins.at("max-queue-len"), "environment");
  EXPECT_EQ(loaded->origins.at("port"), "flag");
  EXPECT_EQ(loaded->origins.at("host"), "default");
}

TEST_F(LoadConfigTest, VariablesOfOtherProgramsServeWhereOursAreNotSet) {
  environment_ = {{"OTEL_SERVICE_NAME", "all"}, {"OTEL_EXPORTER_OTLP_ENDPOINT", "http://all:1"}};
  ASSERT_TRUE(Load({"--model=m"}).ok());
  EXPECT_EQ(config_.otlp().otlp_service_name(), "all");
  EXPECT_EQ(config_.otlp().otlp_endpoint(), "http://all:1");
  environment_["KVASIR_OTLP_ENDPOINT"] = "http://ours:1";
  ASSERT_TRUE(Load({"--model=m", "--otlp-service-name=flag"}).ok());
  EXPECT_EQ(config_.otlp().otlp_service_name(), "flag");
  EXPECT_EQ(config_.otlp().otlp_endpoint(), "http://ours:1");
  environment_ = {{"OTEL_SERVICE_NAME", ""}, {"OTEL_EXPORTER_OTLP_ENDPOINT", ""}};
  ASSERT_TRUE(Load({"--model=m"}).ok());
  EXPECT_EQ(config_.otlp().otlp_service_name(), "kvasir");
  EXPECT_EQ(config_.otlp().otlp_endpoint(), "");
}

TEST_F(LoadConfigTest, AliasesUnderscoresAndSwitches) {
  ASSERT_TRUE(Load({"--model-path", "m", "--tp_size", "2", "--no-enable-prefix-caching"}).ok());
  EXPECT_EQ(config_.model().model(), "m");
  EXPECT_EQ(config_.tensor_parallel_size(), 2u);
  EXPECT_FALSE(config_.scheduler().enable_prefix_caching());
}

TEST_F(LoadConfigTest, ErrorsNameTheFlagWhatWasFoundAndWhatIsAccepted) {
  EXPECT_THAT(Load({"--model=m", "--max-num-seqs=0"}).status().message(),
              HasSubstr("--max-num-seqs is '0', expected [1, 1024] sequences"));
  EXPECT_THAT(Load({"--model=m", "--dtype=int3"}).status().message(),
              HasSubstr("expected one of auto, bfloat16, float32"));
  EXPECT_THAT(Load({"--model=m", "--max-num-sqs=1"}).status().message(),
              HasSubstr("did you mean 'max-num-seqs'"));
  EXPECT_THAT(Load({}).status().message(), HasSubstr("--model is required"));
  EXPECT_THAT(Load({"--model"}).status().message(), HasSubstr("--model needs a value"));
  EXPECT_THAT(Load({"m"}).status().message(), HasSubstr("not a flag"));
}

TEST_F(LoadConfigTest, RefusesNumbersThatAreNotWhatTheyClaim) {
  for (const char* value : {"-1", "4294967296", "1e3", "", " ", "nan", "0x10", "1;"}) {
    EXPECT_FALSE(Load({"--model=m", std::string("--max-queue-len=") + value}).ok()) << value;
  }
  for (const char* value : {"nan", "inf", "-0.1", "1.1", "", "x"}) {
    EXPECT_FALSE(Load({"--model=m", std::string("--mass-sample-rate=") + value}).ok()) << value;
  }
}

TEST_F(LoadConfigTest, FileErrorsNameTheFile) {
  EXPECT_THAT(Load({"--config=/nonexistent.yaml"}).status().message(), HasSubstr("nonexistent"));
  EXPECT_FALSE(Load({"--config", WriteFile("[1, 2]")}).ok());
  EXPECT_FALSE(Load({"--config", WriteFile("port: [1]")}).ok());
  EXPECT_THAT(Load({"--config", WriteFile("prot: 1")}).status().message(), HasSubstr("'port'"));
  EXPECT_FALSE(Load({"--config", WriteFile("port: : :")}).ok());
}

TEST_F(LoadConfigTest, PrintedConfigIsReadBack) {
  const auto loaded = Load({"--model=a: b", "--port=7", "--print-config"});
  ASSERT_TRUE(loaded.ok());
  const std::string text = ConfigText(config_, *loaded);
  EXPECT_THAT(text, HasSubstr("port: 7  # flag"));
  v1::ServeConfig first = config_;
  config_.Clear();
  ASSERT_TRUE(Load({"--config", WriteFile(text)}).ok());
  EXPECT_EQ(config_.SerializeAsString(), first.SerializeAsString());
}

TEST_F(LoadConfigTest, HelpNamesEveryFlagWithDefaultAndReason) {
  ASSERT_TRUE(Load({"--help", "--nonsense=1"})->help);
  const std::string help =
      HelpText({.name = "kvasir serve", .summary = "Serves.", .example = "kvasir serve"}, config_);
  EXPECT_THAT(help, HasSubstr("--max-model-len  [0, 16777216] tokens  (default 0)"));
  EXPECT_THAT(help, HasSubstr("--model  (required)"));
  EXPECT_THAT(help, HasSubstr("--max-model-len is KVASIR_MAX_MODEL_LEN."));
  EXPECT_THAT(
      HelpText({.name = "kvasir-worker", .summary = "Computes.", .example = "kvasir-worker"},
               v1::WorkerConfig()),
      HasSubstr("--metrics-host is KVASIR_METRICS_HOST."));
}

// Bug: it aborted.
TEST_F(LoadConfigTest, AFolderIsNoFile) {
  const absl::Status status = Load({"--model=m", "--config=" + ::testing::TempDir()}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
}

// Bug: the second or the first one was dropped silently.
TEST_F(LoadConfigTest, TextThatIsGivenTwiceIsAnError) {
  const absl::Status status = Load({"--model=m", "--model=n"}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("--model is given twice"));
}

TEST_F(LoadConfigTest, ALaterFlagOverridesANumber) {
  ASSERT_TRUE(Load({"--model=m", "--tp-size=1", "--tensor-parallel-size=2"}).ok());
  EXPECT_EQ(config_.tensor_parallel_size(), 2u);
}

TEST_F(LoadConfigTest, ARepeatedFlagTakesEveryValue) {
  v1::GenerateCommandConfig generate;
  const auto load = [&](std::vector<std::string> args) {
    return LoadConfig({.args = std::move(args),
                       .getenv = [this](const char* name) -> const char* {
                         const auto it = environment_.find(name);
                         return it == environment_.end() ? nullptr : it->second.c_str();
                       }},
                      generate);
  };
  ASSERT_TRUE(load({"--stop=a", "--stop", "b, c"}).ok());
  EXPECT_THAT(generate.stop(), ::testing::ElementsAre("a", "b, c"));
  ASSERT_TRUE(load({}).ok());
  EXPECT_EQ(generate.stop_size(), 0);
  const std::string path = WriteFile("stop: [x, y]\n");
  const auto from_file = load({"--config=" + path});
  ASSERT_TRUE(from_file.ok()) << from_file.status();
  EXPECT_THAT(generate.stop(), ::testing::ElementsAre("x", "y"));
  EXPECT_THAT(ConfigText(generate, *from_file), HasSubstr("stop: [x, y]  # file"));
  environment_["KVASIR_STOP"] = "e";
  ASSERT_TRUE(load({"--config=" + path}).ok());
  EXPECT_THAT(generate.stop(), ::testing::ElementsAre("e"));
  ASSERT_TRUE(load({"--config=" + path, "--stop=f"}).ok());
  EXPECT_THAT(generate.stop(), ::testing::ElementsAre("f"));
}

// Bug: the command line always sent seed 0.
TEST_F(LoadConfigTest, WhatIsNotGivenAndHasNoDefaultIsNotSet) {
  v1::GenerateCommandConfig generate;
  const auto load = [&](std::vector<std::string> args) {
    return LoadConfig(
        {.args = std::move(args), .getenv = [](const char*) -> const char* { return nullptr; }},
        generate);
  };
  const auto without = load({});
  ASSERT_TRUE(without.ok());
  EXPECT_FALSE(generate.has_seed());
  EXPECT_THAT(ConfigText(generate, *without), ::testing::Not(HasSubstr("seed")));
  ASSERT_TRUE(load({"--seed=0"}).ok());
  EXPECT_TRUE(generate.has_seed());
}

// Bug: a misspelt variable was ignored silently.
TEST_F(LoadConfigTest, VariablesThatNoCommandReadsAreTold) {
  const auto loaded =
      LoadConfig({.args = {"--model=m"},
                  .getenv = [](const char*) -> const char* { return nullptr; },
                  .variables = {"PATH", "KVASIR_MAX_MODEL_LNE", "KVASIR_MAX_MODEL_LEN",
                                "KVASIR_PROMPT_FILE", "KVASIR_LISTEN"}},
                 config_);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  ASSERT_EQ(loaded->warnings.size(), 1u);
  EXPECT_THAT(loaded->warnings[0], HasSubstr("KVASIR_MAX_MODEL_LNE"));
}

}  // namespace
}  // namespace kvasir::proto
